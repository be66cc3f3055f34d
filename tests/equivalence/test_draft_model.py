"""With a draft model a request writes the tokens that it writes without: both executors.

Two draft models: the model itself, whose drafts are nearly all accepted, and another random model,
whose drafts are nearly all rejected. Drafts are verified whether they pay or not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.draft.interface import DraftModel
from twostroke.errors import ConfigError, ModelError
from twostroke.kernels import cpu
from twostroke.request import StructuredOutputs
from twostroke.sched.model_drafter import ModelDrafter

needs_native = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)
BACKENDS = [pytest.param("native", marks=needs_native), "reference"]
PROMPTS = [
    "the quick brown fox",
    "a small model writes what it likes and the reader reads it and the dog sleeps over it",
    "the dog",
    "the quick brown fox jumps over the lazy dog and the dog sleeps, a small model writes",
]
WAYS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 12, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 22, "block_size": 8, "max_model_len": 160},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "bias and bans": {"temperature": 0.8, "logit_bias": {70: 3.0}, "bad_words": ["e"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("pair")
    other = tiny_folder(path / "other", num_hidden_layers=1, hidden_size=16)
    return {"same": tiny_folder(path / "model"), "other": other}


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Any:
    @cache
    def make(backend: str, draft: str = "", way: str = "one shot", method: str = "") -> LLM:
        speculation = None
        if draft:
            speculation = {
                "model": str(folders[draft]),
                "num_speculative_tokens": 4,
                "enable_adaptive_verification": False,
            }
            if method:
                speculation["method"] = method
        settings = {"kernels": backend, "device": "cpu", "speculative_config": speculation}
        llm = tiny_llm(folders["same"], **settings, **WAYS[way])
        if way == "preempted":  # admit requests that will not fit to their ends
            scheduler = llm.engine.core.scheduler
            scheduler._prefill._config = replace(scheduler.config, lookahead=0)
        return llm

    return make


def written(llm: LLM, prompts: list[str] = PROMPTS, **params: Any) -> list[tuple[int, ...]]:
    asked = SamplingParams(**({"seed": 5, "max_tokens": 24, "ignore_eos": True} | params))
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    audit(llm)
    return [tuple(one.token_ids) for output in outputs for one in output.outputs]


def model_of(llm: LLM) -> ModelDrafter:
    speculator = llm.engine.core.scheduler.speculator
    assert speculator is not None
    model: DraftModel | None = speculator.model
    assert isinstance(model, ModelDrafter)
    return model


def audit(llm: LLM) -> None:
    """The blocks and rows of both models are free when no request runs."""
    scheduler = llm.engine.core.scheduler
    scheduler.audit()
    assert scheduler.kv.is_idle()
    if scheduler.speculator is not None and scheduler.speculator.model is not None:
        assert model_of(llm).kv.is_idle()


def share_accepted(llm: LLM) -> float:
    """The share of the drafted tokens so far that were accepted."""
    found = [step.drafts for step in llm.engine.core.records.steps if step.drafts is not None]
    assert sum(one.model_s for one in found) > 0
    return sum(sum(one.accepted) for one in found) / sum(one.tokens for one in found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", ["same", "other"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_schedule_with_a_draft_model_gives_the_same_tokens(
    engine: Any, backend: str, draft: str, way: str
) -> None:
    expected = written(engine(backend), temperature=0.8)
    llm = engine(backend, draft, way)
    assert written(llm, temperature=0.8) == expected
    assert written(llm, temperature=0.8) == expected, "with a cached prefix"
    share = share_accepted(llm)
    assert share > 0.9 if draft == "same" else share < 0.3
    records = llm.engine.core.records
    assert any(one.preempted for one in records.requests) == (way == "preempted")
    if way == "chunked and mixed":
        assert any(step.drafts and step.prefill.rows for step in records.steps)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option_of_sampling_gives_the_same_tokens(
    engine: Any, backend: str, option: str
) -> None:
    expected = written(engine(backend), **OPTIONS[option])
    for draft in ("same", "other"):
        assert written(engine(backend, draft), **OPTIONS[option]) == expected


def test_the_same_model_draws_the_same_tokens_with_penalties(engine: Any) -> None:
    """The rows of the draft model count the tokens of the text, not rejected drafts."""
    llm = engine("reference", "same", "one shot", "draft_model,suffix")
    before = len(llm.engine.core.records.requests)
    assert written(llm, **OPTIONS["penalties"]) == written(
        engine("reference"), **OPTIONS["penalties"]
    )
    requests = list(llm.engine.core.records.requests)[before:]
    assert sum(one.accepted for one in requests) > 0.5 * sum(one.drafted for one in requests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_continuations_log_probabilities_and_stop_strings_are_the_same(
    engine: Any, backend: str
) -> None:
    plain, drafting = engine(backend), engine(backend, "same")
    asked = SamplingParams(
        n=3, temperature=0.9, seed=3, max_tokens=20, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (expected,), (got,) = (
        llm.generate([PROMPTS[1]], asked, use_tqdm=False) for llm in (plain, drafting)
    )
    for one, other in zip(expected.outputs, got.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    assert len(got.prompt_logprobs) == len(got.prompt_token_ids)
    text = expected.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    asked = SamplingParams(temperature=0.9, seed=3, max_tokens=20, stop=[stop], ignore_eos=True)
    (expected,), (got,) = (
        llm.generate([PROMPTS[1]], asked, use_tqdm=False) for llm in (plain, drafting)
    )
    assert expected.outputs[0].text == got.outputs[0].text
    assert expected.outputs[0].token_ids == got.outputs[0].token_ids
    audit(drafting)


REGEX = "(the quick brown (fox|dog) (jumps|sleeps) ){3,6}and ends"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grammar_is_kept(engine: Any, backend: str) -> None:
    asked = {"structured_outputs": StructuredOutputs(regex=REGEX), "max_tokens": 150}
    params = {"temperature": 0.9, "ignore_eos": False, **asked}
    expected = written(engine(backend), [PROMPTS[0]], **params)
    drafting = engine(backend, "same")
    assert written(drafting, [PROMPTS[0]], **params) == expected
    assert re.fullmatch(REGEX, drafting.get_tokenizer().decode(list(expected[0])))


@needs_native
def test_an_aborted_request_gives_back_its_place_in_both_models(engine: Any) -> None:
    llm = engine("native", "same")
    core = llm.engine.core
    for name in ("kept", "aborted"):
        request = llm.engine.input_processor.process(PROMPTS[0], SamplingParams(max_tokens=20))
        core.add(replace(request, request_id=name, seed=1))
    ends: list[str] = []
    for _ in range(3):
        ends += [one.request_id for one in core.step() if one.finish_reason is not None]
    update = core.abort("aborted")
    assert update is not None
    while core.has_work:
        ends += [one.request_id for one in core.step() if one.finish_reason is not None]
        core.scheduler.audit()
    assert ends == ["kept"]
    audit(llm)


@needs_native
def test_the_time_of_the_draft_model_is_a_cause_of_the_gaps(engine: Any) -> None:
    llm = engine("native", "same")
    written(llm)
    record = llm.engine.core.records.requests[-1]
    assert record.gaps.drafting > 0
    measured = record.token_s[-1] - record.token_s[0]
    assert sum(record.gaps) == pytest.approx(measured, rel=1e-6)


# ── settings ────────────────────────────────────────────────────────────────────────────────


@needs_native
def test_both_caches_hold_the_same_number_of_tokens(engine: Any) -> None:
    llm = engine("native", "other")
    memory, kv = llm.engine.memory, model_of(llm).kv
    assert [pool.num_blocks for pool in kv.pools] == [memory.group_blocks[0]]
    assert f"draft model {memory.draft_bytes / 2**30:.2f} GiB" in memory.waterfall()
    assert llm.engine.info().draft_bytes == memory.draft_bytes > 0


def refused(folders: dict[str, Path], **settings: Any) -> str:
    with pytest.raises((ConfigError, ModelError)) as error:
        tiny_llm(folders["same"], device="cpu", **settings)
    return str(error.value)


def test_a_draft_model_that_cannot_work_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"model": str(tmp_path / "missing.gguf")}
    assert "the draft model: no such file" in refused(folders, speculative_config=missing)
    foreign = tiny_folder(tmp_path / "foreign")
    path = foreign / "tokenizer.json"
    entry = '"fox":'
    text = path.read_text(encoding="utf-8")
    assert entry in text or '"the"' in text
    word = "fox" if entry in text else "the"
    text = text.replace(f'"{word}":', f'"{word[::-1]}x":', 1)
    text = re.sub(r'"merges":\s*\[.*\]', '"merges": []', text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")
    message = refused(folders, speculative_config={"model": str(foreign)})
    assert "foreign has another vocabulary than model" in message
    same = {"model": str(folders["same"])}
    ranks = refused(folders, speculative_config=same, tensor_parallel_size=2)
    assert "a draft model does not support several ranks yet" in ranks
    pools = refused(folders, speculative_config=same, kv_sharing="shared")
    assert "its KV cache cannot be sent between engines" in pools
    from twostroke.engine import build_native, build_torch

    for build in (build_native, build_torch):
        monkeypatch.setattr(build, "host_memory_bytes", lambda: 200_000)
    assert "those of the draft model" in refused(folders, speculative_config=same)
