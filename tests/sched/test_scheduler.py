"""Decisions of the schedule, one at a time, over a model made of hashes."""

from __future__ import annotations

import pytest

from tests.fakes import FakeExecutor, expected_tokens, fake_request, groups
from twostroke.errors import RequestError
from twostroke.kv.cache import GroupLimits
from twostroke.plan import StepPlan, StepResult
from twostroke.request import FinishReason
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig
from twostroke.sched.work import visible_positions


class Bench:
    """A scheduler and a fake executor, stepped by hand."""

    def __init__(self, **settings: object) -> None:
        limits: dict[str, object] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "block_size": 4,
            "groups": groups(64),
        }
        self.config = SchedulerConfig(**(limits | settings))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.executor = FakeExecutor(self.config.block_size, self.scheduler.kv.windows)
        self.preempted = 0
        self.written: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def add(self, name: str, prompt: object, *args: object, **more: object) -> None:
        tokens = [n % 7 for n in range(prompt)] if isinstance(prompt, int) else prompt
        self.scheduler.add(fake_request(name, tokens, *args, **more))  # type: ignore[arg-type]
        self.written[name] = []

    def step(self) -> StepPlan:
        step = self.scheduler.plan()
        assert step is not None
        self.preempted += step.preempted
        for update in self.scheduler.commit(self.executor.run(step.plan)).updates:
            self.written[update.request_id] += update.tokens
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.finish_reason
        self.executor.committed()
        self.scheduler.audit()
        return step.plan

    def run(self, most: int = 1000) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_requests:
            plans.append(self.step())
            assert len(plans) < most
        return plans


def shape(plan: StepPlan) -> tuple[list[tuple[int, int]], int]:
    """The chunks as (start, size), and the number of decode slots."""
    return [(chunk.start, chunk.size) for chunk in plan.prefill], len(plan.decode)


def test_a_long_prompt_is_cut_to_the_budget_and_then_decoded() -> None:
    bench = Bench()
    bench.add("a", 40, 3)
    assert [shape(plan) for plan in bench.run()] == [
        ([(0, 16)], 0),
        ([(16, 16)], 0),
        ([(32, 8)], 0),
        ([], 1),
        ([], 1),
    ]


def test_decode_slots_come_first_and_chunks_fill_the_rest() -> None:
    bench = Bench(prefix_caching=False)
    bench.add("a", 4, 10)
    bench.add("b", 4, 10)
    bench.step()
    bench.add("long", 30, 2)
    assert [shape(bench.step()) for _ in range(3)] == [
        ([(0, 14)], 2),
        ([(14, 14)], 2),
        ([(28, 2)], 2),
    ]


def test_several_prompts_share_a_step() -> None:
    bench = Bench(prefix_caching=False)
    for name in "abc":
        bench.add(name, 5, 1)
    assert shape(bench.step()) == ([(0, 5), (0, 5), (0, 5)], 0)


def test_requests_run_in_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=1, prefix_caching=False)
    for name in "abc":
        bench.add(name, 5, 2)
    bench.run()
    assert list(bench.ended) == ["a", "b", "c"]


def test_under_the_priority_policy_the_lower_number_goes_first() -> None:
    bench = Bench(max_num_seqs=1, policy="priority")
    bench.add("late", 5, 2, priority=5)
    bench.add("soon", 5, 2, priority=1)
    bench.add("also soon", 5, 2, priority=1)
    bench.run()
    assert list(bench.ended) == ["soon", "also soon", "late"]


def test_a_request_that_has_waited_long_goes_before_a_more_important_request() -> None:
    now = 1000.0
    bench = Bench(max_num_seqs=1, policy="priority")
    bench.scheduler = Scheduler(bench.config, clock=lambda: now)
    bench.add("first", 5, 2, priority=3)
    now += 25.0  # two levels and a half
    bench.add("more important by two", 5, 2, priority=1)
    bench.add("more important by three", 5, 2, priority=0)
    bench.add("as important", 5, 2, priority=3)
    bench.run()
    assert list(bench.ended) == [
        "more important by three",
        "first",
        "more important by two",
        "as important",
    ]


