"""The executor's promises: where the head runs, what is recorded, what a plan must survive."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from twostroke import LLM, SamplingParams
from twostroke.exec import samples
from twostroke.plan import StepPlan


def greedy(count: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_the_head_runs_only_on_positions_that_are_sampled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4, kernels="reference")
    decoder = llm.engine.core._executor.program.decoder
    head, rows = decoder.head, []

    def counted(hidden: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return head(hidden, **out)

    monkeypatch.setattr(decoder, "head", counted)
    llm.generate([list(range(5, 45)), [3, 4]], greedy(4))
    # 40 + 2 prompt tokens in steps of 16: two steps sample nothing, then both rows decode.
    assert rows[0] <= 2
    assert sum(rows) == 2 * 4


@pytest.mark.parametrize(("kernels", "module"), [("auto", samples), ("reference", samples)])
def test_prompt_logprobs_are_made_in_slices(
    kernels: str, module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), max_num_batched_tokens=64, max_num_seqs=4, kernels=kernels)
    prompt = list(range(5, 65))
    whole = llm.generate(prompt, greedy(1, prompt_logprobs=1))[0].prompt_logprobs
    monkeypatch.setattr(module, "LOGIT_SLICE", 7)
    sliced = llm.generate(prompt, greedy(1, prompt_logprobs=1))[0].prompt_logprobs
    assert whole is not None
    assert sliced is not None
    assert [entry and entry.keys() for entry in whole] == [e and e.keys() for e in sliced]
    for one, other, token in zip(whole[1:], sliced[1:], prompt[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)


def test_every_plan_survives_being_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is plain data: encoded and decoded it runs to the same tokens."""
    llm = LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4)
    params = greedy(6, stop_token_ids=[299], logit_bias={3: 1.5}, logprobs=1)
    expected = llm.generate(list(range(5, 45)), params)[0].outputs[0].token_ids
    executor = llm.engine.core._executor
    forward, sent = executor.forward, []

    def over_the_wire(plan: StepPlan) -> object:
        data = msgspec.msgpack.encode(plan)
        sent.append(len(data))
        arrived = msgspec.msgpack.decode(data, type=StepPlan)
        assert arrived == plan
        return forward(arrived)

    monkeypatch.setattr(executor, "forward", over_the_wire)
    assert llm.generate(list(range(5, 45)), params)[0].outputs[0].token_ids == expected
    assert len(sent) > 5


def test_records_count_what_was_done(folder: Path) -> None:
    llm = LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4, enable_prefix_caching=False)
    output = llm.generate(list(range(5, 45)), greedy(5))[0]
    steps = list(llm.engine.core.records.steps)
    assert [(s.prefill.tokens, s.decode.tokens) for s in steps] == [
        (16, 0),
        (16, 0),
        (8, 0),
        (0, 1),
        (0, 1),
        (0, 1),
        (0, 1),
    ]
    assert [s.decode.kv_tokens for s in steps[3:]] == [41, 42, 43, 44]
    assert steps[1].prefill.kv_tokens == sum(range(17, 33))
    spec = llm.engine.spec
    part, mlp = spec.layers[0].attention, spec.layers[0].mlp
    matrices = 2 * spec.hidden_size * (part.q_size + part.kv_size) * spec.num_layers
    matrices += 3 * spec.hidden_size * mlp.intermediate_size * spec.num_layers
    attention = 4 * part.q_size * spec.num_layers * 41
    assert (
        steps[3].decode.flops == 2 * matrices + 2 * spec.vocab_size * spec.hidden_size + attention
    )
    assert all(s.committed_s >= s.launched_s >= s.planned_s for s in steps)
    assert steps[3].kv.used == 41
    (record,) = output.records
    assert [(start, size) for _, _, start, size in record.chunks] == [(0, 16), (16, 16), (32, 8)]
    assert list(record.token_step) == [2, 3, 4, 5, 6]
    assert len(record.gap_steps()) == 4
    assert record.received_s <= record.queued_s <= record.scheduled_s <= record.first_token_s
    total = record.queue_s + record.prefill_s + record.decode_s
    assert total == pytest.approx(record.token_s[-1] - record.received_s)


def test_enforce_eager_changes_no_chunk_and_no_token(folder: Path) -> None:
    prompts = [list(range(5, 45)), [3, 4, 5], list(range(90, 120))]
    seen = []
    for eager in (False, True):
        llm = LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4, enforce_eager=eager)
        outputs = llm.generate(prompts, greedy(6))
        plans = [(s.chunks, s.slots) for s in llm.engine.core.records.steps]
        seen.append(([o.outputs[0].token_ids for o in outputs], plans))
    assert seen[0] == seen[1]


def test_the_engine_answers_after_a_step_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.errors import EngineError

    llm = LLM(str(folder))
    decoder = llm.engine.core._executor._decoder
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *_: torch.zeros(1) @ torch.zeros(2))
    with pytest.raises(EngineError, match="the engine failed while running a step"):
        llm.generate([[1, 2, 3], [4, 5]], greedy(3))
    llm.engine.core.scheduler.audit()
    monkeypatch.setattr(decoder, "forward", forward)
    assert len(llm.generate([1, 2, 3], greedy(3))[0].outputs[0].token_ids) == 3
