"""Sampling without torch equals its definition in torch, whatever a request asks for."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.rig import put
from twostroke.exec.device_rows import DeviceRows
from twostroke.exec.logits import BanTable
from twostroke.exec.native_executor import NativeExecutor, NativeForwardHandle
from twostroke.exec.rows import HostRows
from twostroke.exec.token_mask import Mask, mask_of
from twostroke.exec.torch_sampling import mask_tensors, sample, to_token_logprobs
from twostroke.kernels import cpu
from twostroke.kernels.reference_sampling import token_logprobs
from twostroke.plan import (
    BlockAppend,
    BlockDrop,
    NewRow,
    PhaseWork,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from twostroke.request import SamplingParams

VOCAB = 300
MAX_LEN = 64
NOTHING = StepPlan(0, (), (), (), (), (), (), PhaseWork(), PhaseWork())

needs_native = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)
Floats = npt.NDArray[np.float32]


class Draws:
    """Some requests in the midst of writing, by both ways."""

    def __init__(self, requests: list[NewRow], positions: list[int], lines: Floats) -> None:
        self.requests, self.lines = requests, lines
        self.rows = np.array([request.row for request in requests])
        self.positions = np.array(positions)
        self.host = HostRows(len(requests), MAX_LEN, 16, 1)
        self.tensors = DeviceRows(len(requests), MAX_LEN, 16, 1, torch.device("cpu"))
        plan = NOTHING._replace(new=tuple(requests))
        self.host.apply(plan)
        put(self.tensors, plan)

    def native(self, masks: dict[int, Mask]) -> StepResult:
        decoder: Any = SimpleNamespace(isa="auto", model=None)
        executor = NativeExecutor(decoder, SimpleNamespace(data=None), self.host)  # type: ignore[arg-type]
        given = NativeForwardHandle(
            NOTHING, self.rows, self.positions, self.lines.copy(), monotonic()
        )
        return executor.sample(given, masks).wait()

    def torch(self, masks: dict[int, Mask]) -> StepResult:
        lines = torch.from_numpy(self.lines.copy())
        allowed = mask_tensors(masks, VOCAB, torch.device("cpu"))
        rows, positions = self.rows.tolist(), self.positions.tolist()
        drawn = sample(lines, rows, positions, self.tensors, allowed)
        logprobs = {n: to_token_logprobs(found) for n, found in drawn.logprobs.items()}
        return StepResult(drawn.tokens.tolist(), logprobs, {}, 0.0)


def random_request(random: np.random.Generator, row: int) -> NewRow:
    """Anything that can be asked for, alone and together."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.3 else otherwise

    def tokens(most: int) -> list[int]:
        return random.choice(VOCAB, random.integers(1, most), replace=False).tolist()

    num_prompt = int(random.integers(1, 20))
    history = random.integers(0, VOCAB, num_prompt + int(random.integers(0, 20))).tolist()
    ending = [history[-2:] + tokens(2)] if len(history) - num_prompt >= 2 else []
    words = [[int(t)] for t in tokens(3)] + [tokens(5)] + ending
    params = SamplingParams(
        temperature=sometimes(0.0, float(random.uniform(0.2, 2))),
        top_k=sometimes(int(random.integers(1, 60)), 0),
        top_p=sometimes(float(random.uniform(0.3, 1)), 1.0),
        min_p=sometimes(float(random.uniform(0, 0.1)), 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        frequency_penalty=sometimes(0.4, 0.0),
        presence_penalty=sometimes(0.7, 0.0),
        logprobs=sometimes(int(random.integers(0, 8)), None),
        logit_bias=sometimes({t: float(random.normal(0, 5)) for t in tokens(6)}, None),
        allowed_token_ids=sometimes(tokens(40), None),
        min_tokens=sometimes(12, 0),
        max_tokens=40,
    )
    stop_ids = frozenset(sometimes(tokens(4), []))
    bad = tuple(tuple(word) for word in sometimes(words, []))
    seed = int(random.integers(0, 2**62))
    return NewRow(row, str(row), tuple(history), num_prompt, params, seed, stop_ids, bad)


def random_draws(seed: int, count: int = 40) -> tuple[Draws, dict[int, Mask]]:
    random = np.random.default_rng(seed)
    requests = [random_request(random, row) for row in range(count)]
    lines = random.normal(0, 3, (count, VOCAB)).astype(np.float32)
    masks = {}
    for n in range(count):
        if random.random() < 0.2:
            half = np.flatnonzero(random.random(VOCAB) < 0.5).tolist()
            masks[n] = mask_of([*half, *(requests[n].params.allowed_token_ids or ())], VOCAB)
    return Draws(requests, [len(r.tokens) for r in requests], lines), masks


def test_the_bans_of_a_request_are_prepared_once_for_all_its_rows() -> None:
    """All streams wait meanwhile, in each step, and a client may list the whole vocabulary."""
    params = SamplingParams(allowed_token_ids=list(range(100)))
    words = ((3,), (4, 5))
    one, other, last = (
        NewRow(row, str(row), (1, 4), 1, params, row, frozenset(), words) for row in range(3)
    )
    table = BanTable()
    bans = table.bans_of(0, one, VOCAB)
    assert table.bans_of(1, other, VOCAB) is bans
    assert table.bans_of(0, one, VOCAB) is bans
    line = np.zeros(VOCAB, np.float32)
    bans.apply(line, one, 2, np.array([1, 4, 0], np.int32), None)
    assert np.flatnonzero(line == 0).tolist() == [n for n in range(100) if n not in (3, 5)]
    table.forget((0, 1))
    assert len(table) == 0
    assert table.bans_of(1, last._replace(params=SamplingParams()), VOCAB) is not bans


def test_another_request_in_the_same_row_has_its_own_bans() -> None:
    table, line = BanTable(), np.zeros(VOCAB, np.float32)
    row = NewRow(0, "a", (1,), 1, SamplingParams(allowed_token_ids=[7]), 0, frozenset(), ())
    table.bans_of(0, row, VOCAB)
    row = row._replace(params=SamplingParams(allowed_token_ids=[8]))
    table.bans_of(0, row, VOCAB).apply(line, row, 1, np.array([1], np.int32), None)
    assert np.flatnonzero(line == 0).tolist() == [8]


@needs_native
@pytest.mark.parametrize("seed", range(12))
def test_both_ways_draw_the_same_tokens_with_the_same_logprobs(seed: int) -> None:
    draws, masks = random_draws(seed)
    expected, got = draws.torch(masks), draws.native(masks)
    assert got.tokens == expected.tokens
    assert got.logprobs.keys() == expected.logprobs.keys()
    assert got.logprobs
    for n, entry in got.logprobs.items():
        assert entry.token_ids == expected.logprobs[n].token_ids
        assert entry.rank == expected.logprobs[n].rank
        assert entry.logprobs == pytest.approx(expected.logprobs[n].logprobs, abs=2e-6)
    assert draws.host.tokens[draws.rows, draws.positions].tolist() == got.tokens


@needs_native
def test_the_comparison_notices_a_bias_that_is_left_out() -> None:
    """Negative control."""
    draws, masks = random_draws(0)
    expected = draws.torch(masks)
    draws.host.plain_from[:] = 0
    assert draws.native(masks).tokens != expected.tokens


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_nothing_is_allowed_both_write_the_first_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, allowed_token_ids=[7], logprobs=1)
    request = NewRow(0, "r", (1, 2), 2, params, 5, frozenset(), ((7,),))
    lines = np.random.default_rng(0).normal(0, 1, (1, VOCAB)).astype(np.float32)
    draws = Draws([request], [2], lines)
    assert draws.torch({}).tokens == draws.native({}).tokens == [0]


