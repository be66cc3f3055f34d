"""`HostTier`: pieces in host memory, below a pool in the memory of a GPU.

    arena    [ slot 0: blocks of a piece │ slot 1 │ … ]      of each group; pinned for a GPU
    stores   pool ─▶ arena     a thread and a stream of its own
    fetches  arena ─▶ pool     another thread and stream: a fetch does not wait for stores

A block is one copy. The copies of a batch are launched together, without Python in between: the
engine's thread needs the interpreter. The threads wait for the device once for each batch; a
fetch has the next batch queued meanwhile. Steps copy their inputs on the same path and wait for the
batches that are queued, so a batch is short. On a CPU the pool itself is host memory; there the
tier serves tests alone.

The streams do not wait for steps. The engine stores blocks of steps that have ended, fetches into
blocks that no step in flight uses, and launches steps that read them when the fetch has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic

import torch

from twostroke.errors import ConfigError
from twostroke.kv.device_memory import DeviceBlocks, on_stream, stream_of
from twostroke.kv.pinned_memory import PinnedMemory
from twostroke.kv.tiers.tier import Load, Store, StoreResult, TierSpeed
from twostroke.kv.transfer import TransferError

PROBE_BYTES = 64 << 20
BATCH_BYTES = 16 << 20  # 0.3 ms on PCIe 5; so long the engine may wait to cancel a copy
LATENCY_S = 0.0005
CLOSE_S = 10.0  # for the batches under way

log = logging.getLogger(__name__)


class HostRead:
    """A fetch of pieces by the tier's thread."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self.num_bytes, self.seconds = 0, 0.0
        self.bad: list[bytes] = []
        self.error: TransferError | None = None
        self.done = self.ended = False
        self.lock = threading.Lock()  # held while copies are launched
        self.launched: torch.cuda.Event | None = None  # the end of the newest batch

    def poll(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def abandon(self) -> None:
        with self.lock:
            self.ended = True
        if self.launched is not None:
            self.launched.synchronize()


def launch_copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target on the current stream. The calling thread launches all copies
    without the interpreter's lock."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


class _Arena:
    """The memory, and the copies from and to it. The arena does not refer to the tier, so that
    Python can collect an unused tier."""

    def __init__(self, blocks: DeviceBlocks, capacity: int, span: int) -> None:
        self.blocks, self.span = blocks, span
        self.piece_bytes = span * sum(blocks.block_bytes)
        self.batch = max(1, BATCH_BYTES // self.piece_bytes)  # pieces
        self.memory: list[PinnedMemory] = []
        self.groups: list[torch.Tensor] = []  # entries of each group, as words
        try:
            for words, size in zip(blocks.words, blocks.block_bytes, strict=True):
                self.memory.append(PinnedMemory(capacity * span * size, blocks.device))
                entries = self.memory[-1].data.view(capacity * span, size)
                self.groups.append(entries.view(words.dtype))
        except BaseException:
            self.unpin()
            raise
        self.store_stream, self.fetch_stream = stream_of(blocks.device), stream_of(blocks.device)
        self.stores: queue.SimpleQueue[Store | None] = queue.SimpleQueue()
        self.reads: queue.SimpleQueue[HostRead | None] = queue.SimpleQueue()
        self.finished: deque[StoreResult] = deque()
        self.changed = threading.Event()
        self.closing = False

    def copy_out(self, stores: Sequence[Store]) -> list[StoreResult]:
        """Copy pieces from the device to their slots."""
        began_s = monotonic()
        copied: list[Store] = []
        entries: list[torch.Tensor] = []
        blocks: list[torch.Tensor] = []
        with ExitStack() as locks, torch.inference_mode(), on_stream(self.store_stream):
            for store in stores:
                locks.enter_context(store.lock)
                if store.cancelled:
                    continue
                first = store.slot * self.span
                for words, arena, numbers in zip(
                    self.blocks.words, self.groups, store.blocks, strict=True
                ):
                    entries += [arena[entry] for entry in range(first, first + len(numbers))]
                    blocks += [words[number] for number in numbers]
                copied.append(store)
            try:
                launch_copies(entries, blocks)
            finally:  # the locks keep the blocks until nothing reads them
                if self.store_stream is not None:
                    self.store_stream.synchronize()
        each_s = (monotonic() - began_s) / max(1, len(copied))
        done = {id(store) for store in copied}
        return [
            StoreResult(store, True, self.piece_bytes, each_s)
            if id(store) in done
            else StoreResult(store, False)
            for store in stores
        ]

    def copy_in(self, read: HostRead) -> None:
        """Copy pieces from their slots to blocks of the device."""
        began_s, loads = monotonic(), read.loads
        for first in range(0, len(loads), self.batch):
            before = read.launched
            with read.lock, torch.inference_mode(), on_stream(self.fetch_stream):
                if read.ended or self.closing:
                    return
                try:
                    self._launch(loads[first : first + self.batch])
                finally:  # `abandon` waits for copies before an error, too
                    if self.fetch_stream is not None:
                        read.launched = self.fetch_stream.record_event()
            if before is not None:
                before.synchronize()
        if read.launched is not None:
            read.launched.synchronize()
        read.num_bytes = len(loads) * self.piece_bytes
        read.seconds = monotonic() - began_s
        read.done = True

    def _launch(self, loads: Sequence[Load]) -> None:
        entries: list[torch.Tensor] = []
        blocks: list[torch.Tensor] = []
        for load in loads:
            first = load.slot * self.span
            for group, place, number in load.targets:
                entries.append(self.groups[group][first + place])
                blocks.append(self.blocks.words[group][number])
        launch_copies(blocks, entries)

    def unpin(self) -> None:
        for memory in self.memory:
            memory.close()


class HostTier:
    name = "host"

    def __init__(self, blocks: DeviceBlocks, span: int, max_bytes: int) -> None:
        """`max_bytes`: of the arena."""
        self.piece_bytes = span * sum(blocks.block_bytes)
        self.capacity = max_bytes // self.piece_bytes
        if not self.capacity:
            raise ConfigError(
                f"kv_offloading_size: {max_bytes:,} bytes hold no prefix; {self.piece_bytes:,} "
                "bytes are needed for the smallest part; raise it, or leave it out"
            )
        try:
            self._arena = _Arena(blocks, self.capacity, span)
        except (RuntimeError, MemoryError, OSError) as error:
            raise ConfigError(
                f"kv_offloading_size: {max_bytes / 1024**3:.1f} GiB of host memory cannot be "
                f"taken ({error}); lower it"
            ) from None
        self.speed = TierSpeed(self._probe(), LATENCY_S)
        threads = [
            threading.Thread(target=work, args=(self._arena,), name=name, daemon=True)
            for work, name in (
                (_store_all, "twostroke-host-store"),
                (_fetch_all, "twostroke-host-fetch"),
            )
        ]
        for thread in threads:
            thread.start()
        self._close = weakref.finalize(self, _finish, self._arena, threads)

    def _probe(self) -> float:
        """Return the bytes a second of copies to the null blocks, which stay zero."""
        arena = self._arena
        targets = tuple((group, 0, 0) for group in range(len(arena.groups)))
        load = Load(b"", 0, b"", targets)
        size = sum(arena.blocks.block_bytes)
        count = max(1, min(256, PROBE_BYTES // size))
        arena.copy_in(HostRead([load]))
        read = HostRead([load] * count)
        arena.copy_in(read)
        return count * size / max(1e-6, read.seconds)

    def name_of(self, digest: bytes) -> bytes:
        return digest

    def names(self) -> list[bytes]:
        return []

    def store(self, store: Store) -> None:
        self._arena.stores.put(store)

    def fetch(self, loads: Sequence[Load]) -> HostRead:
        read = HostRead(loads)
        self._arena.reads.put(read)
        return read

    def drop(self, names: Sequence[bytes]) -> None:
        """A slot is written again when it is given to another piece."""

    def touch(self, names: Sequence[bytes]) -> None:
        """The index knows the order of use."""

    def finished(self) -> list[StoreResult]:
        done = self._arena.finished
        return [done.popleft() for _ in range(len(done))]

    def wait(self, timeout_s: float) -> None:
        if self._arena.changed.wait(timeout_s):
            self._arena.changed.clear()

    def close(self, timeout_s: float) -> None:
        """End the threads. Stores that wait are not copied: the memory goes with the process."""
        self._close()


def _store_all(arena: _Arena) -> None:
    while (first := arena.stores.get()) is not None:
        stores = [first]
        while len(stores) < arena.batch and not arena.stores.empty():
            store = arena.stores.get()
            if store is None:
                return
            stores.append(store)
        if arena.closing:
            return
        try:
            done = arena.copy_out(stores)
        except RuntimeError as error:
            log.warning("the KV cache in host memory: a copy failed (%s)", error)
            done = [StoreResult(store, False) for store in stores]
        arena.finished.extend(done)
        arena.changed.set()


def _fetch_all(arena: _Arena) -> None:
    while (read := arena.reads.get()) is not None:
        try:
            arena.copy_in(read)
        except RuntimeError as error:
            read.bad = [load.name for load in read.loads]
            read.error = TransferError(f"a copy from host memory failed ({error})")
        arena.changed.set()


def _finish(arena: _Arena, threads: Sequence[threading.Thread]) -> None:
    arena.closing = True
    arena.stores.put(None)
    arena.reads.put(None)
    for thread in threads:
        thread.join(CLOSE_S)
    if not any(thread.is_alive() for thread in threads):
        arena.unpin()
