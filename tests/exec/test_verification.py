"""The verification of drafts: which samples become text, and from which distribution they come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.exec.test_sampling import assert_drawn_from
from twostroke.exec import native_executor, torch_executor
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.device_sampling import DeviceSampler
from twostroke.exec.logits import BanTable
from twostroke.exec.native_executor import NativeExecutor, NativeForwardHandle
from twostroke.exec.rows import HostRows
from twostroke.exec.samples import Kept, decode_tokens, keep_accepted, samples_of
from twostroke.exec.token_mask import mask_of
from twostroke.exec.torch_executor import ForwardHandle, TorchExecutor
from twostroke.kernels import cpu
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.tensor_parallel import ONE_RANK
from twostroke.plan import Chunk, NewRow, PhaseWork, Slot, StepPlan, StepResult
from twostroke.request import SamplingParams

VOCAB, LENGTH = 8, 12
PROMPT = (3, 5, 2)
DRAFTS = (1, 4)
SEEDS = 20_000
CHUNK = 2_500  # rows of a step


def plan_of(
    slots: list[Slot], drafts: list[int], new: tuple[NewRow, ...] = (), chunks: tuple = ()
) -> StepPlan:
    work = PhaseWork(len(slots), len(slots) + len(drafts))
    return StepPlan(0, new, (), (), (), chunks, tuple(slots), PhaseWork(), work, (), tuple(drafts))


# ── which samples are kept ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("drawn", "kept", "counts"),
    [
        ([1, 4, 9, 7, 0], [0, 1, 2, 3, 4], [3, 1, 1]),  # all accepted, and the token after them
        ([1, 5, 9, 7, 0], [0, 1, 3, 4], [2, 1, 1]),  # the second differs
        ([2, 4, 9, 7, 0], [0, 3, 4], [1, 1, 1]),  # the first differs
        ([-1, 4, 9, 7, 0], [0, 3, 4], [1, 1, 1]),  # logits with NaN
    ],
)
def test_drafts_are_kept_up_to_the_first_difference(
    drawn: list[int], kept: list[int], counts: list[int]
) -> None:
    chunks = (Chunk(2, 0, 4, True), Chunk(3, 0, 2, False))
    plan = plan_of([Slot(0, 5, 2), Slot(1, 8)], [1, 4], chunks=chunks)
    assert keep_accepted(plan, drawn) == Kept(kept, counts)


def test_a_step_without_drafts_keeps_all_samples() -> None:
    assert keep_accepted(plan_of([Slot(0, 5), Slot(1, 8)], []), [1, 2]) is None


# ── the distribution ────────────────────────────────────────────────────────────────────────

LOGITS = np.random.default_rng(7).normal(scale=1.5, size=(3, VOCAB)).astype(np.float32)
ALL = np.arange(VOCAB)
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.5,
    },
    "bias": {"logit_bias": {1: -1.0, 6: 1.5}},
    "bad words": {"bad_words_ids": ((1, 4), (7,))},
    "allowed ids": {"allowed_token_ids": [0, 1, 4, 6]},
    "all of them": {
        "temperature": 1.3,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.02,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 1.0},
    },
}


def exact(options: dict[str, object], at: int, mask: set[int] | None = None) -> torch.Tensor:
    """The distribution of the sample after `at` accepted drafts, written from the definitions."""
    logits = LOGITS[at].astype(np.float64)
    before = [*PROMPT, *DRAFTS[:at]]
    if mask is not None:
        logits[[n for n in ALL if n not in mask]] = -math.inf
    for token, bias in dict(options.get("logit_bias", {})).items():  # type: ignore[call-overload]
        logits[token] += bias
    if "allowed_token_ids" in options:
        allowed = options["allowed_token_ids"]
        logits[[n for n in ALL if n not in allowed]] = -math.inf  # type: ignore[operator]
    for *start, last in options.get("bad_words_ids", ()):  # type: ignore[attr-defined]
        written = before[len(PROMPT) :]
        if written[len(written) - len(start) :] == start:
            logits[last] = -math.inf
    rate = float(options.get("repetition_penalty", 1.0))  # type: ignore[arg-type]
    for token in set(before):
        logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
    for token, count in Counter(before[len(PROMPT) :]).items():
        logits[token] -= count * float(options.get("frequency_penalty", 0.0))  # type: ignore[arg-type]
        logits[token] -= float(options.get("presence_penalty", 0.0))  # type: ignore[arg-type]
    logits = logits / float(options.get("temperature", 1.0))  # type: ignore[arg-type]
    if min_p := float(options.get("min_p", 0.0)):  # type: ignore[arg-type]
        logits[logits < logits.max() + math.log(min_p)] = -math.inf
    if top_k := int(options.get("top_k", 0)):  # type: ignore[call-overload]
        logits[logits < np.sort(logits)[-top_k]] = -math.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    before_p = np.cumsum(probs[order]) - probs[order]
    probs[order[before_p >= float(options.get("top_p", 1.0))]] = 0.0  # type: ignore[arg-type]
    return torch.tensor(probs / probs.sum())


def new_rows(options: dict[str, object], first_seed: int) -> tuple[NewRow, ...]:
    options = {"temperature": 1.0} | options
    bad_words = options.pop("bad_words_ids", ())
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return tuple(
        NewRow(
            row, f"r{row}", PROMPT, len(PROMPT), params, first_seed + row, frozenset(), bad_words
        )  # type: ignore[arg-type]
        for row in range(CHUNK)
    )


def native_steps(options: dict[str, object], mask: set[int] | None) -> Iterator[StepResult]:
    """Steps of the native executor, with the same logits for every row."""

    class Decoder:
        isa, model = "portable", None

    for first_seed in range(0, SEEDS, CHUNK):
        state = HostRows(CHUNK, LENGTH, 4, 1)
        executor = NativeExecutor.__new__(NativeExecutor)
        executor._decoder, executor._state = Decoder(), state  # type: ignore[assignment]
        executor._native, executor._tokens = cpu.module(), state.tokens
        executor.on_chunk_logits, executor._attention_shares = None, False
        executor._bans = BanTable()
        plan = drafted_plan(options, first_seed)
        state.apply(plan)
        samples = samples_of(decode_tokens(plan.decode), ())
        logits = np.tile(LOGITS, (CHUNK, 1))
        handle = NativeForwardHandle(plan, samples.rows, samples.positions, logits, 0.0)
        yield executor.sample(handle, masks_of(mask)).result


def torch_steps(options: dict[str, object], mask: set[int] | None) -> Iterator[StepResult]:
    """The same of the torch executor: the first samples, then those with further options."""
    for first_seed in range(0, SEEDS, CHUNK):
        state = DeviceRows(CHUNK, LENGTH, 4, 1, torch.device("cpu"))
        kernels = Kernels()
        sampler = DeviceSampler(CHUNK, VOCAB, state.tokens, kernels, torch.device("cpu"))
        plan = drafted_plan(options, first_seed)
        writes = state.apply(plan)
        state.cells.scatter_(0, torch.from_numpy(writes.at), torch.from_numpy(writes.values))
        for new in plan.new:
            sampler.take(new)
        samples = samples_of(decode_tokens(plan.decode), ())

        class Program:
            tokens = torch.zeros(3 * CHUNK, dtype=torch.int32)
            logits = torch.from_numpy(np.tile(LOGITS, (CHUNK, 1)))

        program = Program()
        program.sampler = sampler  # type: ignore[attr-defined]
        executor = TorchExecutor.__new__(TorchExecutor)
        executor.program, executor._rows = program, state  # type: ignore[assignment]
        executor._device, executor.on_gpu = torch.device("cpu"), False
        executor._ranks, executor.on_chunk_logits = ONE_RANK, None
        first = torch_executor.ClockEvent()
        first.record()
        every = np.arange(3 * CHUNK)
        drawn = sampler.draw(
            program.logits, every, samples.rows, samples.positions, {}, plain_params(state, samples)
        )
        program.tokens.copy_(drawn.tokens)
        at = torch.from_numpy(state.token_cells(samples.rows, samples.positions))
        state.cells.scatter_(0, at, drawn.tokens)
        handle = ForwardHandle(plan, samples, None, first, None, ONE_RANK.comm)
        yield executor.sample(handle, masks_of(mask)).wait()


def plain_params(state, samples):  # type: ignore[no-untyped-def]
    from twostroke.exec.rng import stream_keys
    from twostroke.kernels.records import DrawParams

    rows = samples.rows
    key0, key1 = stream_keys(state.seed[rows], samples.positions)
    return DrawParams(
        temperature=state.temperature[rows],
        top_k=state.top_k[rows],
        top_p=state.top_p[rows],
        min_p=state.min_p[rows],
        key0=key0,
        key1=key1,
    )


def drafted_plan(options: dict[str, object], first_seed: int) -> StepPlan:
    slots = [Slot(row, len(PROMPT) - 1, len(DRAFTS)) for row in range(CHUNK)]
    return plan_of(slots, [*DRAFTS] * CHUNK, new_rows(options, first_seed))


def masks_of(mask: set[int] | None):  # type: ignore[no-untyped-def]
    if mask is None:
        return None
    return dict.fromkeys(range(3 * CHUNK), mask_of(sorted(mask), VOCAB))


def tokens_by_place(steps: Iterator[StepResult]) -> list[Counter[int]]:
    """The tokens after no, one and two accepted drafts."""
    found: list[Counter[int]] = [Counter(), Counter(), Counter()]
    for result in steps:
        assert result.counts is not None
        at = 0
        for count in result.counts:
            for place in range(count):
                found[place][result.tokens[at + place]] += 1
            at += count
    return found


Steps = Callable[[dict[str, object], set[int] | None], Iterator[StepResult]]
EXECUTORS: dict[str, Steps] = {"native": native_steps, "torch": torch_steps}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_token_comes_from_its_exact_distribution(name: str, executor: str) -> None:
    """20,000 seeds: the tokens after 0, 1 and 2 accepted drafts, each by chi-square."""
    options = OPTIONS[name]
    found = tokens_by_place(EXECUTORS[executor](dict(options), None))
    assert found[0].total() == SEEDS
    for place in range(3):
        if place and not float(exact(options, place - 1)[DRAFTS[place - 1]]):
            assert not found[place], "a token with probability 0 was accepted"
            break
        assert_drawn_from(exact(options, place), found[place])


@pytest.mark.parametrize("executor", [pytest.param("native", marks=pytest.mark.core), "torch"])
def test_a_grammar_mask_is_kept_too(executor: str) -> None:
    allowed = {1, 2, 4, 7}
    found = tokens_by_place(EXECUTORS[executor]({}, allowed))
    for place in range(3):
        assert_drawn_from(exact({}, place, allowed), found[place])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_wrong_acceptance_is_caught(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a draft accepted with probability p, and otherwise a token drawn from p
    instead of p without the draft."""
    coins = np.random.default_rng(0)
    chance = float(exact({}, 0)[DRAFTS[0]])

    def wrong(plan: StepPlan, drawn: list[int]) -> Kept | None:
        for at in range(0, len(drawn), 3):
            if coins.random() < chance:
                drawn[at] = DRAFTS[0]
        return keep_accepted(plan, drawn)

    for module in (native_executor, torch_executor):
        monkeypatch.setattr(module, "keep_accepted", wrong)
    found = tokens_by_place(EXECUTORS[executor]({}, None))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(exact({}, 0), found[0])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_greedy_drafts_are_accepted_by_equality(executor: str) -> None:
    best = [int(one) for one in LOGITS.argmax(1)]
    found = tokens_by_place(EXECUTORS[executor]({"temperature": 0.0}, None))
    assert found[0] == {best[0]: SEEDS}
    assert bool(found[1]) == (best[0] == DRAFTS[0])
