"""Requests whose prefixes lie in a tier: fetched or computed by cost, and held up by nothing."""

from __future__ import annotations

import random

from tests.fake_tiers import FakeTier
from tests.fakes import FakeExecutor, expected_tokens, fake_request, groups
from twostroke.kv.tiers.tier import TierSpeed
from twostroke.kv.tiers.tiers import Tiers
from twostroke.observe.record import RequestRecord, TierFetchRecord
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

SIZE, LONGEST = 4, 64
PROMPT = [(3 * n * n) % 7 for n in range(42)]  # ten full blocks: the last has one token more


class Engine:
    """A scheduler with one tier, on a clock that the test moves."""

    def __init__(self, bytes_per_s: float = 1e9, max_num_seqs: int = 8, capacity: int = 99) -> None:
        self.now = 0.0
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=LONGEST,
            block_size=SIZE,
            groups=groups(40),
            lookahead=0,
        )
        self.executor = FakeExecutor(SIZE)
        self.tier = FakeTier(capacity, SIZE, random.Random(0), lambda: self.executor.slots)
        self.tier.lazy, self.tier.speed = 0.0, TierSpeed(bytes_per_s)
        self.tiers = Tiers([self.tier], SIZE, span=2)
        self.scheduler = Scheduler(config, clock=lambda: self.now, tiers=self.tiers)
        self.records: dict[str, RequestRecord] = {}
        self.written: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], **more: object) -> EngineRequest:
        request = fake_request(name, prompt, 3, **more)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.written[name] = []
        return request

    def turn(self, seconds: float = 0.01) -> None:
        step = self.scheduler.plan()
        self.scheduler.audit()
        self.now += seconds
        if step is not None:
            result = self.executor.run(step.plan)._replace(device_s=seconds)
            for update in self.scheduler.commit(result, self.now).updates:
                self.written[update.request_id] += update.tokens
                if update.record is not None:
                    self.records[update.request_id] = update.record
            self.executor.committed()
        self.scheduler.audit()

    def run(self, *requests: EngineRequest) -> None:
        while self.scheduler.has_requests:
            self.turn()
        for request in requests:
            name = request.request_id
            assert self.written[name] == expected_tokens(request, LONGEST), name

    def forget(self) -> None:
        """Evict everything from the pool, once it has been copied."""
        self.scheduler.plan()
        self.scheduler.kv.reset_prefixes()

    def fetch_of(self, name: str) -> TierFetchRecord | None:
        return self.records[name].tier_fetch


def after_one_request(bytes_per_s: float = 1e9, **settings: int) -> Engine:
    engine = Engine(bytes_per_s, **settings)
    engine.run(engine.add("first", PROMPT))
    assert engine.fetch_of("first") is None
    engine.forget()
    return engine


def test_a_prefix_is_fetched_and_the_rest_computed() -> None:
    engine = after_one_request()
    engine.run(engine.add("again", PROMPT))
    fetch = engine.fetch_of("again")
    assert fetch is not None
    assert (fetch.outcome, fetch.tokens, fetch.tiers) == ("fetched", 40, "disk")
    assert engine.records["again"].num_cached == engine.records["again"].num_fetched == 40
    assert [chunk[2:] for chunk in engine.records["again"].chunks] == [(40, 2)]
    assert 0 < fetch.fetch_expected_s < fetch.compute_expected_s


def test_answers_are_stored_too_and_the_last_token_is_always_computed() -> None:
    engine = after_one_request()
    whole = [*PROMPT, *engine.written["first"][:2]]  # 44 tokens, of which 44 are computed
    engine.run(engine.add("next", whole))
    fetch = engine.fetch_of("next")
    assert fetch is not None
    assert fetch.tokens == 40


def test_a_slow_tier_is_not_asked() -> None:
    engine = after_one_request(bytes_per_s=1e3)
    engine.run(engine.add("again", PROMPT))
    fetch = engine.fetch_of("again")
    assert fetch is not None
    assert fetch.outcome == "computed"
    assert 0 < fetch.compute_expected_s < fetch.fetch_expected_s
    assert engine.tier.fetched == 0


def test_other_salts_find_nothing() -> None:
    engine = after_one_request()
    engine.run(engine.add("other", PROMPT, salt="tenant"))
    assert engine.fetch_of("other") is None


def test_a_request_that_waits_for_a_fetch_holds_up_nobody() -> None:
    engine = after_one_request(max_num_seqs=2)
    engine.tier.slow = 1.0
    waits = engine.add("waits", PROMPT)
    others = [engine.add(f"other{n}", [n, 5, 6]) for n in range(4)]
    while len(engine.records) < 5:
        engine.turn(0.001)
        assert "waits" not in engine.records
    assert engine.now < 1.0
    engine.run(waits, *others)
    fetch = engine.fetch_of("waits")
    assert fetch is not None
    assert fetch.outcome == "failed"
    assert fetch.problem.startswith("StalledError")
    assert engine.records["waits"].num_cached == engine.records["waits"].num_fetched == 0


def test_a_failed_fetch_computes_and_is_not_tried_again() -> None:
    engine = after_one_request()
    engine.tier.failing = 1.0
    engine.run(engine.add("again", PROMPT))
    fetch = engine.fetch_of("again")
    assert fetch is not None
    assert fetch.outcome == "failed"
    (status,) = engine.tiers.status()
    assert (status.fetches, status.failed_fetches) == (1, 1)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing() -> None:
    engine = after_one_request()
    engine.tier.slow = 1.0
    engine.add("leaves", PROMPT)
    engine.turn()
    assert engine.scheduler.kv.num_receiving == 1
    update = engine.scheduler.abort("leaves")
    assert update is not None
    assert update.finish_reason is FinishReason.ABORT
    engine.scheduler.audit()
    assert engine.scheduler.kv.is_idle()
    assert not engine.tiers.is_fetching


def test_a_reset_removes_the_pieces_of_tiers_too() -> None:
    engine = after_one_request()
    engine.scheduler.reset_prefixes()
    assert not engine.tier.pieces
    engine.run(engine.add("again", PROMPT))
    assert engine.fetch_of("again") is None


def test_a_full_queue_drops_and_offers_again_at_the_end() -> None:
    engine = Engine()
    engine.tiers.max_queued = 1
    engine.run(engine.add("first", PROMPT))
    (status,) = engine.tiers.status()
    assert status.dropped_stores > 0
    engine.run(engine.add("again", PROMPT))  # its end offers what is missing
    engine.forget()
    engine.run(engine.add("third", PROMPT))
    fetch = engine.fetch_of("third")
    assert fetch is not None
    assert fetch.outcome == "fetched"


def test_the_start_of_a_conversation_is_replaced_last() -> None:
    engine = after_one_request(capacity=4)
    engine.run(engine.add("again", PROMPT))
    engine.forget()
    engine.run(engine.add("third", PROMPT))
    fetch = engine.fetch_of("third")
    assert fetch is not None
    assert fetch.tokens >= 8
