"""Latency goals, on simulated machines with known step times and a simulated clock."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest

from tests.fakes import fake_request, groups
from tests.sched.test_steptime import Machine, a_cpu, a_gpu, chunk, slots
from twostroke.observe.record import RequestRecord
from twostroke.plan import PhaseWork, StepPlan, StepResult
from twostroke.sched.allowance import FLOOR_SHARE, MAX_PREFILL_STEPS, MIN_CHUNK
from twostroke.sched.deadlines import PATIENCE
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.slo import HALVE_EVERY, MIN_ITL_S
from twostroke.sched.step import SchedulerConfig

HOST_S = 2e-4


class Engine:
    """The loop of an engine on a simulated machine, with a clock of its own."""

    def __init__(
        self, machine: Machine, depth: int = 1, noise: float = 0.0, **settings: object
    ) -> None:
        limits: dict[str, object] = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "max_model_len": 16384,
            "block_size": 16,
            "groups": groups(8192),
            "prefix_caching": False,
        }
        self.now = 1.0
        config = SchedulerConfig(**(limits | settings))  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.plans: list[StepPlan] = []
        self.predicted_s = 0.0  # of the newest
        self.ended: dict[str, RequestRecord] = {}
        self._machine, self._depth, self._noise = machine, depth, noise
        self._rng = random.Random(1)
        self._flights: deque[tuple[float, StepResult]] = deque()
        self._free_s = 0.0  # when the device has nothing left to do

    def add(self, name: str, prompt: int, output: int = 4, **more: object) -> None:
        tokens = [n % 7 for n in range(prompt)]
        self.scheduler.add(fake_request(name, tokens, output, received_s=self.now, **more))

    def step(self) -> StepPlan | None:
        step = self.scheduler.plan()
        plan = None if step is None else step.plan
        if step is not None and plan is not None:
            self.plans.append(plan)
            self.predicted_s = step.predicted_device_s
            self.now += HOST_S
            took = self._machine(plan.prefill_work, plan.decode_work)
            took *= self._rng.lognormvariate(0.0, self._noise)
            self._free_s = max(self._free_s, self.now) + took
            written = len(plan.decode) + sum(chunk.last for chunk in plan.prefill)
            self._flights.append((self._free_s, StepResult([1] * written, {}, {}, took)))
        if self._flights and (plan is None or len(self._flights) >= self._depth):
            ready_s, result = self._flights.popleft()
            self.now = max(self.now, ready_s)
            for update in self.scheduler.commit(result).updates:
                if update.record is not None:
                    self.ended[update.request_id] = update.record
        self.scheduler.audit()
        return plan

    def until(self, *names: str) -> None:
        while not self.ended.keys() >= set(names):
            self.step()

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def warm_up(self) -> None:
        for n, (prompt, output) in enumerate(((8, 30), (100, 30), (300, 30), (700, 4))):
            self.add(f"warm{n}", prompt, output)
            for _ in range(4):
                self.step()
        while self.scheduler.has_requests:
            self.step()

    def disturbed(self, streams: int, prompt: int) -> tuple[list[float], RequestRecord]:
        """Return the gaps of streams from the arrival of a long prompt to its first token."""
        names = [f"stream{n}" for n in range(streams)]
        for name in names:
            self.add(name, 100, 5000)
        self.run_for(1.0)
        sent = self.now
        self.add("long", prompt, 1)
        self.until("long")
        gaps = []
        for name in names:
            update = self.scheduler.abort(name)
            assert update is not None
            assert update.record is not None
            times = [when for when in update.record.token_s if when >= sent - 0.1]
            gaps += [after - before for before, after in pairwise(times) if after > sent]
        return gaps, self.ended["long"]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("machine", "depth", "streams", "goal_s"),
    [
        (a_cpu, 1, 4, 0.05),
        (a_cpu, 1, 4, 0.1),
        (a_cpu, 1, 8, 0.3),
        (a_cpu, 2, 4, 0.1),
        (a_gpu, 1, 32, 0.012),
        (a_gpu, 2, 32, 0.012),
        (a_gpu, 2, 32, 0.05),
        (a_gpu, 2, 1, 0.025),
    ],
)
def test_streams_stay_within_the_goal_while_a_long_prompt_is_computed(
    machine: Machine, depth: int, streams: int, goal_s: float, noise: float
) -> None:
    engine = Engine(machine, depth, noise, itl_slo_s=goal_s)
    engine.warm_up()
    gaps, long = engine.disturbed(streams, 4000)
    assert sum(gap <= goal_s for gap in gaps) >= 0.97 * len(gaps)
    assert max(gaps) <= goal_s * (1.1 + 2 * noise)
    # The time that the goal leaves is used, the more of it the better steps are known.
    used = sorted(gap / goal_s for gap in gaps)[len(gaps) // 2]
    assert used > (0.7 if machine is a_cpu else 0.5)
    assert len(long.chunks) > 3


def test_without_a_goal_the_same_prompt_stops_the_streams() -> None:
    engine = Engine(a_cpu)
    engine.warm_up()
    gaps, long = engine.disturbed(4, 4000)
    assert max(gaps) > 3.0
    assert [size for _, _, _, size in long.chunks] == [2044, 1956]


def test_a_prompt_has_the_whole_budget_while_no_stream_writes() -> None:
    engine = Engine(a_cpu, itl_slo_s=0.02, max_num_batched_tokens=512)
    engine.add("long", 2000, 1)
    engine.until("long")
    assert [size for _, _, _, size in engine.ended["long"].chunks] == [512, 512, 512, 464]


def test_chunks_are_small_before_a_step_is_timed_and_then_grow() -> None:
    engine = Engine(a_gpu, itl_slo_s=0.1)
    engine.add("stream", 4, 500)
    engine.step()
    engine.add("long", 4000, 1)
    engine.until("long")
    sizes = [size for _, _, _, size in engine.ended["long"].chunks]
    assert sizes[:2] == [32, 32]
    for number, size in enumerate(sizes[2:], start=2):
        assert size <= 2 * max(sizes[:number])
    assert max(sizes) > 500


def test_first_chunks_do_not_stall_a_stream_if_every_token_costs_a_step() -> None:
    def slow(prefill: PhaseWork, decode: PhaseWork) -> float:
        return 5e-3 * (prefill.tokens + decode.tokens)

    engine = Engine(slow, max_decode_stall=8.0)
    engine.add("stream", 1, 500)
    for _ in range(20):
        engine.step()
    engine.add("long", 400, 1)
    engine.until("long")
    assert [size for _, _, _, size in engine.ended["long"].chunks][:2] == [8, 8]  # not 32
    update = engine.scheduler.abort("stream")
    assert update is not None
    assert update.record is not None
    gaps = [after - before for before, after in pairwise(update.record.token_s)]
    assert max(gaps) < 0.05  # 8 steady gaps of 5 ms, the stream's own token and the host


def test_one_step_in_sixteen_takes_half_so_that_sizes_differ() -> None:
    engine = Engine(a_cpu, itl_slo_s=0.1)
    engine.warm_up()
    _, long = engine.disturbed(4, 4000)
    sizes = {step: size for _, step, _, size in long.chunks[:-1]}
    halved = [step for step in sizes if sizes[step] < 0.7 * sizes.get(step - 1, 0)]
    assert halved == [step for step in sizes if step % HALVE_EVERY == 0 and step - 1 in sizes]
    assert len(halved) > 5


@pytest.mark.parametrize("machine", [a_cpu, a_gpu])
@pytest.mark.parametrize("depth", [1, 2])
def test_under_a_goal_that_cannot_be_met_every_prompt_ends_within_its_bound(
    machine: Machine, depth: int
) -> None:
    """The floor: each prompt is computed in at most MAX_PREFILL_STEPS steps once it is first in
    order, and streams wait no longer than for a quarter more than a step with one token of it."""
    engine = Engine(machine, depth, itl_slo_s=1e-4)
    engine.warm_up()
    for n in range(4):
        engine.add(f"stream{n}", 20, 15000)
    engine.run_for(0.5)
    first = len(engine.plans)
    lengths = [1500, 40, 700, 5, 64, 64, 200, 1300]
    for n, length in enumerate(lengths):
        engine.add(f"prompt{n}", length, 1)
    names = [f"prompt{n}" for n in range(len(lengths))]
    engine.until(*names)
    steps = 0
    for name, length in zip(names, lengths, strict=True):
        steps += min(MAX_PREFILL_STEPS, -(-length // MIN_CHUNK))
        last = engine.ended[name].chunks[-1][1]
        assert last - first <= steps + depth, f"{name} took longer than its bound"
    for plan in engine.plans[first:]:
        assert len(plan.decode) >= 4
        if plan.prefill_work.tokens > MIN_CHUNK:
            done = plan.prefill_work.kv_tokens // plan.prefill_work.tokens
            one = machine(chunk(done, 1), plan.decode_work)
            took = machine(plan.prefill_work, plan.decode_work)
            assert took <= 1.2 * (1 + FLOOR_SHARE) * one


def test_the_largest_prompts_are_computed_within_the_bound() -> None:
    engine = Engine(a_cpu, itl_slo_s=1e-4)
    engine.warm_up()
    engine.add("stream", 20, 15000)
    engine.run_for(0.5)
    engine.add("long", 12000, 1)
    engine.until("long")
    chunks = engine.ended["long"].chunks
    assert len(chunks) <= MAX_PREFILL_STEPS
    assert min(size for _, _, _, size in chunks[:-1]) >= 12000 // MAX_PREFILL_STEPS


def test_streams_advance_in_every_step_under_a_goal_for_the_first_token_alone() -> None:
    engine = Engine(a_cpu, ttft_slo_s=0.5)
    engine.warm_up()
    for n in range(4):
        engine.add(f"stream{n}", 20, 5000)
    engine.run_for(0.5)
    first = len(engine.plans)
    for n in range(40):
        engine.add(f"prompt{n}", 50 + 37 * n, 1)
    engine.until(*[f"prompt{n}" for n in range(40)])
    assert all(len(plan.decode) >= 4 for plan in engine.plans[first:])


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    engine = Engine(a_cpu, ttft_slo_s=1.0, itl_slo_s=0.1)
    engine.warm_up()
    engine.add("stream", 20, 5000)
    engine.run_for(0.5)
    engine.add("long", 4000, 1)  # takes longer than the goal, whatever is done
    engine.run_for(0.5)
    engine.add("short", 100, 1)
    engine.until("short", "long")
    assert list(engine.ended)[-2:] == ["short", "long"]
    assert engine.ended["short"].ttft_s < 1.0


def test_prompts_that_can_meet_the_goal_go_by_slack() -> None:
    """Both prompts came at the same time; the longer prompt must start sooner."""
    engine = Engine(a_cpu, ttft_slo_s=3.0, max_num_batched_tokens=64)
    engine.warm_up()
    engine.add("short", 60, 1)
    engine.add("longer", 600, 1)
    engine.until("short", "longer")
    assert list(engine.ended)[-2:] == ["longer", "short"]
    assert max(record.ttft_s for record in list(engine.ended.values())[-2:]) < 3.0


def test_no_request_is_overtaken_once_its_patience_has_ended() -> None:
    """A prompt that cannot meet the goal, under a flood of prompts that can."""
    goal_s = 0.4
    engine = Engine(a_cpu, ttft_slo_s=goal_s, itl_slo_s=0.1, max_num_seqs=8)
    engine.warm_up()
    engine.add("stream", 20, 5000)
    engine.run_for(0.5)
    engine.add("long", 1500, 1)
    received, n = engine.now, 0
    while "long" not in engine.ended:
        if engine.scheduler.num_waiting < 3:
            engine.add(f"short{n}", 60, 2)
            n += 1
        engine.step()
    long = engine.ended["long"]
    overtook = [record for name, record in engine.ended.items() if name.startswith("short")]
    assert len(overtook) > 10
    patience_s = received + PATIENCE * goal_s
    late = [chunk for chunk in long.chunks if chunk[0] > patience_s]
    alone = a_cpu(chunk(0, 1500), PhaseWork())
    assert late[0][0] <= patience_s + 0.2
    assert long.first_token_s <= patience_s + 2 * alone


def test_a_stream_that_was_preempted_comes_first() -> None:
    engine = Engine(a_cpu, ttft_slo_s=0.5, groups=groups(24), lookahead=0, max_model_len=380)
    for n in range(2):
        engine.add(f"stream{n}", 150, 150)
    while not any(record.preempted for record in records_of(engine)):
        engine.step()
    engine.add("new", 20, 4)
    engine.until("stream0", "stream1", "new")
    let_in = [new.request_id for plan in engine.plans for new in plan.new]
    assert let_in == ["stream0", "stream1", "stream1", "new"]


def records_of(engine: Engine) -> list[RequestRecord]:
    return [request.record for request in engine.scheduler._requests.values()]


def test_priorities_come_before_slack() -> None:
    engine = Engine(a_cpu, ttft_slo_s=3.0, policy="priority", max_num_batched_tokens=64)
    engine.warm_up()
    engine.add("urgent", 600, 1, priority=5)
    engine.add("important", 60, 1, priority=0)
    engine.until("urgent", "important")
    assert list(engine.ended)[-2:] == ["important", "urgent"]


def test_requests_that_end_while_they_wait_are_swept() -> None:
    engine = Engine(a_cpu, ttft_slo_s=1.0, max_num_seqs=1)
    for n in range(200):
        engine.add(f"r{n}", 10 + n % 7, 3)
    engine.step()
    for n in range(1, 199):
        assert engine.scheduler.abort(f"r{n}") is not None
    assert engine.scheduler.num_waiting == 1
    engine.until("r0", "r199")
    assert engine.scheduler.num_waiting == 0


def live(machine: Machine, **goals: object) -> list[StepPlan]:
    engine = Engine(machine, 2, 0.1, max_num_batched_tokens=256, **goals)
    for n in range(60):
        engine.add(f"r{n}", 10 + n * 13 % 400, 5 + n % 20)
        for _ in range(3):
            engine.step()
    while engine.scheduler.has_requests:
        engine.step()
    return engine.plans


def test_the_same_events_at_the_same_times_give_the_same_plans() -> None:
    goals = {"ttft_slo_s": 0.5, "itl_slo_s": 0.05}
    assert live(a_cpu, **goals) == live(a_cpu, **goals)
    assert live(a_cpu, **goals) != live(a_gpu, **goals)


def test_without_goals_time_changes_nothing() -> None:
    assert live(a_cpu) == live(a_gpu)


def test_the_predicted_time_of_a_step_comes_with_its_plan() -> None:
    engine = Engine(a_cpu)
    assert engine.predicted_s == 0.0
    engine.warm_up()
    for n in range(3):
        engine.add(f"r{n}", 100, 20)
    off = []
    while engine.scheduler.has_requests:
        plan = engine.step()
        assert plan is not None
        true = a_cpu(plan.prefill_work, plan.decode_work)
        off.append(abs(engine.predicted_s - true) / true)
    assert max(off) < 0.15
    assert engine.scheduler.pacer.host_s == pytest.approx(HOST_S, rel=0.1)
    assert engine.scheduler.pacer.times.predict(PhaseWork(), slots(3, 100)) is not None


# ── max_decode_stall: the default ───────────────────────────────────────────────────────────


def steady_gap(machine: Machine, streams: int) -> float:
    engine = Engine(machine)
    for n in range(streams):
        engine.add(f"stream{n}", 100, 5000)
    engine.run_for(10.0)
    times = engine.scheduler.abort("stream0").record.token_s  # type: ignore[union-attr]
    return times[-1] - times[-2]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("machine", "depth", "streams"),
    [(a_cpu, 1, 1), (a_cpu, 1, 4), (a_cpu, 2, 4), (a_cpu, 1, 32), (a_gpu, 2, 1), (a_gpu, 2, 32)],
)
def test_a_long_prompt_stalls_streams_for_eight_steady_gaps_and_costs_a_quarter_at_most(
    machine: Machine, depth: int, streams: int, noise: float
) -> None:
    unbounded = Engine(machine, depth, noise)
    unbounded.warm_up()
    worst, alone = unbounded.disturbed(streams, 4000)
    engine = Engine(machine, depth, noise, max_decode_stall=8.0)
    engine.warm_up()
    gaps, long = engine.disturbed(streams, 4000)
    steady = steady_gap(machine, streams)
    assert max(gaps) <= max(8 * steady, MIN_ITL_S) * (1.1 + 2 * noise)
    assert max(gaps) < max(worst)
    assert long.ttft_s <= 1.25 * (1 + noise) * alone.ttft_s


def test_if_prompts_always_wait_a_step_without_prefill_is_planned_now_and_then() -> None:
    engine = Engine(a_cpu, max_decode_stall=8.0, max_num_batched_tokens=512)
    engine.warm_up()
    engine.add("first", 100, 5000)
    engine.run_for(0.5)
    for n in range(24):  # many more streams than the steps without prefill have had
        engine.add(f"stream{n}", 100, 5000)
    engine.add("long", 9000, 1)
    engine.until("long")
    decode_rows = [len(plan.decode) for plan in engine.plans if plan.decode and not plan.prefill]
    assert sum(rows == 25 for rows in decode_rows) >= 3
    # So the streams' own time is known, and prefill has the seven eighths that it leaves.
    mixed = [plan for plan in engine.plans if plan.prefill and len(plan.decode) == 25]
    times = [
        a_cpu(plan.prefill_work, plan.decode_work) / a_cpu(PhaseWork(), plan.decode_work)
        for plan in mixed[-16:]
    ]
    assert 6.0 < sorted(times)[8] <= 8.0


@pytest.mark.parametrize("settings", [{"max_decode_stall": 8.0}, {"itl_slo_s": 0.1}])
def test_an_engine_that_receives_keeps_steps_short_while_no_stream_writes(
    settings: dict[str, float],
) -> None:
    goal_s = max(8 * steady_gap(a_cpu, 1), MIN_ITL_S) if "max_decode_stall" in settings else 0.1
    for receives in (False, True):
        engine = Engine(a_cpu, receives_requests=receives, **settings)
        engine.warm_up()
        engine.plans.clear()
        engine.add("prompt", 1000, 1)
        engine.until("prompt")
        longest_s = max(a_cpu(plan.prefill_work, plan.decode_work) for plan in engine.plans)
        assert (longest_s <= 1.1 * goal_s) == receives
        assert (len(engine.ended["prompt"].chunks) == 1) == (not receives)


def test_an_engine_that_receives_and_has_timed_no_step_takes_a_prompt_whole() -> None:
    engine = Engine(a_cpu, receives_requests=True, max_decode_stall=8.0)
    engine.add("prompt", 1000, 1)
    engine.until("prompt")
    assert len(engine.ended["prompt"].chunks) == 1


def test_an_executor_that_reports_no_times_does_not_keep_prompts_waiting() -> None:
    engine = Engine(lambda prefill, decode: 0.0, max_decode_stall=8.0)
    engine.add("stream", 10, 5000)
    for _ in range(3):
        engine.step()
    engine.add("long", 5000, 1)
    for _ in range(16):
        engine.step()
    assert "long" in engine.ended
