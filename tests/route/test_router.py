"""The router's choices, and the joined record of a request that several engines ran."""

from __future__ import annotations

from array import array

import pytest

from twostroke.kv.usage import KVUsage
from twostroke.observe.record import Causes, PhaseRecord, RequestRecord, StepRecord, continued
from twostroke.route.costs import LEARN_EVERY_S, DecodeCosts, PrefillCosts
from twostroke.route.router import (
    MAX_MARKS,
    MIN_HAND_OVERS,
    OLD_S,
    EngineState,
    Placement,
    Prompt,
    Role,
    Router,
)

MARKS = ("a", "b", "c")  # of the first 64, 128 and 256 tokens
TOKEN_S, STEP_S = 1e-4, 0.01


def engines(prefill: int = 0, decode: int = 0, both: int = 0) -> list[EngineState]:
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    return [
        EngineState(f"{role}-{n}", role) for role, count in counts.items() for n in range(count)
    ]


def with_costs(states: list[EngineState], stream_s: float = 1e-4) -> Router:
    """A prompt token takes 0.1 ms, a decode step 10 ms; a hand-over takes 10 ms and 1 GB/s."""
    for one in states:
        one.costs.prefill = PrefillCosts(TOKEN_S, 0.0)
        one.costs.decode = DecodeCosts(STEP_S, stream_s, 0.0)
        one.token_bytes, one.bytes_per_s = 1e4, 1e9
    router = Router(states)
    know_hand_over(router, 0.012, 0.002)
    return router


def know_hand_over(router: Router, seconds: float, fetch_s: float) -> None:
    for _ in range(MIN_HAND_OVERS):
        router.note_hand_over(seconds, fetch_s)


def queue(engine: EngineState, tokens: int) -> None:
    """Set the queue of an engine to one prompt of so many tokens."""
    engine.queued_tokens, engine.queued_s, engine.queued = tokens, TOKEN_S * tokens, bool(tokens)


def placed(router: Router, prompt: Prompt) -> Placement:
    placement = router.place(prompt)
    assert placement is not None
    return placement


def test_a_prompt_goes_to_the_prefill_engine_that_finishes_it_first() -> None:
    one, other, _ = states = engines(prefill=2, decode=1)
    router = Router(states)
    queue(one, 500)
    placement = placed(router, Prompt(400))
    assert (placement.engine, placement.hand_over, placement.queued.tokens) == (other, True, 400)
    assert placement.reason == "prefilled by prefill-1: 0 tokens before it"
    one.note_prompt(Prompt(300, MARKS))
    queue(other, 300)
    placement = placed(router, Prompt(400, MARKS))
    assert (placement.engine, placement.queued.tokens) == (one, 144), "500 + 144 against 300 + 400"
    assert placement.reason == "prefilled by prefill-0: 500 tokens before it, 256 of 400 cached"


def test_a_slow_prefill_engine_gets_fewer_prompts() -> None:
    slow, quick, _ = states = engines(prefill=2, decode=1)
    router = with_costs(states)
    slow.costs.prefill = PrefillCosts(4 * TOKEN_S, 0.0)
    queue(quick, 1000)
    assert placed(router, Prompt(1000)).engine is quick, "2,000 tokens, against 4,000 times as many"
    queue(quick, 4000)
    assert placed(router, Prompt(1000)).engine is slow


def test_the_longest_known_prefix_counts() -> None:
    (one,) = engines(both=1)
    one.note_prompt(Prompt(200, ("a", "b")))
    found = [one.num_cached(Prompt(999, marks)) for marks in (MARKS, ("a",), ("x",), ())]
    assert found == [128, 64, 0, 0]
    assert one.num_cached(Prompt(100, ("a", "b"))) == 99, "the last token is always computed"
    one.forget_prompts()
    assert one.num_cached(Prompt(999, MARKS)) == 0


