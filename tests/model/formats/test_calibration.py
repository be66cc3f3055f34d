"""`calibration`: the unquantised model reads a text, and weights are rounded with regard to what
they are multiplied with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equivalence.harness import small_spec
from tests.equivalence.rank_threads import RankThreads
from tests.loud import Loud
from tests.model.weights.quantised_folders import REFERENCE, opened, refusal
from tests.model.weights.test_w8a8_checkpoints import folder_of
from tests.tiny import BOS_ID, tiny_folder, tiny_llm
from twostroke import SamplingParams
from twostroke.config import EngineConfig
from twostroke.engine import build_native
from twostroke.errors import ConfigError
from twostroke.kernels import cpu, packed, w8a8
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.formats.calibration import READ_BYTES, read_text
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.torch import load_layers
from twostroke.model.torch.importance import DAMPING, measure_importance
from twostroke.model.weights.rounding import rounded_blocks

CPU, FP32 = torch.device("cpu"), torch.float32
WORDS = "the dog sleeps and a small model writes what the reader reads 東京 12 345, naïve\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("calibration") / "tiny")


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    path = folder.parent / "text.txt"
    path.write_text(30 * WORDS, encoding="utf-8")
    return path


# ── rounding ────────────────────────────────────────────────────────────────────────────────


def int4(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    return packed.dequantised(packed.pack(packed.quantised(x, 32, importance)), FP32)


def eight_bits(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def rounded(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        values, scale = w8a8.quantised(x, dtype, importance)
        return w8a8.dequantised(values, scale.unsqueeze(1), FP32)

    return rounded


def blocks(type: BlockType) -> Callable[..., torch.Tensor]:
    def rounded(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
        counts = np.ones(x.shape[1], np.float32) if importance is None else importance.numpy()
        found = rounded_blocks(type, x.numpy(), counts)
        return torch.from_numpy(dequantize(found, type, tuple(x.shape)))

    return rounded


@pytest.mark.parametrize(
    ("rounded", "gain"),
    [
        (int4, 0.9),
        (eight_bits(torch.int8), 0.9),
        (eight_bits(torch.float8_e4m3fn), 0.995),
        (blocks(BlockType.Q4_1), 0.8),
        (blocks(BlockType.Q8_0), 0.99),
    ],
    ids=["int4", "int8", "fp8", "Q4_1", "Q8_0"],
)
def test_errors_go_where_they_count_little(
    rounded: Callable[..., torch.Tensor], gain: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 128, generator=generator)
    importance = torch.randn(128, generator=generator).mul(2).exp()
    x[:, importance < importance.median()] *= 3  # what is large and counts little

    def error(found: torch.Tensor, counts: torch.Tensor) -> float:
        return float(((found - x).square() @ counts).sum())

    weighed, plain = rounded(x, importance), rounded(x, None)
    assert error(weighed, importance) < gain * error(plain, importance)
    assert error(weighed, torch.ones(128)) >= error(plain, torch.ones(128))
    if rounded is int4:  # where all count the same, nothing changes
        assert torch.equal(rounded(x, torch.ones(128)), plain)


def test_blocks_of_4_bits_are_nearer_than_those_between_least_and_largest() -> None:
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    ours = blocks(BlockType.Q4_1)(torch.from_numpy(x), None).numpy()
    least, most = (f(x.reshape(64, 3, 32), axis=2, keepdims=True) for f in (np.min, np.max))
    steps = np.rint((x.reshape(64, 3, 32) - least) / (most - least) * 15)
    plain = (steps / 15 * (most - least) + least).reshape(x.shape)
    assert ((ours - x) ** 2).sum() < 0.9 * ((plain - x) ** 2).sum()
    assert not rounded_blocks(BlockType.Q4_1, np.zeros((1, 32), np.float32), x[0, :32] ** 2).any()
    with pytest.raises(ValueError, match="NaN"):
        rounded_blocks(BlockType.Q4_1, np.full((1, 32), np.nan, np.float32), x[0, :32] ** 2)


# ── what a matrix is multiplied with ────────────────────────────────────────────────────────


def test_the_mean_square_of_each_input_is_found_and_each_layer_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    loader = load_layers.LayerLoader
    plain = loader.layer
    monkeypatch.setattr(loader, "layer", lambda self, n: read.append(n) or plain(self, n))
    spec, source = load_hf_config(folder)[0], opened(folder)
    windows = [[BOS_ID, *range(5, 40)], [BOS_ID, *range(100, 135)]]
    found = measure_importance(spec, source, windows, FP32, CPU, 64)
    assert read == [0, 1]
    shapes = spec.weight_shapes()
    assert {name: (shapes[name][1],) for name in shapes if name.endswith("down")} == {
        name: tuple(counts.shape) for name, counts in found.items() if name.endswith("down")
    }
    embed, norm = (source.floats(name) for name in ("embed", "layers.0.attn_norm"))
    x = embed[np.concatenate(windows)]
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm
    square = (x**2).mean(0)
    expected = square + DAMPING * square.mean()
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(found[f"layers.0.{name}"], expected, rtol=1e-4)
    # Windows do not see each other: their mean is that of each alone.
    alone = [measure_importance(spec, source, [one], FP32, CPU, 64) for one in windows]
    for name, counts in found.items():
        torch.testing.assert_close(counts, (alone[0][name] + alone[1][name]) / 2)


def test_ranks_find_the_inputs_of_their_parts(tmp_path: Path) -> None:
    spec = small_spec()
    how = ([[5, 6, 7, 8] * 8], FP32, CPU, 64, None)
    whole = measure_importance(spec, Loud(spec), *how)
    parts: dict[int, dict[str, torch.Tensor]] = {}
    threads = RankThreads(2, tmp_path)
    threads.run(
        lambda ranks: parts.update({ranks.rank: measure_importance(spec, Loud(spec), *how, ranks)})
    )
    threads.close()
    for name in ("layers.0.q", "layers.1.up"):
        torch.testing.assert_close(parts[1][name], whole[name])
    for name in ("layers.0.o", "layers.1.down"):
        both = torch.cat([undamped(parts[rank][name]) for rank in (0, 1)])
        torch.testing.assert_close(both, undamped(whole[name]))


def undamped(counts: torch.Tensor) -> torch.Tensor:
    return counts - DAMPING / (1 + DAMPING) * counts.mean()


# ── an engine ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_weights_are_rounded_for_what_the_text_shows(
    folder: Path, text: Path, quantization: str
) -> None:
    how = {**REFERENCE, "quantization": quantization}
    plain, calibrated = tiny_llm(folder, **how), tiny_llm(folder, **how, calibration=text)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(calibrated.generate(["the dog"], params)[0].outputs[0].token_ids) == 4
    tokenizer, source = calibrated.get_tokenizer(), opened(folder)
    assert tokenizer is not None
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:256]
    spec, _ = load_hf_config(folder)
    importance = measure_importance(spec, source, [ids], FP32, CPU, 256)
    errors = []
    for llm in (plain, calibrated):
        program = llm.engine.core._executor.program  # type: ignore[attr-defined]
        weight = program.decoder._layers[1].mlp.down.weight
        if quantization == "int4":
            numbers = packed.dequantised(weight, FP32)
        else:
            numbers = w8a8.dequantised(weight.values, weight.scale, FP32)
        error = (numbers - torch.from_numpy(source.floats("layers.1.down"))).square()
        errors.append(float((error @ importance["layers.1.down"]).sum()))
    assert errors[1] <= errors[0] if quantization == "int8" else errors[1] < errors[0]


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_native_kernels_take_it(folder: Path, text: Path, quantization: str) -> None:
    """Nearer to the weights as they are than without: of log-probabilities of the text."""
    if not cpu.available():
        pytest.skip("no native kernels")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rounded = {"quantization": quantization}
    rows = []
    for more in ({}, rounded, {**rounded, "calibration": str(text)}):
        llm = tiny_llm(folder, device="cpu", exact=True, **more)
        (out,) = llm.generate([3 * WORDS], params)
        assert out.prompt_logprobs is not None
        rows.append([next(iter(one.values())).logprob for one in out.prompt_logprobs[1:] if one])
    plain, calibrated = (np.square(np.subtract(row, rows[0])).mean() for row in rows[1:])
    assert 0 < calibrated < plain * (1 if quantization == "int4" else 1.05)


def test_both_phases_formats_are_made_with_it(folder: Path, text: Path) -> None:
    both = {"prefill_quantization": "fp8", "decode_quantization": "int4"}
    llm = tiny_llm(folder, **REFERENCE, **both, calibration=text)
    assert llm.engine.info().weights == "prefill fp8 + decode int4, from float32"
    config = EngineConfig(decode_quantization="int4", calibration=str(text))
    assert config.for_phase("decode").calibration == str(text)
    assert config.for_phase("prefill").calibration is None


# ── the text ────────────────────────────────────────────────────────────────────────────────


def test_lines_of_json_are_texts_and_a_long_file_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": "one\u2028more", "id": 1}), "", json.dumps({"text": "zwei"})]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_text(path) == "one\u2028more\n\nzwei"
    path.write_text((json.dumps({"text": "ä" * 1000}) + "\n") * 2000)
    assert READ_BYTES // 7 < len(read_text(path)) < READ_BYTES
    long = tmp_path / "long.txt"
    long.write_text("a" + "ä" * READ_BYTES, encoding="utf-8")  # the last one is cut in two
    assert read_text(long) == "a" + "ä" * (READ_BYTES // 2 - 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "cannot be read: No such file"),
        ("empty.txt", b" \n", "is empty; give a text"),
        ("empty.jsonl", b"\n", "is empty; give a text"),
        ("short.txt", b"the dog", "too few to calibrate with; give a text of at least 255"),
        ("binary.txt", b"\x80\xff\x00" * 999, "is not text in UTF-8; give a text file"),
        ("zeros.txt", bytes(999), "is not text in UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"content": "b"}\n', "line 2 of"),
        ("list.jsonl", b"[1]", 'is not a JSON object with a "text"'),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = refusal(folder, quantization="int4", calibration=tmp_path / name)
    assert said.startswith("calibration: ")
    assert words in said
    assert name in said


def test_models_that_have_nothing_to_calibrate_are_refused_by_name(
    tmp_path: Path, text: Path, folder: Path
) -> None:
    quantised, _ = folder_of(tmp_path, "compressed, a channel")
    how = {"quantization": "fp8", "calibration": text}
    assert "is quantised already (fp8); leave it out" in refusal(quantised, **how)
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = tiny_folder(tmp_path / "experts", **experts)
    how["quantization"] = "int4"
    if cpu.available():
        assert "does not support experts yet" in refusal(mixture, **how, kernels="native")
    assert "there is no tokenizer" in refusal(folder, **how, skip_tokenizer_init=True)


def test_it_needs_a_quantization_and_torch(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="but there is no quantization; give quantization"):
        EngineConfig(calibration=str(text))
    with pytest.raises(ConfigError, match="calibration must be a string or None"):
        EngineConfig(calibration=3, quantization="int4")  # type: ignore[arg-type]
    if cpu.available():
        monkeypatch.setattr(build_native, "has_torch", lambda: False)
        said = refusal(folder, kernels="native", quantization="int4", calibration=text)
        assert "torch is not installed: pip install 'twostroke[reference]'" in said
