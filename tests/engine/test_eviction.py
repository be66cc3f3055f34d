"""`kv_eviction` on real engines: fewer blocks, the same tokens however a request is scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MAX_LEN, tiny_folder, tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.errors import ConfigError, RequestError
from twostroke.kernels import cpu

BUDGET, BLOCK = 64, 16
PROMPT = [(7 * n * n + 3 * n) % 290 + 4 for n in range(40)]
LONG = [(5 * n * n + n) % 290 + 4 for n in range(100)]  # above the budget
WRITES = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=0)
NATIVE = pytest.param("native", marks=pytest.mark.skipif(not cpu.available(), reason="not built"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("eviction") / "tiny")


def evicting(folder: Path, kernels: str = "auto", **more: Any) -> LLM:
    exact = kernels == "native" or (kernels == "auto" and cpu.available())
    settings = {"kv_eviction": "sinks", "kv_eviction_budget": BUDGET, "block_size": BLOCK}
    return tiny_llm(folder, kernels=kernels, exact=exact, **(settings | more))


def written(llm: LLM, *prompts: list[int]) -> list[list[int]]:
    outputs = llm.generate(list(prompts), WRITES, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The expected tokens: each request alone, with plain torch."""
    llm = evicting(folder, "reference")
    return [written(llm, prompt)[0] for prompt in (PROMPT, LONG)]


@pytest.mark.parametrize("kernels", [NATIVE, "reference"])
def test_a_request_that_writes_keeps_to_its_budget(
    folder: Path, kernels: str, expected: list[list[int]]
) -> None:
    llm, most = evicting(folder, kernels), 0
    for prompt, tokens in zip((PROMPT, LONG), expected, strict=True):
        held, got = [], []
        for output in llm.stream(prompt, WRITES):
            usage = llm.kv_usage()
            held.append(usage.used + usage.fragmented)
            got += output.outputs[0].token_ids
            llm.engine.core.scheduler.audit()
        assert got == tokens
        assert max(held[1:-1]) <= BUDGET
        assert held[-2] == BUDGET
        record = output.records[0]
        gone = len(prompt) + 119 - record.kv_evicted_tokens
        assert 0 <= BUDGET - gone < BLOCK
        most += record.kv_evicted_tokens
    told = {metric.name: metric for metric in llm.get_metrics()}
    assert told["twostroke:kv_evicted_tokens"].value == most > 0
    # Negative control: without eviction the evicted tokens change the result.
    assert written(tiny_llm(folder, kernels=kernels, block_size=BLOCK), PROMPT)[0] != expected[0]


def test_below_the_budget_nothing_changes(folder: Path) -> None:
    short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = tiny_llm(folder, block_size=BLOCK).generate([PROMPT], short, use_tqdm=False)[0]
    llm = tiny_llm(folder, block_size=BLOCK, kv_eviction="sinks", kv_eviction_budget=BUDGET)
    got = llm.generate([PROMPT], short, use_tqdm=False)[0]
    assert got.outputs[0].token_ids == plain.outputs[0].token_ids
    assert got.records[0].kv_evicted_tokens == 0


@pytest.mark.parametrize("kernels", [NATIVE, "reference"])
def test_a_preempted_request_writes_the_same_tokens(
    folder: Path, kernels: str, expected: list[list[int]]
) -> None:
    """Its tokens are recomputed by prefill, with the same cache entries in sight."""
    llm = evicting(folder, kernels)
    scheduler = llm.engine.core.scheduler
    for prompt, tokens in zip((PROMPT, LONG), expected, strict=True):
        got: list[int] = []
        for output in llm.stream(prompt, WRITES):
            got += output.outputs[0].token_ids
            if len(got) in (10, 50, 90):
                scheduler._preempt(scheduler._decode.requests.pop(), 0.0)
            scheduler.audit()
        assert got == tokens
        record = output.records[0]
        assert len(record.preempted) == 3
        assert 0 <= BUDGET - (len(prompt) + 119 - record.kv_evicted_tokens) < BLOCK
    assert written(llm, PROMPT, LONG, PROMPT) == [expected[0], expected[1], expected[0]]


@pytest.mark.full
@pytest.mark.skipif(not cpu.available(), reason="not built")
def test_heavy_hitters_are_kept_although_they_are_old(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    sizes = {"kv_eviction_budget": 256, "max_model_len": 2 * MAX_LEN}
    llm = evicting(folder, "native", kv_eviction="heavy-hitters", **sizes)
    logs, texts = [], []
    for preempted_at in (0, 290):
        text: list[int] = []
        for output in llm.stream(PROMPT, params):
            text += output.outputs[0].token_ids
            scheduler = llm.engine.core.scheduler
            if len(text) == preempted_at:
                scheduler._preempt(scheduler._decode.requests.pop(), 0.0)
            scheduler.audit()
            if scheduler._decode.requests:
                request = scheduler._decode.requests[0]
                assert len(request.kv.tables[0]) <= 256 // BLOCK
        logs.append(request.evictions)
        texts.append(text)
        assert output.records[0].kv_evicted_tokens == 2 * 64
    # 40 + 299 tokens on 256: two stretches of 64 go, each as soon as the next block is needed. Of
    # what is between the first and the newest 128, that with the least attention.
    assert list(logs[0]) == [256, 320]
    assert all(len(gone) == 1 and len(gone[0]) == 4 for gone in logs[0].values())
    assert all(gone[0].start in (4, 8) for gone in logs[0].values())
    # What was evicted before a preemption is evicted again; the text goes on.
    assert logs[1] == logs[0]
    assert texts[1][:291] == texts[0][:291]
    assert len(texts[1]) == 300
    with pytest.raises(ConfigError, match="native kernels of a CPU"):
        evicting(folder, "reference", kv_eviction="heavy-hitters", kv_eviction_budget=256)


def test_tokens_written_after_an_eviction_are_not_a_prefix(
    folder: Path, expected: list[list[int]]
) -> None:
    llm = evicting(folder)
    written(llm, PROMPT)
    whole = [*PROMPT, *expected[0]]
    again = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    fresh = evicting(folder, enable_prefix_caching=False)
    first, second = (one.generate([whole], again, use_tqdm=False)[0] for one in (llm, fresh))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    # Blocks that were full before the first eviction are found; those after it are not.
    assert 0 < first.num_cached_tokens <= BUDGET


def test_a_context_may_be_longer_than_cache_and_model(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = evicting(folder, max_model_len=2 * MAX_LEN, num_gpu_blocks_override=5)
    assert "may be of poor quality" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 400
    with pytest.raises(RequestError, match=r"need 7 KV blocks.*the cache has 5"):
        llm.generate([LONG], params, use_tqdm=False)


def test_models_and_settings_without_eviction_are_refused(folder: Path, tmp_path: Path) -> None:
    heavy = {"kv_eviction": "heavy-hitters", "kv_eviction_budget": 256}
    for settings, reason in (
        ({"kv_eviction": "oldest"}, "kv_eviction"),
        ({"kv_eviction_budget": 63}, r"kv_eviction_budget 63 is too small.*at least 64"),
        (heavy | {"kv_eviction_budget": 255}, r"255 is too small.*at least 256"),
        (heavy | {"block_size": 24}, "block_size 24 does not divide"),
        ({"enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
        ({"num_gpu_blocks_override": 3}, "more than the KV cache holds, 48 tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            evicting(folder, **settings)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    windows = tiny_folder(tmp_path / "windows", **mistral, sliding_window=32)
    with pytest.raises(ConfigError, match=r"layers all .* see every position"):
        evicting(windows)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        evicting(folder).generate([PROMPT], params, use_tqdm=False)
