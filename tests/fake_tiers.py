"""A tier without threads and files: copies end when the test says so, and fail as it says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from twostroke.kv.tiers.tier import Load, MissingPieceError, Store, StoreResult, TierSpeed
from twostroke.kv.transfer import DamagedError

Slots = dict[tuple[int, int, int], int]  # the memory of `FakeExecutor`
Content = list[list[list[int | None]]]  # [group][block][offset]


class FakeRead:
    def __init__(self, tier: FakeTier, loads: Sequence[Load]) -> None:
        self.num_bytes, self.seconds = 0, 0.0
        self.bad: list[bytes] = []
        self._tier, self._left = tier, list(loads)
        self._hangs = tier.rng.random() < tier.slow

    def poll(self) -> bool:
        for load in list(self._left):
            if self._hangs or self._tier.rng.random() < self._tier.lazy:
                return False
            self._load(load)
            self._left.remove(load)
        self.seconds = 0.001
        return True

    def _load(self, load: Load) -> None:
        tier = self._tier
        if tier.rng.random() < tier.failing:
            self.bad.append(load.name)
            tier.pieces.pop(load.name, None)
            raise tier.rng.choice([DamagedError, MissingPieceError])("as the test wants it")
        if load.name not in tier.pieces:
            self.bad.append(load.name)
            raise MissingPieceError("another server has removed it")
        tokens, content = tier.pieces[load.name]
        assert tokens == load.tokens, "a piece of other tokens"
        slots = tier.slots()
        for group, place, block in load.targets:
            for offset, value in enumerate(content[group][place]):
                if value is None:
                    slots.pop((group, block, offset), None)
                else:
                    slots[group, block, offset] = value
        self.num_bytes += tier.piece_bytes
        tier.fetched += 1

    def abandon(self) -> None:
        self._left = []


class FakeTier:
    """`slots`: returns the executor's memory."""

    name, piece_bytes, speed = "disk", 1 << 16, TierSpeed(1e10)

    def __init__(
        self,
        capacity: int,
        block_size: int,
        rng: random.Random,
        slots: Callable[[], Slots],
        failing: float = 0.0,
        slow: float = 0.0,
    ) -> None:
        self.capacity, self.rng, self.slots = capacity, rng, slots
        self.failing, self.slow = failing, slow
        self.pieces: dict[bytes, tuple[bytes, Content]] = {}
        self.lazy = 0.3  # share of the calls in which a copy makes no progress
        self.exchange = False  # of the content of pieces, for a negative control
        self.fetched = self.stored = self.cancelled = 0
        self._block_size = block_size
        self._queue: list[Store] = []

    def name_of(self, digest: bytes) -> bytes:
        return digest

    def names(self) -> list[bytes]:
        return []

    def store(self, store: Store) -> None:
        self._queue.append(store)

    def fetch(self, loads: Sequence[Load]) -> FakeRead:
        return FakeRead(self, loads)

    def drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.pieces.pop(name, None)

    def touch(self, names: Sequence[bytes]) -> None:
        assert len(set(names)) == len(names)

    def finished(self) -> list[StoreResult]:
        """Some of the copies end here; a full disk fails."""
        ended, left = [], []
        for store in self._queue:
            if self.rng.random() < self.lazy:
                left.append(store)
            else:
                ended.append(self._copy(store))
        self._queue = left
        return ended

    def _copy(self, store: Store) -> StoreResult:
        if store.cancelled or self.rng.random() < self.failing:
            self.cancelled += store.cancelled
            return StoreResult(store, False)
        slots = self.slots()
        content: Content = [
            [[slots.get((g, n, at)) for at in range(self._block_size)] for n in numbers]
            for g, numbers in enumerate(store.blocks)
        ]
        assert None not in [v for group in content for block in group for v in block], (
            "a block was copied before it was computed"
        )
        if self.exchange:
            content = [[block[::-1] for block in group] for group in content]
        self.pieces[store.name] = store.tokens, content
        self.stored += 1
        return StoreResult(store, True, self.piece_bytes, 0.001)

    def lose_one(self) -> None:
        """Another server removes a piece."""
        if self.pieces:
            del self.pieces[self.rng.choice(sorted(self.pieces))]

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass
