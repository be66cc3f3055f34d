"""`twostroke quality` on a tiny model: its figures against the same worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import VOCAB_SIZE, same_rounding, tiny_folder, tiny_llm
from twostroke import SamplingParams
from twostroke.cli import main
from twostroke.measure.quality.quality import (
    BaseFile,
    Setup,
    divergence,
    log_softmax,
    measure_quality,
    shipped_text,
)

TEXT = "the quick brown fox reads what a small model writes, and sleeps. " * 12
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("quality") / "tiny")


def distributions(folder: Path, windows: list[list[int]], **settings: object) -> np.ndarray:
    """Log-probabilities of all tokens after each but the first of every window."""
    llm = tiny_llm(folder, max_logprobs=-1, **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    lines = []
    for output in llm.generate(windows, params, use_tqdm=False):
        for entry in (output.prompt_logprobs or [])[1:]:
            lines.append([entry[token].logprob for token in range(VOCAB_SIZE)])
    return np.array(lines)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_figures_are_those_of_the_whole_distributions(folder: Path, kernels: str) -> None:
    tokenizer = tiny_llm(folder).get_tokenizer()
    assert tokenizer is not None
    bos, ids = tokenizer.encode("")[0], tokenizer.encode(TEXT, add_special_tokens=False)[:150]
    windows = [[bos, *ids[start : start + CONTEXT - 1]] for start in (0, 63, 126)]
    targets = np.array([token for window in windows for token in window[1:]])
    base = distributions(folder, windows, kernels="reference")
    settings = {"kv_cache_dtype": "bfloat16"}
    if kernels == "auto":
        settings = {"quantization": "int4"} | same_rounding()
    other = distributions(folder, windows, kernels=kernels, **settings)
    kl = (np.exp(base) * (base - other)).sum(axis=1)

    plain = {"model": str(folder), "kernels": "reference", "max_num_batched_tokens": 40}
    found = measure_quality(
        Setup("base", plain),
        [Setup("other", plain | settings | {"kernels": kernels}), Setup("itself", plain)],
        TEXT,
        CONTEXT,
        len(ids),
    )
    row, itself = found["formats"]
    assert found["scored"] == row["scored"] == len(targets) == 150
    every = np.arange(len(targets))
    perplexities = [math.exp(-lines[every, targets].mean()) for lines in (base, other)]
    assert found["base"]["perplexity"] == pytest.approx(perplexities[0], rel=1e-4)
    assert row["perplexity"] == pytest.approx(perplexities[1], rel=1e-4)
    assert row["perplexity_ratio"] == pytest.approx(perplexities[1] / perplexities[0], rel=1e-4)
    assert kl.mean() > 1e-6
    assert row["kl_mean"] == pytest.approx(kl.mean(), rel=2e-2, abs=2e-6)
    assert row["kl_p99"] == pytest.approx(np.percentile(kl, 99), rel=2e-2, abs=2e-6)
    assert row["same_token"] == np.mean(base.argmax(axis=1) == other.argmax(axis=1))
    assert (itself["same_token"], itself["perplexity_ratio"]) == (1.0, 1.0)
    assert abs(itself["kl_mean"]) < 1e-6


def test_codes_of_sixteen_bits_change_a_divergence_by_a_thousandth_at_most() -> None:
    random = np.random.default_rng(1)
    base = log_softmax(8 * random.standard_normal((20, 5000)).astype(np.float32))
    other = log_softmax(base + 0.05 * random.standard_normal(base.shape).astype(np.float32))
    kept = BaseFile(20, 5000)
    kept.append(base[:7])
    kept.append(base[7:])
    exact = np.array(divergence(base, other))
    found = np.array(divergence(kept.read(0, 20), other))
    assert np.array_equal(np.array(divergence(kept.read(5, 3), other[5:8])), found[5:8])
    kept.close()
    assert exact.mean() > 1e-4
    assert np.abs(found - exact).mean() < 1e-3 * exact.mean() + 1e-6


def test_a_table_a_report_and_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quality", str(folder), "--device", "cpu", "--tokens", "100", "--context", "50"]
    words += ["--try", "--quantization int8", "--html", str(tmp_path / "q.html")]
    assert main([*words, "--quantization", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["formats"]] == ["quantization int4", "quantization int8"]
    assert found["base"]["name"] == "as the file has it"
    assert found["formats"][0]["kl_mean"] > found["formats"][1]["kl_mean"] > 0
    page = (tmp_path / "q.html").read_text()
    assert "quantization int8" in page
    assert "KL from the base" in page
    assert main(words) == 0
    assert "same token" in capsys.readouterr().out


def test_a_precision_a_phase_has_a_line_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quality", str(folder), "--kernels", "reference", "--device", "cpu"]
    words += ["--tokens", "60", "--context", "40", "--decode-quantization", "int4"]
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "in decode differs from that in prefill by 0." in told
    assert "over 18 tokens that it wrote; the figures above are prefill's" in told


def test_what_cannot_be_compared_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_folder(tmp_path / "other", vocab_size=VOCAB_SIZE + 20)
    tokens = ["--tokens", "40", "--context", "40", "--device", "cpu"]
    for words, reason in (
        ([str(folder), "--against", str(other), *tokens], "only over the same vocabulary"),
        ([str(folder), *tokens, "--context", "999"], "max_model_len"),
        ([str(folder), "--context", "1"], "--context must be at least 2"),
        ([str(folder), "--text", str(tmp_path / "none.txt")], "cannot be read"),
    ):
        assert main(["quality", *words]) == 1
        assert reason in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["quality", str(folder), "--try", "--quantization int3"])
    assert "quantization" in capsys.readouterr().err


def test_the_text_ships_and_is_long_enough_for_a_window_of_16k() -> None:
    text = shipped_text()
    assert 64 * 1024 < len(text.encode()) < 128 * 1024
    assert "Call me Ishmael." in text
    assert "class BlockPool:" in text
