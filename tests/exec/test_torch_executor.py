"""The torch executor on a CPU: graphs that run again, steps planned ahead, equal tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checked_kernels import CheckedKernels
from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.fakes import groups
from tests.gpu.reference_check import OUTPUT, PROMPTS, SPECS
from tests.loud import Loud
from tests.rig import put
from tests.tiny import tiny_folder
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble
from twostroke.engine.core import EngineCore
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.grammar import Grammars
from twostroke.exec.graphs import EagerReplay, ladder
from twostroke.exec.rng import stream_key, stream_keys
from twostroke.exec.rows import NO_WRITES
from twostroke.exec.step_buffer import Shape, fill_decode
from twostroke.kernels.records import StepContext
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.model.torch.decoder import Decoder
from twostroke.plan import (
    BROKEN_LOGITS,
    BlockAppend,
    BlockDrop,
    NewRow,
    PhaseWork,
    Slot,
    StepPlan,
)
from twostroke.request import EngineRequest, SamplingParams, StructuredOutputs
from twostroke.sched.step import SchedulerConfig

CPU = torch.device("cpu")
WAYS: dict[str, dict[str, object]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"num_blocks": 34, "block_size": 8, "lookahead": 0, "max_num_batched_tokens": 32},
    "prefix hit": {"prefix_caching": True},
}


@cache
def decoder_of(name: str) -> Decoder:
    spec = small_spec(**SPECS[name])
    how = (torch.float32, CPU, 1024, CheckedKernels())
    return Decoder(spec, Loud(spec), *how, dependent_launch=True)


@cache
def alone(name: str) -> list[Written]:
    """Each prompt by itself, one step at a time and without graphs: the definition."""
    core = make_core(decoder_of(name))
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def graph_core(name: str = "qwen3", graphs: bool = True, **settings: object) -> EngineCore:
    decoder = decoder_of(name)
    limits: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "block_size": 16,
        "prefix_caching": False,
    }
    each = [settings.pop("num_blocks", 512)] * len(decoder.spec.kv_groups())
    limits["groups"] = group_limits(decoder.spec, each)  # type: ignore[arg-type]
    config = SchedulerConfig(**(limits | settings))  # type: ignore[arg-type]
    sizes = ladder(config.max_num_seqs) if graphs else ()
    return assemble(decoder, config, torch.float32, 2, graph_sizes=sizes)


def write(core: EngineCore, prompts: list[list[int]], **params: object) -> list[list[int]]:
    settings = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | params))  # type: ignore[arg-type]
    written: dict[str, list[int]] = {}
    for n, prompt in enumerate(prompts):
        core.add(EngineRequest(f"r{n}", tuple(prompt), settings, seed=100 + n))
        written[f"r{n}"] = []
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            written[update.request_id] += update.tokens
        core.scheduler.audit()
    return list(written.values())


# ── the same tokens ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_every_way_to_schedule_gives_the_tokens_of_the_plain_executor(name: str, way: str) -> None:
    core = graph_core(name, **WAYS[way])
    if way == "prefix hit":
        run(core, PROMPTS, OUTPUT)
    assert_same(alone(name), run(core, PROMPTS, OUTPUT))
    plain = [one.tokens for one in run(core, PROMPTS, OUTPUT)]
    assert write(core, PROMPTS, temperature=0, max_tokens=OUTPUT) == plain


def test_without_graphs_the_tokens_are_the_same() -> None:
    assert_same(alone("qwen3"), run(graph_core(graphs=False), PROMPTS, OUTPUT))


def test_rope_and_store_are_part_of_a_decode_steps_attention() -> None:
    core, decoder = graph_core(graphs=False), decoder_of("qwen3")
    layers, called = decoder.spec.num_layers, decoder.kernels.called  # type: ignore[attr-defined]
    called.clear()
    write(core, [PROMPTS[1]], max_tokens=1)
    # in the last layer one token is left, which attends as a decode row does
    prefill = ["rope_store", "prefill_attention"] * (layers - 1)
    assert called == [*prefill, "rope_store", "decode_attention"]
    called.clear()
    write(core, [PROMPTS[1]], max_tokens=2)
    # the reference is made of the two
    decode = ["rope_decode_attention", "rope_store", "decode_attention"]
    assert called[2 * layers :] == decode * layers


def test_steps_are_launched_before_the_last_one_was_taken_in() -> None:
    core, most = graph_core(), 0
    for n, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=10)
        core.add(EngineRequest(f"r{n}", tuple(prompt), params, seed=0))
    launch = core._launch

    def counted(*args: object) -> None:
        nonlocal most
        launch(*args)  # type: ignore[arg-type]
        most = max(most, len(core.scheduler.in_flight))

    core._launch = counted  # type: ignore[method-assign, assignment]
    while core.has_work:
        core.step()
    assert most == 2
    assert all(record.host_gap_s >= 0 for record in core.records.steps)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 1.5},
        {"temperature": 0.7, "logit_bias": {5: 60.0, 9: 59.0}},
        {"temperature": 0, "allowed_token_ids": [3, 4, 400]},
        {"temperature": 0.5, "logprobs": 3},
        {"temperature": 0, "min_tokens": 6, "stop_token_ids": list(range(0, 512, 2))},
        {"temperature": 0, "logit_bias": {5: 3.0}, "presence_penalty": 1.0, "logprobs": 2},
    ],
    ids=lambda params: " ".join(params),
)
def test_sampling_is_that_of_the_plain_executor(params: dict[str, object]) -> None:
    expected = write(make_core(decoder_of("qwen3")), PROMPTS, **params)
    got = write(graph_core(max_num_batched_tokens=64), PROMPTS, **params)
    same = sum(a == b for one, other in zip(expected, got, strict=True) for a, b in zip(one, other))  # noqa: B905
    assert same >= 0.9 * sum(map(len, expected))


def test_rows_that_ask_for_more_stay_beside_rows_that_do_not() -> None:
    core = graph_core()
    plain = write(core, PROMPTS, temperature=0)
    wishes = [{}, {"logprobs": 2}, {"allowed_token_ids": [3, 4]}, {"min_tokens": 5}]
    written: dict[str, list[int]] = {}
    logprobs = []
    for n, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=12, **wish)  # type: ignore[arg-type]
        stops = frozenset({plain[3][1]}) if n == 3 else frozenset()
        core.add(EngineRequest(f"r{n}", tuple(prompt), params, seed=0, stop_ids=stops))
        written[f"r{n}"] = []
    while core.has_work:
        for update in core.step():
            written[update.request_id] += update.tokens
            logprobs += update.logprobs
    assert written["r0"] == plain[0]
    assert written["r1"] == plain[1]
    assert [entry.token_ids[0] for entry in logprobs] == plain[1]
    assert set(written["r2"]) <= {3, 4}
    assert plain[3][1] not in written["r3"][:5]


def test_logprobs_of_a_token_that_a_bias_chose_are_those_of_the_plain_executor() -> None:
    wish = {"logit_bias": {5: 60.0}, "repetition_penalty": 1.2}
    expected = run(make_core(decoder_of("qwen3")), PROMPTS[:2], 5, **wish)
    for want, got in zip(expected, run(graph_core(), PROMPTS[:2], 5, **wish), strict=True):
        assert got.tokens == want.tokens == [5] * 5
        for entry, other in zip(got.logprobs, want.logprobs, strict=True):
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            np.testing.assert_allclose(entry.logprobs, other.logprobs, atol=1e-4)


def test_a_grammar_is_followed_beside_streams_that_write_what_they_would_without_it(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder(tmp_path))
    alone = write(graph_core(), PROMPTS[:3], temperature=0.7)
    bound = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputs(regex="[0-9]{9}x"))
    core, written = graph_core(), dict.fromkeys(["bound", "r0", "r1", "r2"], ())
    core._grammars = Grammars(lambda: tokenizer, decoder_of("qwen3").spec.vocab_size)
    core.add(EngineRequest("bound", tuple(PROMPTS[0]), bound, seed=1))
    while core._compiling:
        core.step()
    free = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True)
    for n, prompt in enumerate(PROMPTS[:3]):
        core.add(EngineRequest(f"r{n}", tuple(prompt), free, seed=100 + n))
    while core.has_work:
        for update in core.step():
            written[update.request_id] += update.tokens
    assert re.fullmatch("[0-9]{9}x", tokenizer.decode(written["bound"]))
    assert [list(written[f"r{n}"]) for n in range(3)] == alone


def test_broken_logits_end_their_requests_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    core, decoder = graph_core(graphs=False), decoder_of("qwen3")
    head = decoder.head

    def broken(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return head(hidden, out=out).fill_(float("nan"))

    monkeypatch.setattr(decoder, "head", broken)
    for n, wish in enumerate([{}, {"temperature": 0}, {"logit_bias": {3: 1.0}, "logprobs": 1}]):
        params = SamplingParams(max_tokens=9, **wish)  # type: ignore[arg-type]
        core.add(EngineRequest(f"r{n}", (4, 5, n), params, seed=0))
    errors = {}
    while core.has_work:
        errors |= {update.request_id: update.error for update in core.step()}
    assert errors == dict.fromkeys(["r0", "r1", "r2"], BROKEN_LOGITS)


def test_prompt_logprobs_are_those_of_the_plain_executor() -> None:
    def prompt_logprobs(core: EngineCore) -> list[float]:
        params = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=1)
        core.add(EngineRequest("r", tuple(PROMPTS[2]), params, seed=0))
        found: list[float] = []
        while core.has_work:
            for update in core.step():
                found += [entry.logprobs[0] for entry in update.prompt_logprobs or ()]
        return found

    expected = prompt_logprobs(make_core(decoder_of("qwen3")))
    got = prompt_logprobs(graph_core(max_num_batched_tokens=33, max_num_seqs=4))
    assert len(got) == len(PROMPTS[2]) - 1
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_the_last_layer_works_for_the_tokens_that_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_of("qwen3")
    tokens: list[tuple[int, int]] = []
    finish = decoder._finish

    def counted(
        layers: Any, index: int, attended: Any, residual: torch.Tensor, context: StepContext
    ) -> Any:
        tokens.append((index, len(residual)))
        return finish(layers, index, attended, residual, context)

    monkeypatch.setattr(decoder, "_finish", counted)
    core = graph_core(graphs=False, max_num_batched_tokens=16, max_num_seqs=4)
    last, prompt = decoder.spec.num_layers - 1, list(range(40))
    write(core, [prompt], max_tokens=1)  # as 16, 16 and 8
    assert [size for index, size in tokens if index == 0] == [16, 16, 8]
    assert [size for index, size in tokens if index == last] == [1]
    tokens.clear()
    params = SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=1)
    core.add(EngineRequest("all", tuple(prompt), params, seed=0))
    while core.has_work:
        core.step()
    # Chunks whose log-probabilities are told have half of the budget, since the head runs for all.
    assert [size for index, size in tokens if index == last] == [8] * 5


def test_a_step_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    core = graph_core()
    expected = write(core, PROMPTS, temperature=0)
    decoder = decoder_of("qwen3")
    forward, left = decoder.forward, [3]

    def failing(*args: object) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the device is gone")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder, "forward", failing)
    assert write(core, PROMPTS, temperature=0) == expected
    assert left[0] < 0


# ── graphs, rows, step buffers ──────────────────────────────────────────────────────────────────


def test_the_ladder_ends_at_the_most_requests_there_are() -> None:
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    assert ladder(256)[:6] == [1, 2, 4, 8, 16, 24]
    assert ladder(512, largest=32) == [1, 2, 4, 8, 16, 24, 32]
    assert ladder(64, largest=0) == []


def test_graphs_are_recorded_from_the_largest_down_and_batches_padded_up() -> None:
    recorded: list[Shape] = []
    replayed: list[Shape] = []
    again = EagerReplay()

    def record(pieces: Callable[[], Iterator[object]]) -> list[Callable[[], object]]:
        shape = next(a.shape for a in pieces.args if hasattr(a, "shape"))  # type: ignore[attr-defined]
        recorded.append(shape)
        first, *others = again(pieces)
        return [lambda: (replayed.append(shape), first()), *others]

    config = SchedulerConfig(8, 1024, 1024, 16, groups(512), prefix_caching=False)
    sizes = ladder(8, largest=4)
    core = assemble(decoder_of("qwen3"), config, torch.float32, 2, graph_sizes=sizes, record=record)
    assert [shape.decode_tokens for shape in recorded if shape.decode_tokens] == [4, 2, 1]
    pieces = [shape.tokens for shape in recorded if not shape.decode_tokens]
    assert pieces == sorted(pieces, reverse=True)
    write(core, PROMPTS[:3], temperature=0, max_tokens=4)
    # three rows; and the prompts, in pieces
    assert {shape.decode_tokens for shape in replayed} == {0, 4}
    assert {shape.tokens for shape in replayed} == {4, 192}  # 5 + 40 + 90 prompt tokens
    replayed.clear()
    write(core, [[n + 3, 4] for n in range(8)], temperature=0, max_tokens=4)
    assert {shape.tokens for shape in replayed} == {64}  # above the ladder: in pieces


def test_padding_reads_and_writes_nothing_that_is_anybodys() -> None:
    rows = DeviceRows(4, 64, 16, 1, CPU)
    step = fill_decode((), NO_WRITES, rows, 4)
    fields = step.layout.host(step.data)
    assert fields["slots0"].tolist() == [-1] * 4
    assert fields["lengths0"].tolist() == [0] * 4
    for name in ("read_at", "write_at", "writes_at"):
        assert fields[name].tolist() == [rows.spare] * 4


def plan(**changes: object) -> StepPlan:
    empty: dict[str, object] = dict.fromkeys(StepPlan._fields, ())
    work = {"step": 0, "prefill_work": PhaseWork(), "decode_work": PhaseWork()}
    return StepPlan(**(empty | work | changes))  # type: ignore[arg-type]


def new_row(row: int, tokens: tuple[int, ...]) -> NewRow:
    return NewRow(row, f"r{row}", tokens, len(tokens), SamplingParams(), 7, frozenset(), ())


def test_a_row_dropped_from_retired_and_taken_anew_in_one_plan_is_the_new_ones() -> None:
    rows = DeviceRows(3, 64, 8, 1, CPU)
    put(rows, plan(new=(new_row(1, (5, 6)),), appended=(BlockAppend(1, 0, (4, 5, 6)),)))
    put(rows, plan(dropped=(BlockDrop(1, 0, 1),)))
    assert rows.tables[0][1, :4].tolist() == [0, 5, 6, 0]
    put(
        rows,
        plan(
            dropped=(BlockDrop(1, 0, 2),),
            retired=(1,),
            new=(new_row(1, (9, 8, 7)),),
            appended=(BlockAppend(1, 0, (2,)), BlockAppend(1, 0, (3,))),
        ),
    )
    assert rows.tables[0][1, :2].tolist() == [2, 3]
    assert rows.tokens[1, :3].tolist() == [9, 8, 7]
    assert rows.slots(0, np.array([1, 1]), np.array([3, 12])).tolist() == [19, 28]


def test_fields_of_a_decode_step_say_where_its_tokens_are() -> None:
    rows = DeviceRows(3, 64, 8, 1, CPU)
    put(rows, plan(new=(new_row(2, (5, 6, 7)),), appended=(BlockAppend(2, 0, (4,)),)))
    step = fill_decode((Slot(2, 2),), NO_WRITES, rows, 2)
    fields = step.layout.device(step.data)
    assert rows.cells[fields["read_at"]].tolist()[0] == 7
    assert fields["slots0"].tolist() == [4 * 8 + 2, -1]
    assert fields["lengths0"].tolist() == [3, 0]
    assert (fields["key0"][0].item(), fields["key1"][0].item()) == stream_key(7, 3)


def test_keys_of_many_streams_are_those_of_each() -> None:
    seeds = np.array([0, 1, 2**63 + 12345, 2**64 - 1], np.uint64)
    positions = np.array([0, 77, 4096, 2**31], np.int64)
    found = zip(*stream_keys(seeds, positions), strict=True)
    each = [stream_key(int(seed), int(at)) for seed, at in zip(seeds, positions, strict=True)]
    assert [(int(a), int(b)) for a, b in found] == each