def test_only_the_newest_marks_are_remembered() -> None:
    (one,) = engines(both=1)
    one.note_prompt(Prompt(64, ["old"]))
    one.note_prompt(Prompt(64, [f"m{n}" for n in range(60)]))
    for n in range(60, MAX_MARKS):
        one.note_prompt(Prompt(64, [f"m{n}"]))
    assert one.num_cached(Prompt(99, ["old"])) == 0
    assert one.num_cached(Prompt(99, [f"m{MAX_MARKS - 1}"])) == 64
    assert len(one._marks) == MAX_MARKS


def test_no_more_is_remembered_than_the_cache_holds_and_ends_are_dropped_first() -> None:
    (one,) = engines(both=1)
    one.capacity_tokens = 400
    one.note_prompt(Prompt(300, MARKS))  # 256 tokens
    one.note_prompt(Prompt(200, ("x", "y")))  # 128 more
    assert one.num_cached(Prompt(999, MARKS)) == 256
    one.note_prompt(Prompt(70, ("z",)))  # and 64
    assert one.num_cached(Prompt(999, MARKS)) == 128
    assert one.num_cached(Prompt(999, ("x", "y"))) == 128


def test_a_session_continues_where_its_last_turn_was() -> None:
    one, other = states = engines(both=2)
    router = with_costs(states)
    one.note_prompt(Prompt(300, MARKS, "s"))
    one.note_session("s", 380)
    other.note_prompt(Prompt(300, MARKS))
    placement = placed(router, Prompt(400, MARKS, "s"))
    assert (placement.engine, placement.queued.tokens) == (one, 20)
    assert other.num_cached(Prompt(400, MARKS, "s")) == 256
    assert one.num_cached(Prompt(400, ("q", "r"), "s")) == 0, "its name, and another conversation"


def test_a_prefilled_request_goes_to_the_engine_with_the_fewest_slowed_streams() -> None:
    _, one, other = states = engines(prefill=1, decode=2)
    router = with_costs(states)
    one.streams, other.streams = 3, 2
    target = router.place_decode(Prompt(1000))
    assert target is not None
    assert target.engine is other
    assert target.reason == (
        "handed over to decode-1: saves 200 ms of gaps of 2 streams there, costs 40 ms"
    ), "1,000 tokens hold up two streams for 0.1 s; 10 ms, and 10 MB of which three wait"
    one.note_prompt(Prompt(1000, MARKS, "s"))
    target = router.place_decode(Prompt(1000, MARKS, "s", 16))
    assert target is not None
    assert target.engine is one, "it has the blocks already"
    other.up = one.up = False
    assert router.place_decode(Prompt(1000)) is None


@pytest.mark.parametrize(
    ("num_tokens", "streams", "queued", "direct"),
    [
        (9, 1, 0, True),
        (9, 20, 0, False),
        (200, 1, 0, False),
        (300, 0, 0, False),  # a stream may come
        (300, 0, 5000, True),  # the prefill engine is busy, this one is not
        (300, 8, 5000, False),
    ],
)
def test_a_decode_engine_prefills_if_the_total_wait_is_shorter(
    num_tokens: int, streams: int, queued: int, direct: bool
) -> None:
    prefill, decode = states = engines(prefill=1, decode=1)
    router = with_costs(states)
    router.hand_over_s, decode.streams = 0.0, streams
    queue(prefill, queued)
    assert placed(router, Prompt(num_tokens)).engine is prefill, "what it takes is not known yet"
    router.hand_over_s = 0.01
    placement = placed(router, Prompt(num_tokens))
    assert placement.engine is (decode if direct else prefill)
    assert placement.hand_over is not direct
    if (num_tokens, direct) == (9, True):
        assert placement.reason == (
            "prefilled by decode-0 itself: 9 of 9 tokens hold up its 1 streams for 0.9 ms, and by "
            "way of prefill-0 it takes 11 ms"
        )


def test_the_first_hand_overs_do_not_count() -> None:
    router = Router([])
    router.note_hand_over(0.5, 0.1)
    for _ in range(MIN_HAND_OVERS - 1):
        assert router.hand_over_s == 0.0
        router.note_hand_over(0.01, 0.0)
    assert router.hand_over_s == pytest.approx((0.4 + 0.01 * 7) / 8)
    for _ in range(60):
        router.note_hand_over(0.01, 0.0)
    assert router.hand_over_s == pytest.approx(0.01, rel=0.1)


