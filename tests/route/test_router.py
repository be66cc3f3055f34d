"""Which engine a request goes to, by the numbers; and one record of what several engines did."""

from __future__ import annotations

from array import array

import pytest

from twostroke.kv.cache import KVUsage
from twostroke.observe.record import Causes, PhaseRecord, RequestRecord, StepRecord, continued
from twostroke.route.router import MAX_MARKS, EngineState, Role, Router

MARKS = ("a", "b", "c")  # of the first 64, 128 and 256 tokens


def engines(prefill: int = 0, decode: int = 0, both: int = 0) -> list[EngineState]:
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    return [
        EngineState(f"{role}-{n}", role) for role, count in counts.items() for n in range(count)
    ]


def test_a_prompt_goes_to_the_prefill_engine_that_will_have_computed_it_first() -> None:
    one, other, _ = states = engines(prefill=2, decode=1)
    router = Router(states)
    one.queued_tokens = 500
    placement = router.place(400, ())
    assert placement is not None
    assert (placement.engine, placement.hand_over, placement.uncached) == (other, True, 400)
    assert placement.reason == "prefilled by prefill-1: 0 tokens before it"
    one.note_prompt(MARKS)
    other.queued_tokens = 300
    placement = router.place(400, MARKS)
    assert placement is not None
    assert (placement.engine, placement.uncached) == (one, 144), "500 + 144 against 300 + 400"
    assert placement.reason == "prefilled by prefill-0: 500 tokens before it, 256 of 400 cached"


def test_the_longest_beginning_that_is_known_counts() -> None:
    (one,) = engines(both=1)
    one.note_prompt(("a", "b"))
    assert [one.num_cached(marks) for marks in (MARKS, ("a",), ("x",), ())] == [128, 64, 0, 0]
    one.forget_prompts()
    assert one.num_cached(MARKS) == 0


def test_only_so_many_beginnings_are_remembered_the_newest() -> None:
    (one,) = engines(both=1)
    one.note_prompt(["old"])
    one.note_prompt([f"m{n}" for n in range(MAX_MARKS)])
    assert one.num_cached(["old"]) == 0
    assert one.num_cached([f"m{MAX_MARKS - 1}"]) == 64
    assert len(one._marks) == MAX_MARKS


def test_what_was_prefilled_goes_to_the_decode_engine_with_the_fewest_streams() -> None:
    _, one, other = states = engines(prefill=1, decode=2)
    one.streams, other.streams = 3, 2
    assert Router(states).place_decode() is other
    other.up = False
    assert Router(states).place_decode() is one
    one.up = False
    assert Router(states).place_decode() is None


@pytest.mark.parametrize(
    ("num_tokens", "streams", "direct"),
    [(9, 1, True), (9, 20, False), (200, 1, False), (300, 0, False)],
)
def test_a_decode_engine_prefills_itself_what_takes_less_than_a_hand_over(
    num_tokens: int, streams: int, direct: bool
) -> None:
    """A hand-over takes 10 ms, a prompt token 0.1 ms for each stream that waits."""
    prefill, decode = states = engines(prefill=1, decode=1)
    router = Router(states)
    decode.prefill_s, decode.streams = 1e-4, streams
    assert router.place(num_tokens, ()).engine is prefill, "what it takes is not known yet"  # type: ignore[union-attr]
    router.note_hand_over(0.01)
    placement = router.place(num_tokens, ())
    assert placement is not None
    assert placement.engine is (decode if direct else prefill)
    assert placement.hand_over is not direct
    if direct:
        assert placement.reason == (
            "prefilled by decode-0 itself: 9 tokens hold up its 1 streams for 0.9 ms, and a "
            "hand-over takes 10.0 ms"
        )


def test_a_conversation_goes_on_where_its_blocks_are() -> None:
    prefill, decode = states = engines(prefill=1, decode=1)
    router = Router(states)
    decode.prefill_s, decode.streams = 1e-4, 2
    router.note_hand_over(0.01)
    assert router.place(300, MARKS).engine is prefill  # type: ignore[union-attr]
    decode.note_prompt(MARKS)
    placement = router.place(300, MARKS)
    assert placement is not None
    assert (placement.engine, placement.uncached) == (decode, 44)


def test_one_token_is_written_by_whoever_prefills() -> None:
    prefill, _ = states = engines(prefill=1, decode=1)
    placement = Router(states).place(300, (), one_token=True)
    assert placement is not None
    assert (placement.engine, placement.hand_over) == (prefill, False)


def test_a_pool_that_is_down_is_stood_in_for() -> None:
    prefill, decode = states = engines(prefill=1, decode=1)
    router = Router(states)
    prefill.up = False
    placement = router.place(300, ())
    assert placement is not None
    assert (placement.engine, placement.hand_over) == (decode, False)
    assert placement.reason.endswith("no prefill engine is up")
    decode.up = False
    assert router.place(300, ()) is None


def test_copies_take_turns_and_keep_a_prefix_together() -> None:
    one, other = states = engines(both=2)
    router = Router(states)
    chosen = []
    for _ in range(6):
        placement = router.place(100, ())
        assert placement is not None
        placement.engine.streams += 1
        chosen.append(placement.engine)
    assert chosen == [one, other] * 3
    other.note_prompt(MARKS)
    assert router.place(300, MARKS).engine is other  # type: ignore[union-attr]
    other.streams += 5
    assert router.place(300, MARKS).engine is one, "there are limits"  # type: ignore[union-attr]


def step(prefill_tokens: int, device_s: float, decode_s: float) -> StepRecord:
    none, kv = PhaseRecord(0, 0, 0, 0.0, 0.0), KVUsage(0, 0, 0, 0, 0)
    prefill = PhaseRecord(1, prefill_tokens, 0, 0.0, 0.0)
    times = 0.0, 0.0, device_s, device_s, 0.0
    since = Causes(decode_s, device_s - decode_s)
    return StepRecord(0, *times, prefill, none, (), (), 0, 0, 0, kv, since_s=since)


def test_what_a_prompt_token_takes_is_learnt_from_steps() -> None:
    (one,) = engines(both=1)
    one.add_step(step(100, 0.03, 0.01))
    assert one.prefill_s == pytest.approx(2e-4)
    one.add_step(step(0, 5.0, 5.0))
    assert one.prefill_s == pytest.approx(2e-4)
    for _ in range(100):
        one.add_step(step(100, 0.01, 0.0))
    assert one.prefill_s == pytest.approx(1e-4, rel=0.01)


def test_the_records_of_two_engines_become_one() -> None:
    first = RequestRecord("r", 9, 1.0, scheduled_s=2.0, first_token_s=3.0, num_cached=4)
    first.token_s, first.token_step = array("d", [3.0]), array("q", [7])
    first.chunks = [(2.0, 7, 4, 5)]
    later = RequestRecord("r", 9, 1.0, scheduled_s=3.4, finished_s=4.5, finish_reason="stop")
    later.token_s, later.token_step = array("d", [3.5, 3.7]), array("q", [90, 91])
    later.gaps = later.worst_gap = Causes(decode=0.2)
    later.worst_gap_s = 0.2
    record = continued(first, later)
    assert record is first
    assert record.token_s.tolist() == [3.0, 3.5, 3.7]
    assert record.gaps == Causes(decode=0.2, preemption=0.5)
    assert (record.worst_gap_s, record.worst_gap) == (0.5, Causes(preemption=0.5))
    assert (record.finished_s, record.finish_reason) == (4.5, "stop")
    assert (record.scheduled_s, record.first_token_s, record.num_cached) == (2.0, 3.0, 4)