def test_a_flood_of_important_requests_does_not_starve_other_requests() -> None:
    now = 0.0
    bench = Bench(max_num_seqs=1, policy="priority")
    bench.scheduler = Scheduler(bench.config, clock=lambda: now)
    bench.add("patient", 5, 2, priority=4)
    for n in range(100):
        bench.add(f"important {n}", 5, 2)
        while f"important {n}" not in bench.ended and "patient" not in bench.ended:
            bench.step()
        now += 1.0
        if "patient" in bench.ended:
            break
    assert 40 <= n <= 42  # four levels, ten seconds each
    bench.run()


def test_the_least_important_request_is_preempted_first() -> None:
    bench = Bench(groups=groups(8), policy="priority", lookahead=0, prefix_caching=False)
    bench.add("unimportant", 8, 20, priority=9)
    bench.step()
    bench.add("important", 8, 20, priority=0)
    bench.run()
    assert list(bench.ended) == ["important", "unimportant"]
    expected = expected_tokens(fake_request("x", [n % 7 for n in range(8)], 20), 64)
    assert bench.written["unimportant"] == expected


def test_without_chunked_prefill_a_prompt_waits_for_a_step_it_fits_whole() -> None:
    bench = Bench(chunked_prefill=False, max_num_batched_tokens=64, prefix_caching=False)
    bench.add("a", 40, 3)
    bench.add("b", 40, 3)
    assert [shape(plan) for plan in bench.run()] == [
        ([(0, 40)], 0),
        ([(0, 40)], 1),
        ([], 2),
        ([], 1),
    ]


def test_siblings_share_the_full_blocks_of_their_prompt_even_without_prefix_caching() -> None:
    bench = Bench(prefix_caching=False, max_num_batched_tokens=32)
    for n in range(3):
        bench.add(f"s{n}", 14, 4, seed=n + 1, family="s")
    plan = bench.step()
    assert shape(plan) == ([(0, 14), (12, 2), (12, 2)], 0)
    usage = bench.scheduler.kv.usage()
    assert usage.used == 12 + 3 * 2
    bench.run()
    assert bench.scheduler.kv.usage().cached == 0


def test_admission_does_not_admit_requests_that_would_soon_be_preempted() -> None:
    """Eight requests that grow to five blocks each, in a cache of twelve."""
    preempted = {}
    for lookahead in (0, 16):
        bench = Bench(groups=groups(12), lookahead=lookahead, prefix_caching=False)
        for n in range(8):
            bench.add(f"r{n}", [n % 7] * 6, 14)
        bench.run()
        preempted[lookahead] = bench.preempted
    assert preempted[0] > 0
    assert preempted[16] == 0


def test_a_preempted_request_resumes_from_its_cached_prefix() -> None:
    bench = Bench(groups=groups(9), lookahead=0)
    bench.add("old", [1] * 8, 16)
    bench.add("young", [2] * 8, 16)
    plans = bench.run()
    resumed = [plan for plan in plans for new in plan.new if len(new.tokens) > 8]
    assert resumed, "nothing was preempted"
    assert resumed[0].prefill[0].start > 0
    assert list(bench.ended) == ["old", "young"]


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    bench = Bench(groups=groups(5))
    with pytest.raises(RequestError, match=r"need 9 KV blocks of 4 tokens, but the cache has 5"):
        bench.add("a", 20, 16)
    with pytest.raises(RequestError, match=r"the prompt has 64 tokens, but max_model_len is 64"):
        bench.add("b", 64, 1)
    assert not bench.scheduler.has_requests
    bench.add("c", 10, 4)
    bench.run()
    assert bench.ended == {"c": FinishReason.LENGTH}


def test_a_window_lets_a_request_grow_past_the_cache() -> None:
    bench = Bench(groups=groups(10, 8), max_model_len=200, max_num_batched_tokens=12)
    bench.add("a", 90, 60)
    bench.run()
    assert len(bench.written["a"]) == 60


def test_a_request_that_can_never_fit_one_group_is_refused_with_that_group() -> None:
    limits = (GroupLimits(64), GroupLimits(5, window=8))
    bench = Bench(groups=limits)
    bench.add("short", 16, 4)
    message = r"need 7 KV blocks of 4 tokens for layers of window 8, but the cache has 5"
    with pytest.raises(RequestError, match=message):
        bench.add("long", 30, 10)  # a window of 8 and a chunk of 16
    bench.run()
    assert bench.ended == {"short": FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("limits", "at_once"),
    [
        ((GroupLimits(64), GroupLimits(64, window=8)), 4),
        ((GroupLimits(20), GroupLimits(64, window=8)), 2),  # of ten blocks each
        ((GroupLimits(64), GroupLimits(11, window=8)), 2),  # of three, and seven with a chunk
    ],
)
def test_the_smallest_group_limits_the_running_requests(
    limits: tuple[GroupLimits, ...], at_once: int
) -> None:
    bench = Bench(groups=limits, prefix_caching=False)
    for n in range(4):
        bench.add(f"r{n}", [n] * 30, 10)
    most = max(len(plan.decode) for plan in bench.run())
    assert (most, bench.preempted) == (at_once, 0)
    for n in range(4):
        expected = expected_tokens(fake_request("x", [n] * 30, 10), 64)
        assert bench.written[f"r{n}"] == expected


def test_preemption_frees_blocks_in_all_groups() -> None:
    limits = (GroupLimits(64), GroupLimits(7, window=12))
    bench = Bench(groups=limits, lookahead=0, prefix_caching=False, max_num_batched_tokens=8)
    for name in ("old", "young"):
        bench.add(name, 8, 24)
    bench.run()
    assert bench.preempted > 0
    assert list(bench.ended) == ["old", "young"]
    assert [usage.free for usage in bench.scheduler.kv.group_usage()] == [64 * 4, 7 * 4]


def test_an_abort_frees_everything_at_any_moment() -> None:
    bench = Bench(max_num_seqs=2, prefix_caching=False)
    for name in ("chunked", "second", "waiting"):
        bench.add(name, 30, 5)
    bench.step()
    for name in ("chunked", "waiting", "second"):
        update = bench.scheduler.abort(name)
        assert update is not None
        assert update.finish_reason is FinishReason.ABORT
        bench.scheduler.audit()
    assert bench.scheduler.kv.usage().free == 64 * 4
    assert bench.scheduler.abort("second") is None
    assert bench.scheduler.plan() is None


def test_ten_thousand_aborts_of_waiting_requests_leave_no_trace() -> None:
    bench = Bench(max_num_seqs=1)
    for n in range(10_000):
        bench.add(f"r{n}", 4, 2)
    for n in range(1, 10_000):
        bench.scheduler.abort(f"r{n}")
    assert bench.scheduler.num_waiting == 1
    bench.run()
    assert bench.ended == {"r0": FinishReason.LENGTH}


def test_a_long_prompt_waits_a_bounded_time_under_steady_decode() -> None:
    """Short requests keep arriving and writing; the long prompt still moves on in every step."""
    bench = Bench(max_num_batched_tokens=10, groups=groups(200), prefix_caching=False)
    for n in range(7):
        bench.add(f"first{n}", 2, 40)
    bench.step()
    bench.step()
    bench.add("long", 48, 1)
    steps = 0
    while "long" not in bench.ended:
        bench.add(f"flood{steps}", 3, 5)
        bench.step()
        steps += 1
        assert steps <= 48 // 3 + 2
    assert bench.ended["long"] is FinishReason.LENGTH


def test_running_streams_keep_a_bounded_gap_under_a_flood_of_prompts() -> None:
    """Every stream gets a token in every step, and no step is larger than the budget."""
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=20, groups=groups(500))
    bench.add("stream", 4, 50)
    bench.step()
    for n in range(40):
        bench.add(f"flood{n}", 30, 3)
        before = len(bench.written["stream"])
        plan = bench.step()
        assert plan.num_tokens <= 20
        assert len(bench.written["stream"]) == before + 1


class Poisoned(FakeExecutor):
    """Cannot run a step that holds a certain request."""

    poison = "poison"

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        planned = {chunk.row for chunk in plan.prefill} | {slot.row for slot in plan.decode}
        if any(self.rows[row].new.request_id == self.poison for row in planned):
            raise RuntimeError("this one again")
        return result


def run_poisoned(bench: Bench, most: int = 500) -> dict[str, str]:
    """Run until no request is left; return the errors of requests that failed."""
    told = {}
    executor = bench.executor = Poisoned(bench.config.block_size)
    for _ in range(most):
        if not bench.scheduler.has_requests:
            break
        try:
            bench.step()
        except RuntimeError as error:
            executor.rows.clear()
            executor.slots.clear()
            executor.uncommitted.clear()
            for update in bench.scheduler.fail(str(error)):
                told[update.request_id] = update.error
            bench.scheduler.audit()
    assert not bench.scheduler.has_requests
    return told


def test_a_request_that_breaks_its_step_ends_alone_and_other_requests_lose_nothing() -> None:
    bench = Bench(max_num_batched_tokens=64, max_num_seqs=4)
    names = ["a", "b", "poison", "c", "waits", "waits too"]
    for n, name in enumerate(names):
        bench.add(name, [n] * (5 + n), 6, seed=n)
    told = run_poisoned(bench)
    assert told == {"poison": "this one again"}
    for n, name in enumerate(names):
        if name != "poison":
            given = fake_request(name, [n] * (5 + n), 6, seed=n)
            assert bench.written[name] == expected_tokens(given, 64)
            assert bench.ended[name] is FinishReason.LENGTH
    assert bench.scheduler.kv.is_idle()


def test_a_request_that_breaks_while_it_decodes_is_found_too() -> None:
    bench = Bench(max_num_batched_tokens=64)
    for n, name in enumerate(["a", "later", "b"]):
        bench.add(name, [n + 1] * 6, 8, seed=n)
    bench.step()
    bench.step()
    Poisoned.poison = "later"
    try:
        # The executor is new: what ran must be sent to it again.
        bench.scheduler.plan()
        bench.scheduler.fail("first")
        told = run_poisoned(bench)
    finally:
        Poisoned.poison = "poison"
    assert told == {"later": "this one again"}
    assert set(bench.ended) == {"a", "b"}
    assert bench.written["a"] == expected_tokens(fake_request("a", [1] * 6, 8, seed=0), 64)


def test_a_suspect_may_be_aborted_at_any_moment() -> None:
    bench = Bench(max_num_batched_tokens=64)
    for n, name in enumerate("abcd"):
        bench.add(name, [n] * 5, 4)
    assert bench.scheduler.plan() is not None
    assert bench.scheduler.fail("whose fault?") == []
    assert bench.scheduler.num_waiting == 4
    for name in "ca":
        assert bench.scheduler.abort(name) is not None
        bench.scheduler.audit()
    assert run_poisoned(bench) == {}
    assert set(bench.ended) == {"b", "d"}


def test_a_failed_step_drops_every_cached_prefix() -> None:
    bench = Bench()
    bench.add("ran", 12, 4)
    assert bench.scheduler.plan() is not None
    (update,) = bench.scheduler.fail("out of memory")
    assert (update.request_id, update.finish_reason) == ("ran", FinishReason.ERROR)
    assert update.error == "out of memory"
    bench.scheduler.audit()
    assert bench.scheduler.kv.usage().free == 64 * 4


@pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 5), (3, 4), (9, 3), (2, 9)])
@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
def test_visible_positions_count_what_each_query_sees(
    start: int, size: int, window: int | None
) -> None:
    by_hand = sum(min(p + 1, window or p + 1) for p in range(start, start + size))
    assert visible_positions(start, size, window) == by_hand