def native_logprobs(lines: Floats, tokens: list[int], count: int) -> list[TokenLogprobs]:
    ids, values = (
        np.empty((len(lines), 1 + count), np.int32),
        np.empty((len(lines), 1 + count), "f"),
    )
    ranks = np.empty(len(lines), np.int32)
    cpu.module().top_logprobs(lines, np.array(tokens, np.int32), ids, values, ranks, "auto")
    each = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(tuple(i), tuple(v), rank) for i, v, rank in each]


@needs_native
def test_of_tokens_that_are_equally_likely_the_lowest_come_first() -> None:
    line = np.array([[1, 3, 2, 3, 3, 2, 0]], np.float32)
    (found,) = native_logprobs(line, [5], 4)
    assert found.token_ids == (5, 1, 3, 4, 2)
    assert found.rank == 4
    assert native_logprobs(line, [3], 0)[0].token_ids == (3,)
    assert native_logprobs(line, [6], 7)[0].token_ids == (6, 1, 3, 4, 2, 5, 0, 6)


@needs_native
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_logprobs_are_as_near_as_torchs(scale: float) -> None:
    lines = np.random.default_rng(1).normal(0, scale, (20, 5003)).astype(np.float32)
    lines[3, :2000] = -np.inf
    tokens = [int(token) for token in lines.argmax(1)]
    for line, token, found in zip(lines, tokens, native_logprobs(lines, tokens, 50), strict=True):
        exact = torch.log_softmax(torch.from_numpy(line).double(), -1).numpy()
        theirs = token_logprobs(
            torch.from_numpy(line)[None], torch.tensor([0]), torch.tensor([token]), 5
        )
        atol = 2e-6 * max(1, scale)
        np.testing.assert_allclose(found.logprobs, exact[list(found.token_ids)], atol=atol)
        (expected,) = map(to_token_logprobs, zip(*theirs, strict=True))
        assert (found.token_ids[:6], found.rank) == (expected.token_ids, expected.rank)


@needs_native
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_logits_that_are_no_numbers_give_no_token(bad: float, how: dict[str, Any]) -> None:
    """Its neighbours in the batch draw what they always do."""
    requests = [
        NewRow(row, str(row), (1, 2), 2, SamplingParams(logprobs=1, **how), 5, frozenset(), ())
        for row in range(3)
    ]
    lines = np.random.default_rng(0).normal(0, 1, (3, VOCAB)).astype(np.float32)
    healthy = Draws(requests, [2] * 3, lines.copy()).native({}).tokens
    lines[1] = bad
    draws = Draws(requests, [2] * 3, lines)
    assert draws.native({}).tokens == draws.torch({}).tokens == [healthy[0], -1, healthy[2]]
    assert draws.host.tokens[draws.rows, draws.positions].tolist() == [healthy[0], 0, healthy[2]]


def test_rows_on_the_host_and_as_tensors_follow_plans_alike() -> None:
    """Rows taken, lengthened, passed by a window, retired and taken anew."""
    host = HostRows(4, MAX_LEN, 4, 2)
    tensors = DeviceRows(4, MAX_LEN, 4, 2, torch.device("cpu"))
    params = SamplingParams()

    def new(row: int, *tokens: int) -> NewRow:
        return NewRow(row, str(tokens), tokens, len(tokens), params, 0, frozenset(), ())

    plans = [
        NOTHING._replace(
            new=(new(0, 5, 6, 7), new(3, 9)),
            appended=(
                BlockAppend(0, 0, (4, 2)),
                BlockAppend(0, 1, (7,)),
                BlockAppend(3, 0, (1,)),
            ),
        ),
        NOTHING._replace(appended=(BlockAppend(0, 0, (8, 9)), BlockAppend(3, 1, (3, 5)))),
        NOTHING._replace(dropped=(BlockDrop(0, 0, 2),), retired=(3,), new=(new(3, 1, 2, 3, 4),)),
        NOTHING._replace(appended=(BlockAppend(3, 0, (6,)),), retired=(0,)),
    ]
    for plan in plans:
        host.apply(plan)
        put(tensors, plan)
        assert np.array_equal(host.tokens, tensors.tokens.numpy())
        for ours, theirs in zip(host.tables, tensors.tables, strict=True):
            assert np.array_equal(ours, theirs.numpy())
        assert host.rows == tensors.rows
    assert host.tables[0][0, :5].tolist() == [0, 0, 8, 9, 0]
    assert host.tables[0][3, :2].tolist() == [6, 0]
    assert host.tokens[3, :5].tolist() == [1, 2, 3, 4, 0]
