"""Random lives with tiers: prefixes that leave the pool come back, and nothing else changes.

Reads that fail, hang or find nothing, copies that fail, and steps that fail are events of a life.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.fake_tiers import FakeTier
from tests.property.test_scheduler_property import Life, live
from twostroke.kv.tiers.tiers import Tiers
from twostroke.sched.scheduler import Scheduler


class TieredLife(Life):
    """A life whose pool is small, with one or two tiers below it."""

    def __init__(
        self, seed: int, windows: tuple[int | None, ...] = (), goals: bool = False
    ) -> None:
        super().__init__(seed, goals, windows)
        rng = random.Random(-7 - seed)
        self.config = replace(self.config, prefix_caching=True)
        failing, slow = rng.choice([0, 0, 0.1, 0.5]), rng.choice([0, 0, 0.1])
        size, span = self.config.block_size, rng.choice([1, 1, 2, 3])
        self.tiers = [
            FakeTier(
                rng.choice([1, 5, 50, 500]), size, rng, lambda: self.executor.slots, failing, slow
            )
            for _ in range(rng.choice([1, 1, 2]))
        ]
        self.scheduler = Scheduler(
            self.config, clock=lambda: self.now, tiers=Tiers(self.tiers, size, span)
        )
        self.events = rng

    def turn(self) -> None:
        self.now += 0.01  # also while nothing runs, so that hanging reads end
        if self.events.random() < 0.03:
            self.tiers[0].lose_one()
        if self.events.random() < 0.2:
            self.scheduler.kv.reset_prefixes()  # as if the pool had evicted them all
        if self.events.random() < 0.01:
            self.scheduler.reset_prefixes()
        super().turn()

    def prompt(self) -> list[int]:
        """Most prompts continue an earlier one: with its answer, and a few tokens more."""
        prompt = super().prompt()
        if self.given and self.events.random() < 0.7:
            name = self.events.choice(list(self.given))
            earlier = [*self.given[name].prompt_token_ids, *self.written[name], *prompt[:3]]
            prompt = earlier[: self.longest_prompt + 1]
        return prompt

    def may_wait(self) -> bool:
        assert self.idle_turns < 10_000, "a wait without bound"
        return self.scheduler.kv.num_receiving > 0


def run(life: TieredLife, seed: int) -> None:
    live(life, seed)
    tiers = life.scheduler.kv.tiers
    assert tiers is not None
    for _ in range(50):
        tiers.take_finished()
    life.scheduler.audit()
    for status in tiers.status():
        assert status.usage.used == 0, f"seed {seed}: {status}"


@pytest.mark.parametrize("windows", [(), (None, 16), (16, 64), (1, 5)])
@pytest.mark.parametrize("block", range(4))
def test_every_random_life_with_tiers_ends_once_with_the_right_tokens(
    block: int, windows: tuple[int | None, ...]
) -> None:
    for seed in range(block * 15, block * 15 + 15):
        run(TieredLife(seed, windows, goals=seed % 4 == 3), seed)


@pytest.mark.parametrize(
    "block",
    [pytest.param(n, marks=pytest.mark.full if n == 0 else pytest.mark.long) for n in range(10)],
)
def test_many_more_random_lives_with_tiers_do_too(block: int) -> None:
    for seed in range(1000 + block * 60, 1000 + block * 60 + 60):
        run(TieredLife(seed, random.Random(seed).choice([(), (None, 16), (16, 64)])), seed)


def test_lives_with_tiers_store_fetch_cancel_and_fail() -> None:
    stored = fetched = cancelled = failed = 0
    for seed in range(40):
        life = TieredLife(seed)
        run(life, seed)
        assert life.scheduler.kv.tiers is not None
        stored += sum(tier.stored for tier in life.tiers)
        fetched += sum(tier.fetched for tier in life.tiers)
        cancelled += sum(tier.cancelled for tier in life.tiers)
        failed += sum(one.failed_fetches for one in life.scheduler.kv.tiers.status())
    assert min(stored, fetched) > 100, (stored, fetched)
    assert min(cancelled, failed) > 5, (cancelled, failed)


def test_a_wrong_piece_is_noticed() -> None:
    """Negative control: pieces whose content was exchanged make the fake model fail."""

    def exchange() -> None:
        for seed in range(60):
            life = TieredLife(seed)
            for tier in life.tiers:
                tier.failing, tier.exchange = 0.0, True
            run(life, seed)

    with pytest.raises(AssertionError, match="wrong key"):
        exchange()
