"""The host tier on a device that runs copies late and in any order (`tests/late_device.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.late_device import LateDevice, late_device
from twostroke.kv.device_memory import DeviceBlocks
from twostroke.kv.tiers import host
from twostroke.kv.tiers.host import HostRead, HostTier
from twostroke.kv.tiers.tier import Load, Store

COUNT, WORDS = 12, 4  # pieces of a block, and their words
OVERWRITTEN = -1
SEEDS = range(5)


class Memory:
    """A pool of noise with a tier. Batches have three pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        monkeypatch.setattr(host, "BATCH_BYTES", 3 * 8 * WORDS)
        self.device = late_device(monkeypatch, seed)
        self.data = torch.randint(1, 2**60, (2 * COUNT + 1, WORDS))
        self.data[0] = 0
        self.expected = self.data[1 : 1 + COUNT].clone()
        self.tier = HostTier(DeviceBlocks([self.data], 16), 1, COUNT * 8 * WORDS)

    def store(self) -> list[Store]:
        stores = [Store(bytes([n]), b"", [[1 + n]]) for n in range(COUNT)]
        for slot, store in enumerate(stores):
            store.slot = slot
            self.tier.store(store)
        return stores

    def wait_for_stores(self) -> None:
        ended = self.tier.finished()
        while len(ended) < COUNT:
            self.tier.wait(1.0)
            ended += self.tier.finished()

    def overwrite(self, first: int, end: int) -> None:
        """Queue a step that writes to these blocks."""
        self.device.steps.add(lambda: self.data[first:end].fill_(OVERWRITTEN))

    def fetch(self) -> HostRead:
        """Begin to fetch all pieces, to blocks behind those that were stored."""
        targets = [((0, 0, 1 + COUNT + n),) for n in range(COUNT)]
        return self.tier.fetch([Load(bytes([n]), n, b"", targets[n]) for n in range(COUNT)])

    def wait_for(self, read: HostRead) -> None:
        while not read.poll():
            self.tier.wait(1.0)

    def fetched(self) -> torch.Tensor:
        """Run what is queued, and return the blocks of the fetch."""
        self.device.steps.synchronize()
        return self.data[1 + COUNT :]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_come_back_in_any_order_of_copies(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, seed)
    memory.store()
    memory.wait_for_stores()
    memory.overwrite(1, 2 * COUNT + 1)
    memory.device.steps.synchronize()  # the step has ended, so its blocks are free
    memory.overwrite(1, 1 + COUNT)  # another step is in flight
    read = memory.fetch()
    memory.wait_for(read)
    assert torch.equal(memory.fetched(), memory.expected)
    assert not memory.data[0].any()
    memory.tier.close(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cancelled_store_reads_nothing_afterwards(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, seed)
    stores = memory.store()
    cancelled = stores[COUNT // 2 :]
    for store in cancelled:
        store.cancel()
    memory.overwrite(1 + COUNT // 2, 1 + COUNT)  # the pool gives the blocks to a request
    memory.device.steps.synchronize()
    ended: dict[Store, bool] = {}
    while len(ended) < COUNT:
        memory.tier.wait(1.0)
        ended |= {done.store: done.ok for done in memory.tier.finished()}
    read = memory.fetch()
    memory.wait_for(read)
    for n, store in enumerate(stores):
        if ended[store]:  # also if it ended before it was cancelled
            assert torch.equal(memory.fetched()[n], memory.expected[n])
    assert all(ended[store] for store in stores[: COUNT // 2])
    memory.tier.close(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_abandoned_fetch_writes_nothing_afterwards(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, seed)
    memory.store()
    memory.wait_for_stores()
    read = memory.fetch()
    while read.launched is None:  # in the middle, if possible
        pass
    read.abandon()
    memory.overwrite(1 + COUNT, 2 * COUNT + 1)
    assert bool((memory.fetched() == OVERWRITTEN).all())
    memory.tier.close(1.0)


def differs(device: LateDevice, memory: Memory) -> bool:
    for stream in device.streams:
        stream.synchronize()
    return not torch.equal(memory.fetched(), memory.expected)


def test_a_step_that_still_writes_to_the_blocks_overwrites_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the engine fetches only into blocks that no step in flight uses."""
    found = []
    for seed in SEEDS:
        memory = Memory(monkeypatch, seed)
        memory.store()
        memory.wait_for_stores()
        memory.overwrite(1 + COUNT, 2 * COUNT + 1)  # queued, and not waited for
        memory.wait_for(memory.fetch())
        found.append(differs(memory.device, memory))
        memory.tier.close(1.0)
    assert any(found)


def test_a_fetch_that_is_abandoned_without_waiting_writes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""

    def abandon(read: HostRead) -> None:
        with read.lock:
            read.ended = True

    found = []
    for seed in SEEDS:
        memory = Memory(monkeypatch, seed)
        memory.store()
        memory.wait_for_stores()
        arena, read = memory.tier._arena, HostRead([Load(b"", 0, b"", ((0, 0, 1 + COUNT),))])
        with memory.device.on(arena.fetch_stream):  # type: ignore[arg-type]
            arena._launch(read.loads)
        abandon(read)
        memory.overwrite(1 + COUNT, 2 * COUNT + 1)
        memory.device.steps.synchronize()
        for one in memory.device.streams:
            one.synchronize()
        found.append(bool((memory.data[1 + COUNT :] != OVERWRITTEN).any()))
        memory.tier.close(1.0)
    assert any(found)
