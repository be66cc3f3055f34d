"""Random lives of requests through scheduler and KV bookkeeping, over a model made of hashes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from tests.fakes import (
    FakeDraftRunner,
    FakeExecutor,
    expected_tokens,
    fake_request,
    groups,
    random_prompt,
)
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.errors import RequestError
from twostroke.kv.cache import GroupLimits, blocks_held
from twostroke.kv.eviction import Eviction
from twostroke.plan import StepPlan, StepResult
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.model_drafter import ModelDrafter, Vocabularies
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig
from twostroke.sched.updates import Update

SCENARIOS = 400


class Life:
    """Runs one scenario and records what each request does."""

    def __init__(
        self,
        seed: int,
        goals: bool = False,
        windows: tuple[int | None, ...] = (),
        evicts: bool = False,
        drafts: bool = False,
        model: bool = False,
    ) -> None:
        """`windows`: of the KV groups; if empty, one group with a random window or none. `evicts`:
        one group without a window, and an eviction policy. `drafts`: speculative decoding;
        `model`: with a draft model."""
        rng = self.rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8])
        window = rng.choice([None, None, None, rng.randint(1, 20)])
        rows = rng.choice([1, 2, 4, 8])
        chunked = rng.random() < 0.85
        longest = rng.choice([12, 24, 48])
        budget = rng.randint(rows + 1, rows + 24) if chunked else max(longest, rows + 1)
        limits = groups(-(-longest // block_size) + rng.choice([0, 1, 4, 30]), window)
        if windows:
            longest *= 4
            budget = max(budget, 0 if chunked else longest)
            limits = self.some_blocks(rng, windows, longest, budget, block_size)
        self.config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=longest,
            block_size=block_size,
            groups=limits,
            policy=rng.choice(["fcfs", "priority"]),
            chunked_prefill=chunked,
            prefix_caching=rng.random() < 0.75,
            lookahead=rng.choice([0, 4, 16]),
        )
        if evicts:
            budget_blocks = rng.choice([4, 5, 9])
            blocks = max(budget_blocks, -(-longest // block_size)) + rng.choice([0, 0, 1, 4])
            self.config = replace(
                self.config,
                max_num_seqs=max(rows, 4),
                max_num_batched_tokens=max(budget, 6),
                max_model_len=4 * longest,
                chunked_prefill=True,
                lookahead=0,
                groups=groups(blocks),
                eviction=Eviction(budget_blocks),
            )
        self.longest_prompt = longest
        self.depth = rng.choice([1, 1, 2, 3])
        self.drafts = drafts
        if drafts:  # its own random numbers: a life is the same with and without
            self.config, self.depth = with_drafts(self.config, random.Random(-2 - seed)), 1
        self.failing = rng.choice([0, 0, 0, 0.03])  # share of the steps that fail
        if evicts:
            self.failing = rng.choice([0, 0.01, 0.05])
        if goals:
            self.config = with_goals(self.config, random.Random(-1 - seed))
        self.now = 0.0
        self.runner: FakeDraftRunner | None = None
        drafter = self.new_drafter(random.Random(-3 - seed)) if model else None
        self.scheduler = Scheduler(self.config, clock=lambda: self.now, draft_model=drafter)
        self.executor = self.new_executor()
        self.flights: deque[StepResult] = deque()
        self.given: dict[str, EngineRequest] = {}
        self.written: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.added_at: dict[str, int] = {}
        self.steps = 0
        self.idle_turns = 0

    def new_executor(self) -> FakeExecutor:
        eviction = self.config.eviction
        budget = None if eviction is None else eviction.budget_blocks
        return FakeExecutor(self.config.block_size, self.scheduler.kv.windows, budget)

    def new_drafter(self, rng: random.Random) -> ModelDrafter:
        """A draft model with some limits of its own, which fails now and then."""
        size = rng.choice([1, 2, 4, 8])
        windows = rng.choice([(None,), (None,), (16,), (None, 16)])
        longest = self.config.max_model_len - rng.choice([0, 0, 3])
        limits = replace(
            self.config,
            block_size=size,
            groups=groups(-(-longest // size) * rng.choice([1, 2, 8]) + 2, *windows),
            max_model_len=longest,
            speculation=None,
        )
        self.runner = FakeDraftRunner(size, windows, rng.choice([0, 0, 1, 2, 5]))
        self.runner.token_s = rng.choice([0.0, 1e-4, 5e-3])
        if rng.random() < 0.2:
            self.runner.failing = [rng.randrange(60) for _ in range(2)]
        return ModelDrafter(limits, self.runner, Vocabularies(7, 7), rng.choice([0.0, 0.5]))

    @staticmethod
    def some_blocks(
        rng: random.Random, windows: tuple[int | None, ...], longest: int, chunk: int, size: int
    ) -> tuple[GroupLimits, ...]:
        """Return blocks for each group: as many as one sequence needs, or a few more."""
        least = [blocks_held(longest, window, chunk, size) for window in windows]
        blocks = [count + rng.choice([0, 1, 4, 30]) for count in least]
        return tuple(map(GroupLimits, blocks, windows))

    def arrive(self) -> None:
        rng, number = self.rng, len(self.given)
        prompt = self.prompt()
        siblings = rng.choice([1, 1, 1, 3])
        for index in range(siblings):
            given = fake_request(
                f"r{number}.{index}",
                prompt,
                rng.choice([1, 3, 8, 30, None]),
                seed=rng.randint(0, 2),
                stop=rng.random() < 0.5,
                min_tokens=rng.choice([0, 0, 1]),
                priority=rng.randint(0, 2),
                salt=rng.choice(["", "", "tenant"]),
                family=f"f{number}" if siblings > 1 else "",
            )
            if self.drafts:
                given = predicted(given, self.config.max_model_len, rng)
            try:
                self.scheduler.add(given)
            except RequestError:
                assert len(prompt) >= self.longest_prompt
                continue
            self.given[given.request_id] = given
            self.written[given.request_id] = []
            self.added_at[given.request_id] = self.steps

    def prompt(self) -> list[int]:
        return random_prompt(self.rng, self.longest_prompt + 1)

    def abort_one(self) -> None:
        alive = [name for name in self.given if name not in self.ended]
        if alive:
            name = self.rng.choice(alive)
            update = self.scheduler.abort(name)
            assert update is not None
            self.take(update)
            assert self.scheduler.abort(name) is None

    def take(self, update: Update) -> None:
        name = update.request_id
        assert name not in self.ended, f"{name} was heard of after its end"
        self.written[name].extend(update.tokens)
        if update.finish_reason is not None:
            self.ended[name] = update.finish_reason

    def turn(self) -> None:
        step = self.scheduler.plan()
        self.scheduler.audit()
        plan = None if step is None else step.plan
        if plan is not None:
            tokens = sum(chunk.size for chunk in plan.prefill)
            tokens += sum(1 + slot.drafts for slot in plan.decode)
            assert 0 < tokens <= self.config.max_num_batched_tokens
            assert tokens == plan.num_tokens
            self.steps += 1
            if self.rng.random() < self.failing:
                self.fail()
                return
            self.flights.append(self.executor.run(plan)._replace(device_s=self.take_time(plan)))
        elif not self.flights:
            self.idle_turns += 1
            assert self.may_wait() or not self.scheduler.has_requests, (
                "requests are there and nothing is planned"
            )
        if self.flights and (plan is None or len(self.flights) >= self.depth):
            for update in self.scheduler.commit(self.flights.popleft()).updates:
                self.take(update)
            self.executor.committed()
        self.scheduler.audit()

    def may_wait(self) -> bool:
        """Return whether nothing may be planned although there are requests."""
        return False

    def take_time(self, plan: StepPlan) -> float:
        took = 0.005 + 0.001 * plan.num_tokens + 1e-5 * plan.prefill_work.kv_tokens
        took *= 1.0 + 0.2 * (plan.step % 5) + 20.0 * (plan.step % 37 == 0)
        self.now += took
        return took

    def fail(self) -> None:
        """Fail a step: steps in flight do not count, and the executor starts again."""
        self.flights.clear()
        self.executor = self.new_executor()
        for update in self.scheduler.fail("broken"):
            assert update.finish_reason is FinishReason.ERROR
            self.take(update)
        self.scheduler.audit()

    def finish(self) -> None:
        most = sum(len(g.prompt_token_ids) + self.config.max_model_len for g in self.given.values())
        limit = self.steps + 8 * most + 100
        while self.scheduler.has_requests or self.flights:
            self.turn()
            assert self.steps < limit, "a wait without bound"


def with_goals(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """Goals from impossible to irrelevant."""
    itl = rng.choice([None, 1e-6, 0.01, 0.02, 0.05, 10.0]) if config.chunked_prefill else None
    ttft = rng.choice([*([] if itl is None else [None]), 1e-6, 0.05, 0.2, 1.0, 100.0])
    return replace(config, ttft_slo_s=ttft, itl_slo_s=itl)


def with_drafts(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    speculation = SpeculationConfig(
        methods=rng.choice([("ngram",), ("suffix",), ("ngram", "suffix")]),
        max_depth=rng.choice([1, 3, 8]),
        ngram_min=rng.choice([1, 2]),
        suffix_factor=rng.choice([1.0, 4.0]),
        suffix_requests=rng.choice([0, 2, 100]),
        adaptive=rng.random() < 0.4,
    )
    return replace(config, speculation=speculation)


def predicted(given: EngineRequest, longest: int, rng: random.Random) -> EngineRequest:
    """The request, now and then with a prediction that is partly right."""
    if rng.random() < 0.5 or len(given.prompt_token_ids) >= longest:
        return given
    tokens = expected_tokens(given, longest)
    for _ in range(rng.choice([0, 0, 1, 3])):
        tokens.insert(rng.randrange(len(tokens) + 1), rng.randrange(7))
    return replace(given, prediction=tuple(tokens))


@pytest.mark.parametrize("goals", [False, True])
@pytest.mark.parametrize("block", range(SCENARIOS // 20))
def test_every_random_life_ends_once_with_the_right_tokens_and_leaks_nothing(
    block: int, goals: bool
) -> None:
    for seed in range(block * 20, block * 20 + 20):
        live(Life(seed, goals), seed)


@pytest.mark.parametrize("seeds", [range(15), range(15, 30)])
@pytest.mark.parametrize("windows", [(None, 16), (None, 16, 64), (16, None), (16, 64), (1, 5)])
def test_every_random_life_with_several_kv_groups_does_too(
    windows: tuple[int | None, ...], seeds: range
) -> None:
    for seed in seeds:
        live(Life(seed, windows=windows), seed)


@pytest.mark.parametrize("block", range(8))
def test_every_random_life_with_eviction_sees_what_its_policy_leaves(block: int) -> None:
    """Each token of a request sees the same blocks, however the request is preempted."""
    for seed in range(block * 20, block * 20 + 20):
        live(Life(seed, evicts=True), seed)


@pytest.mark.parametrize("windows", [(), (None, 16)])
@pytest.mark.parametrize("block", range(6))
def test_every_random_life_with_drafts_writes_the_tokens_of_a_life_without(
    block: int, windows: tuple[int | None, ...]
) -> None:
    """With spans, rejections, preemptions and failures: the tokens are those of the model."""
    for seed in range(block * 15, block * 15 + 15):
        live(Life(seed, windows=windows, drafts=True), seed)


@pytest.mark.parametrize("windows", [(), (None, 16)])
@pytest.mark.parametrize("block", range(6))
def test_every_random_life_with_a_draft_model_writes_the_same_tokens(
    block: int, windows: tuple[int | None, ...]
) -> None:
    """The blocks and rows of both models are audited after every step (`Scheduler.audit`)."""
    for seed in range(block * 15, block * 15 + 15):
        life = Life(seed, windows=windows, drafts=True, model=True)
        live(life, seed)
        drafter = life.scheduler.speculator.model  # type: ignore[union-attr]
        assert isinstance(drafter, ModelDrafter)
        assert drafter.kv.is_idle(), f"seed {seed}: blocks of the draft model leaked"


def test_lives_with_a_draft_model_chunk_share_reject_and_pause() -> None:
    chunked = shared = rejected = several = released = 0
    for seed in range(60):
        life = Life(seed, drafts=True, model=True)
        live(life, seed)
        assert life.runner is not None
        for plan in life.runner.plans:
            chunked += any(not chunk.last for chunk in plan.prefill)
            starts = {chunk.row: chunk.start for chunk in plan.prefill}
            shared += any(starts.get(new.row, 0) > 0 for new in plan.new)
            rejected += bool(plan.written)
            several += len(plan.decode) > 1
            released += bool(plan.retired)
    assert min(chunked, shared, rejected, several, released) > 5


def test_lives_with_drafts_accept_and_reject_and_preempt() -> None:
    accepted = rejected = preempted = mixed = 0
    for seed in range(60):
        life = Life(seed, drafts=True)
        commit = life.scheduler.commit

        def counted(result: StepResult, commit=commit, life=life):  # type: ignore[no-untyped-def]
            nonlocal accepted, rejected, preempted, mixed
            step = life.scheduler.in_flight[0]
            for slot, count in zip(step.plan.decode, result.counts or (), strict=False):
                accepted += count - 1
                rejected += 1 + slot.drafts - count
            preempted += step.preempted * bool(result.counts)
            mixed += bool(result.counts and step.plan.prefill)
            return commit(result)

        life.scheduler.commit = counted  # type: ignore[method-assign]
        live(life, seed)
        assert life.scheduler.speculator is not None
        assert len(life.scheduler.speculator) == 0, "a request is still followed"
    assert min(accepted, rejected) > 500
    assert preempted > 5
    assert mixed > 20


def live(life: Life, seed: int) -> None:
    for _ in range(life.rng.randint(10, 60)):
        chance = life.rng.random()
        if chance < 0.35:
            life.arrive()
        elif chance < 0.42:
            life.abort_one()
        life.turn()
    life.finish()
    assert set(life.ended) == set(life.given), f"seed {seed}: a request never ended"
    for name, given in life.given.items():
        expected = expected_tokens(given, life.config.max_model_len)
        written = life.written[name]
        if life.ended[name] in (FinishReason.ABORT, FinishReason.ERROR):
            assert written == expected[: len(written)], f"seed {seed}: {name}"
        else:
            assert written == expected, f"seed {seed}: {name}"
    assert life.scheduler.kv.is_idle(), f"seed {seed}: blocks leaked"
    usage = life.scheduler.kv.usage()
    assert usage.used == usage.fragmented == 0, f"seed {seed}: {usage}"


@pytest.mark.full  # more rounds
def test_prompts_ranked_by_slack_compete_for_the_last_blocks() -> None:
    """The preempted request is the last by arrival, and may have a chunk in the same step."""
    for seed in range(100):
        life, rng = Life(seed), random.Random(seed)
        life.config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=rng.randint(10, 14),
            max_model_len=48,
            block_size=1,
            groups=groups(rng.randint(50, 70)),
            prefix_caching=rng.random() < 0.5,
            lookahead=0,
            ttft_slo_s=rng.choice([0.1, 0.2, 0.5]),
            itl_slo_s=rng.choice([None, 0.01, 0.02]),
        )
        life.scheduler = Scheduler(life.config, clock=lambda life=life: life.now)  # type: ignore[misc]
        life.executor, life.failing = FakeExecutor(1), 0
        for number in range(60):
            if rng.random() < 0.5:
                prompt = [rng.randrange(7) for _ in range(rng.choice([4, 30, 40]))]
                given = fake_request(f"r{number}", prompt, rng.choice([4, 30]))
                life.scheduler.add(given)
                life.given[given.request_id], life.written[given.request_id] = given, []
            life.turn()
        life.finish()
        for name, given in life.given.items():
            assert life.written[name] == expected_tokens(given, 48), f"seed {seed}: {name}"


def test_lives_with_eviction_evict_and_preempt_evicted_requests() -> None:
    evicted = replayed = 0
    for seed in range(60):
        life = Life(seed, evicts=True)
        plan_of = life.scheduler.plan

        def plan(plan_of=plan_of):  # type: ignore[no-untyped-def]
            nonlocal evicted, replayed
            step = plan_of()
            if step is not None:
                evicted += len(step.plan.evicted)
                prefilled = {chunk.row for chunk in step.plan.prefill}
                replayed += sum(one.row in prefilled for one in step.plan.evicted)
            return step

        life.scheduler.plan = plan  # type: ignore[method-assign]
        live(life, seed)
    assert evicted > 500
    assert replayed > 50


@pytest.mark.parametrize("windows", [(), (None, 16), (16, 64)])
def test_the_scenarios_preempt_share_mix_and_chunk(windows: tuple[int | None, ...]) -> None:
    """Preemption, prefix hits, mixed steps and chunking all happen in these lives."""
    preempted = hits = mixed = chunked = in_flight = dropped = 0
    for seed in range(40 if windows else 60):
        life = Life(seed, windows=windows)
        plan_of = life.scheduler.plan

        def plan(plan_of=plan_of, life=life):  # type: ignore[no-untyped-def]
            nonlocal preempted, hits, mixed, chunked, in_flight, dropped
            step = plan_of()
            if step is not None:
                made = step.plan
                preempted += step.preempted
                mixed += bool(made.prefill and made.decode)
                chunked += any(not chunk.last for chunk in made.prefill)
                starts = {c.row: c.start for c in made.prefill}
                hits += any(starts.get(new.row, 0) > 0 for new in made.new)
                in_flight += len(life.scheduler.in_flight) > 1
                dropped += bool(made.dropped)
            return step

        life.scheduler.plan = plan  # type: ignore[method-assign]
        for _ in range(40):
            if life.rng.random() < 0.4:
                life.arrive()
            life.turn()
        life.finish()
    assert min(preempted, hits, mixed, chunked, in_flight, dropped) > 20


def test_a_wrong_position_is_noticed() -> None:
    """Negative control: the fake model fails if positions are off by one."""
    life = Life(3)
    life.executor.skew = 1
    with pytest.raises((AssertionError, IndexError)):
        live_on(life)


def live_on(life: Life) -> None:
    for _ in range(50):
        life.arrive()
        life.turn()
