"""The tokens that each drafter offers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.fakes import fake_request
from twostroke.draft.drafters import NgramDrafter, PredictedDrafter, SuffixDrafter
from twostroke.request import EngineRequest


@dataclass
class FakeText:
    tokens: list[int]
    num_prompt: int = 0
    salt: str = ""
    prediction: list[int] = field(default_factory=list)
    engine_request: EngineRequest = field(default_factory=lambda: fake_request("a", [1]))


def offered(drafter: NgramDrafter | SuffixDrafter | PredictedDrafter, text: FakeText, k: int = 4):  # type: ignore[no-untyped-def]
    state = drafter.open(text)
    offer = None if state is None else state.propose(k)
    return () if offer is None else offer.tokens


# ── n-gram ──────────────────────────────────────────────────────────────────────────────────


def test_an_ngram_is_followed_by_the_tokens_that_followed_it_before() -> None:
    assert offered(NgramDrafter(2, 3), FakeText([5, 1, 2, 3, 4, 9, 5, 1, 2])) == (3, 4, 9, 5)


def test_the_longest_match_wins_then_the_newest() -> None:
    text = [7, 1, 2, 30, 0, 8, 1, 2, 31, 0, 9, 1, 2, 32, 0, 8, 1, 2]
    assert offered(NgramDrafter(2, 3), FakeText(text), 1) == (31,)
    text = [7, 1, 2, 30, 0, 9, 1, 2, 32, 0, 6, 1, 2]
    assert offered(NgramDrafter(2, 3), FakeText(text), 1) == (32,)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert (
        offered(NgramDrafter(2, 4), FakeText([1, 2, 3, 1, 2, 3, 1, 2, 3]), 7) == ((1, 2, 3) * 3)[:7]
    )


def test_a_match_shorter_than_the_least_is_no_match() -> None:
    assert offered(NgramDrafter(3, 5), FakeText([1, 2, 9, 1, 2])) == ()
    assert offered(NgramDrafter(3, 5), FakeText([1])) == ()


def test_the_index_follows_a_text_that_grows() -> None:
    text = FakeText([1, 2, 3])
    state = NgramDrafter(2, 4).open(text)
    assert state is not None
    assert state.propose(2) is None
    for token, expected in [(1, ()), (2, (3, 1)), (3, (1, 2)), (7, ())]:
        text.tokens.append(token)
        offer = state.propose(2)
        assert (() if offer is None else offer.tokens) == expected


# ── suffix ──────────────────────────────────────────────────────────────────────────────────


def ended(drafter: SuffixDrafter, tokens: list[int], salt: str = "") -> None:
    drafter.close(FakeText(tokens, num_prompt=1, salt=salt))


def test_the_most_frequent_continuation_of_earlier_requests_is_offered() -> None:
    drafter = SuffixDrafter(8, factor=4.0)
    for last in (7, 8, 8, 8):
        ended(drafter, [1, 2, 3, last, last])
    state = drafter.open(FakeText([0, 2, 3]))
    assert state is not None
    offer = state.propose(3)
    assert offer is not None
    assert offer.tokens == (8, 8)
    assert offer.priors == pytest.approx((0.2 + 0.6 * 0.75, 0.2 + 0.6))


def test_a_draft_ends_where_its_probability_falls_below_the_least() -> None:
    drafter = SuffixDrafter(8, factor=8.0, min_prob=0.5)
    for tail in ([4, 5, 6], [4, 5, 7], [4, 9, 9], [8, 8, 8]):
        ended(drafter, [1, 2, 3, *tail])
    # 3/4 · 2/3 = 0.5 is enough; 3/4 · 2/3 · 1/2 is not.
    assert offered(drafter, FakeText([0, 2, 3]), 8) == (4, 5)


def test_a_draft_is_at_most_as_long_as_the_factor_times_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert len(offered(SuffixDrafter(8, factor=1.0), FakeText(list(text)), 8)) == 3
    assert len(offered(SuffixDrafter(8, factor=2.0), FakeText(list(text)), 8)) == 6


def test_requests_of_another_salt_are_not_seen() -> None:
    drafter = SuffixDrafter(8, factor=4.0)
    ended(drafter, [1, 2, 3, 4, 5], salt="tenant")
    assert offered(drafter, FakeText([0, 2, 3], salt="tenant")) == (4, 5)
    assert offered(drafter, FakeText([0, 2, 3], salt="other")) == ()
    assert offered(drafter, FakeText([0, 2, 3])) == ()


def test_a_request_that_wrote_nothing_is_not_kept() -> None:
    drafter = SuffixDrafter(8)
    drafter.close(FakeText([1, 2, 3, 4], num_prompt=4))
    assert drafter.num_shared == 0


def test_memory_is_bounded_over_all_salts() -> None:
    drafter = SuffixDrafter(8, shared_capacity=500)
    for n in range(100):
        ended(drafter, list(range(n, n + 40)), salt=f"s{n % 9}")
        assert drafter.num_shared <= 500 + 41
    assert drafter.shared("s0") is not None
    for n in range(300):
        ended(drafter, [1, 2, 3], salt=f"t{n}")
    assert len(drafter._shared) <= 64
    assert len(drafter._requests) <= 64


def test_earlier_requests_are_limited_in_number() -> None:
    drafter = SuffixDrafter(8, factor=4.0, max_requests=2)
    for n in range(3):
        ended(drafter, [1, 2, 3, 10 + n])
    assert offered(drafter, FakeText([0, 2, 3])) == (12,)
    none = SuffixDrafter(8, max_requests=0)
    ended(none, [1, 2, 3, 4])
    assert none.num_shared == 0


# ── predicted output ────────────────────────────────────────────────────────────────────────


def test_a_prediction_is_followed_and_found_again_after_a_difference() -> None:
    text = FakeText([50, 51], num_prompt=2, prediction=[1, 2, 3, 4, 5, 6, 7, 8])
    state = PredictedDrafter().open(text)
    assert state is not None

    def after(*tokens: int) -> tuple[int, ...]:
        text.tokens += tokens
        offer = state.propose(2)
        return () if offer is None else offer.tokens

    assert after(1) == (2, 3)
    assert after(2, 3) == (4, 5)
    assert after(90) == ()  # another token in place of 4
    assert after(91, 5) == ()  # two tokens have to agree
    assert after(6) == (7, 8)
    assert after(7, 8) == ()  # the prediction is at its end


def test_a_request_without_a_prediction_has_no_such_draft() -> None:
    assert PredictedDrafter().open(FakeText([1, 2], 2)) is None
