"""Slots that bring several tokens: drafts are planned here by hand, and some are accepted."""

from __future__ import annotations

import pytest

from tests.fakes import groups
from tests.sched.test_scheduler import Bench
from twostroke.plan import StepResult
from twostroke.request import FinishReason
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.step import StepInFlight
from twostroke.sched.updates import CommitResult, Update

PROMPT, DRAFTS = 6, 2


class Drafting(Bench):
    """One request with its prompt computed, and a step in flight with two drafts in its slot."""

    def __init__(self, max_tokens: int = 10, **more: object) -> None:
        super().__init__(groups=groups(64, None, 5))
        self.add("a", PROMPT, max_tokens, **more)
        self.step()
        self.request = next(iter(self.scheduler._requests.values()))
        self.plan_drafts()

    def plan_drafts(self) -> StepInFlight:
        step = self.scheduler.plan()
        assert step is not None
        kv, request = self.scheduler.kv, self.request
        (slot,) = step.plan.decode
        assert slot.position == request.kv.num_computed - 1 == len(request.tokens) - 1
        assert kv.reserve(request.kv, request.kv.num_computed + DRAFTS) is not None
        kv.advance(request.kv, DRAFTS, step.plan.step)
        request.pending += DRAFTS
        request.remaining -= DRAFTS
        step.plan = step.plan._replace(decode=(slot._replace(drafts=DRAFTS),))
        self.scheduler.audit()
        return step

    def commit(self, *tokens: int) -> CommitResult:
        result = StepResult(list(tokens), {}, {}, 0.0, counts=[len(tokens)])
        committed = self.scheduler.commit(result)
        self.scheduler.audit()
        return committed


def state(request: ScheduledRequest) -> tuple[int, int, int, int]:
    seq = request.kv
    return seq.num_computed, seq.capacity, request.pending, request.remaining


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_accepted_drafts_are_kept_and_rejected_ones_written_again(accepted: int) -> None:
    bench = Drafting()
    assert state(bench.request) == (PROMPT + 3, 12, 3, 10 - 1 - 3)
    tokens = (5, 3, 4)[: 1 + accepted]
    committed = bench.commit(*tokens)
    assert committed.updates == [Update("a", tokens)]
    assert bench.request.tokens[PROMPT + 1 :] == list(tokens)
    assert state(bench.request) == (PROMPT + 1 + accepted, 12, 0, 10 - 1 - len(tokens))
    assert (committed.regular, committed.late, committed.first) == (1, [], [])
    assert committed.drafted == accepted
    # Of the tables only what every later token has out of sight is null, and the next slot goes on.
    bench.plan_drafts()
    first = max(0, PROMPT + 1 + accepted - 5 + 1) // 4
    assert bench.request.kv.num_dropped == [0, first]
    bench.commit(6)


def test_only_accepted_tokens_are_found_as_a_prefix() -> None:
    bench = Drafting()
    bench.commit(5, 3)  # eight tokens are computed, and a ninth is known
    tokens = list(bench.request.tokens)
    bench.add("same", tokens, 1)
    step = bench.scheduler.plan()
    assert step is not None
    (chunk,) = step.plan.prefill
    assert (chunk.start, chunk.size) == (8, 1)


@pytest.mark.parametrize(
    ("settings", "kept", "reason"),
    [
        ({"stop": True}, (5, 0), FinishReason.STOP),  # 0 ends a text
        ({"max_tokens": 3}, (5, 0), FinishReason.LENGTH),
        ({"stop": True, "min_tokens": 4}, (5, 0, 4), None),
    ],
)
def test_a_request_ends_within_what_a_slot_brings(
    settings: dict[str, object], kept: tuple[int, ...], reason: FinishReason | None
) -> None:
    bench = Drafting(**settings)  # type: ignore[arg-type]
    (update,) = bench.commit(5, 0, 4).updates
    assert (update.tokens, update.finish_reason) == (kept, reason)
    assert (update.record is None) == (reason is None)
    assert bench.scheduler.kv.is_idle() == (reason is not None)


def test_a_request_that_lost_its_blocks_keeps_its_tokens() -> None:
    bench = Drafting()
    bench.scheduler._preempt(bench.request, 0.0)
    bench.scheduler._remove_inactive()
    bench.scheduler.audit()
    bench.commit(5, 3)
    assert state(bench.request) == (0, 0, 0, 7)
    assert (bench.request.phase, len(bench.request.tokens)) == (Phase.WAITING, PROMPT + 3)


def test_one_that_ended_meanwhile_brings_nothing() -> None:
    bench = Drafting()
    bench.scheduler.abort("a")
    assert bench.commit(5, 3) == CommitResult()
    assert bench.scheduler.kv.is_idle()