def test_a_conversation_continues_where_its_blocks_are() -> None:
    prefill, decode = states = engines(prefill=1, decode=1)
    router = with_costs(states)
    decode.streams = 2
    assert placed(router, Prompt(300, MARKS)).engine is prefill
    decode.note_prompt(Prompt(300, MARKS))
    placement = placed(router, Prompt(300, MARKS))
    assert (placement.engine, placement.queued.tokens) == (decode, 44)


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, True), (3, True), (9, False), (None, False)])
def test_few_tokens_are_decoded_by_the_prefill_engine(max_tokens: int | None, kept: bool) -> None:
    """A hand-over of 1,000 tokens takes 20 ms and more for 30 streams; a step 10 ms."""
    prefill, decode = states = engines(prefill=1, decode=1)
    router = with_costs(states)
    decode.streams = 1
    placement = placed(router, Prompt(1000, max_tokens=max_tokens))
    assert (placement.engine, placement.hand_over) == (prefill, not kept)
    if max_tokens == 3:
        assert placement.reason.endswith("decoded there: 2 tokens take 20 ms, a hand-over 30 ms")


def test_the_other_pool_does_the_work_of_a_pool_that_is_down() -> None:
    prefill, decode = states = engines(prefill=1, decode=1)
    router = Router(states)
    prefill.up = False
    placement = placed(router, Prompt(300))
    assert (placement.engine, placement.hand_over) == (decode, False)
    assert placement.reason.endswith("no prefill engine is up")
    decode.up = False
    assert router.place(Prompt(300)) is None


def test_equal_engines_take_turns_and_keep_a_prefix_together() -> None:
    one, other = states = engines(both=2)
    router = Router(states)
    chosen = []
    for _ in range(6):
        placement = placed(router, Prompt(100))
        placement.engine.streams += 1
        chosen.append(placement.engine)
    assert chosen == [one, other] * 3
    other.note_prompt(Prompt(300, MARKS))
    assert placed(router, Prompt(300, MARKS)).engine is other


def test_a_hot_prefix_spreads_when_its_engine_is_busy() -> None:
    """All 400 requests begin with the same 4,096 tokens; no engine computes meanwhile."""
    marks = tuple(f"hot {n}" for n in range(7))
    states = engines(both=4)
    router = with_costs(states, stream_s=1e-5)
    states[0].note_prompt(Prompt(4096, marks))
    for n in range(400):
        prompt = Prompt(4200, (*marks,), max_tokens=100)
        placement = placed(router, prompt)
        placement.engine.note_prompt(prompt)
        placement.engine.add_queued(placement.queued)
        if n < 5:
            assert placement.engine is states[0], "it is cached there, and there is little to do"
    counts = [one.queued for one in states]
    assert sum(counts) == 400
    assert max(counts) < 2 * min(counts)
    placement = placed(router, Prompt(4200, (*marks,)))
    assert "of 4200 tokens cached" in placement.reason


def step(prefill_tokens: int, device_s: float, decode_s: float) -> StepRecord:
    none, kv = PhaseRecord(0, 0, 0, 0.0, 0.0), KVUsage(0, 0, 0, 0, 0)
    prefill = PhaseRecord(1, prefill_tokens, 0, 0.0, 0.0)
    times = 0.0, 0.0, device_s, device_s, 0.0
    since = Causes(decode_s, device_s - decode_s)
    return StepRecord(0, *times, prefill, none, (), (), 0, 0, 0, kv, since_s=since)


def test_costs_are_learnt_from_steps() -> None:
    one, other = states = engines(both=2)
    for n in range(200):
        record = step(100, 0.03, 0.01)
        one.add_step(record._replace(committed_s=n * LEARN_EVERY_S))
        decode = PhaseRecord(4, 4, 1000 + n, 0.0, 0.0)
        none = PhaseRecord(0, 0, 0, 0.0, 0.0)
        when = (n + 0.5) * LEARN_EVERY_S
        one.add_step(record._replace(prefill=none, decode=decode, committed_s=when))
    assert one.costs.prefill is not None
    assert one.costs.decode is not None
    assert one.costs.prefill.token == pytest.approx(3e-4, rel=0.1)
    assert one.costs.decode.step_s(4, 1100) == pytest.approx(0.03, rel=0.1)
    assert one.positions == 1199
    router = Router(states)
    (seat,) = router._candidates([other], Prompt(1000))
    assert seat.queued.seconds == one.costs.prefill.prompt_s(1000, 0), "as elsewhere"


def test_an_engine_that_was_slow_once_is_tried_again() -> None:
    one, other = states = engines(both=2)
    router = with_costs(states)
    one.costs.decode, one.bytes_per_s = DecodeCosts(1e3 * STEP_S, 0.0, 0.0), 1.0
    for seconds, chosen in ((1.0, other), (OLD_S + 1.0, one)):
        one.costs.learnt_s, other.costs.learnt_s = 100.0, 100.0 + seconds
        placement = router.place(Prompt(100))
        assert placement is not None
        assert placement.engine is chosen
    assert (one.costs.decode, one.bytes_per_s) == (None, 0.0)
    assert other.costs.decode is not None


def test_an_engine_without_costs_has_those_of_its_phase() -> None:
    prefill, decode, new = states = engines(prefill=1, decode=2)
    prefill.costs.decode, decode.costs.decode = DecodeCosts(1, 0, 0), DecodeCosts(2, 0, 0)
    prefill.costs.prefill, decode.costs.prefill = PrefillCosts(3, 0), PrefillCosts(4, 0)
    router = Router(states)
    assert new.costs.decode is None
    assert router._usual_decode() == (2, 0, 0)
    assert router._usual_prefill() == (3, 0)


def test_steps_without_a_time_are_ignored() -> None:
    (one,) = engines(both=1)
    for n in range(9):
        one.add_step(step(100, 0.0, 0.0)._replace(committed_s=float(n)))
    assert (one.costs.prefill, one.costs.decode) == (None, None)


def test_costs_are_learnt_from_few_steps() -> None:
    (one,) = engines(both=1)
    for n in range(100):
        one.add_step(step(100, 0.03, 0.01)._replace(committed_s=1.0 + n * LEARN_EVERY_S / 10))
    assert one.costs._times._mixed.steps == pytest.approx(10, abs=1)


def test_the_records_of_two_engines_become_one() -> None:
    first = RequestRecord("r", 9, 1.0, scheduled_s=2.0, first_token_s=3.0, num_cached=4)
    first.token_s, first.token_step = array("d", [3.0]), array("q", [7])
    first.chunks = [(2.0, 7, 4, 5)]
    later = RequestRecord("r", 9, 1.0, scheduled_s=3.4, finished_s=4.5, finish_reason="stop")
    later.token_s, later.token_step = array("d", [3.5, 3.7]), array("q", [90, 91])
    later.gaps = later.worst_gap = Causes(decode=0.2)
    later.worst_gap_s = 0.2
    first.gap_causes, later.gap_causes = array("f"), array("f", Causes(decode=0.2))
    record = continued(first, later)
    assert record is first
    assert record.token_s.tolist() == [3.0, 3.5, 3.7]
    assert record.gaps == Causes(decode=0.2, preemption=0.5)
    assert (record.worst_gap_s, record.worst_gap) == (0.5, Causes(preemption=0.5))
    each = [*Causes(preemption=0.5), *Causes(decode=0.2)]
    assert record.gap_causes is not None
    assert record.gap_causes.tolist() == pytest.approx(each)
    assert (record.finished_s, record.finish_reason) == (4.5, "stop")
    assert (record.scheduled_s, record.first_token_s, record.num_cached) == (2.0, 3.0, 4)
