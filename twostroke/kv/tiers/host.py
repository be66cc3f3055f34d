"""`HostTier`: pieces in host memory, below a pool in the memory of a GPU.

    arena   [ slot 0: blocks of a piece │ slot 1 │ … ]      of each group; pinned for a GPU

A thread copies on a stream of its own, so that no step waits for a copy. On a CPU the pool itself
is host memory; there the tier serves tests alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from time import monotonic

import torch

from twostroke.errors import ConfigError
from twostroke.kv.device_memory import DeviceBlocks, on_stream, stream_of
from twostroke.kv.tiers.tier import Load, Store, StoreResult, TierSpeed
from twostroke.kv.transfer import TransferError

PROBE_BYTES = 64 << 20
LATENCY_S = 0.0005

log = logging.getLogger(__name__)


class HostRead:
    """A fetch of pieces by the tier's thread."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self.num_bytes, self.seconds = 0, 0.0
        self.bad: list[bytes] = []
        self.began_s = monotonic()
        self.error: TransferError | None = None
        self.done = self.ended = False
        self.lock = threading.Lock()  # held while blocks are written

    def poll(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def abandon(self) -> None:
        with self.lock:
            self.ended = True


class _Arena:
    """The memory that the thread copies. The arena does not refer to the tier, so that Python can
    collect an unused tier."""

    def __init__(self, blocks: DeviceBlocks, capacity: int, span: int) -> None:
        self.blocks, self.span = blocks, span
        self.piece_bytes = span * sum(blocks.block_bytes)
        pinned = blocks.device.type == "cuda"
        self.groups = [
            torch.empty((capacity * span, words.shape[1]), dtype=words.dtype, pin_memory=pinned)
            for words in blocks.words
        ]
        self.stream = stream_of(blocks.device)
        self.work: queue.SimpleQueue[Store | HostRead | None] = queue.SimpleQueue()
        self.finished: deque[StoreResult] = deque()
        self.changed = threading.Event()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def copy_out(self, store: Store) -> StoreResult:
        """Copy a piece from the device to its slot."""
        began_s = monotonic()
        with store.lock:
            if store.cancelled:
                return StoreResult(store, False)
            with torch.inference_mode(), on_stream(self.stream):
                for group, numbers in enumerate(store.blocks):
                    words, arena = self.blocks.words[group], self.groups[group]
                    for n, number in enumerate(numbers):
                        arena[store.slot * self.span + n].copy_(words[number], non_blocking=True)
            self.synchronize()
        return StoreResult(store, True, self.piece_bytes, monotonic() - began_s)

    def copy_in(self, read: HostRead) -> None:
        """Copy pieces from their slots to blocks of the device."""
        with read.lock:
            if read.ended:
                return
            with torch.inference_mode(), on_stream(self.stream):
                for load in read.loads:
                    for group, place, number in load.targets:
                        entry = self.groups[group][load.slot * self.span + place]
                        self.blocks.words[group][number].copy_(entry, non_blocking=True)
            self.synchronize()
            read.num_bytes = len(read.loads) * self.piece_bytes
            read.seconds = monotonic() - read.began_s
            read.done = True


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
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"kv_offloading_size: {max_bytes / 1024**3:.1f} GiB of host memory cannot be "
                f"taken ({error}); lower it"
            ) from None
        self.speed = TierSpeed(self._probe(), LATENCY_S)
        thread = threading.Thread(
            target=_work, args=(self._arena,), name="twostroke-host-tier", daemon=True
        )
        thread.start()
        self._close = weakref.finalize(self, _finish, self._arena, thread)

    def _probe(self) -> float:
        """Return the bytes a second of copies to the null blocks, which stay zero."""
        arena = self._arena
        for group in arena.groups:
            group[: arena.span] = 0
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
        self._arena.work.put(store)

    def fetch(self, loads: Sequence[Load]) -> HostRead:
        read = HostRead(loads)
        self._arena.work.put(read)
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
        self._close()


def _work(arena: _Arena) -> None:
    while (work := arena.work.get()) is not None:
        if isinstance(work, Store):
            try:
                arena.finished.append(arena.copy_out(work))
            except RuntimeError as error:
                log.warning("the KV cache in host memory: a copy failed (%s)", error)
                arena.finished.append(StoreResult(work, False))
        else:
            try:
                arena.copy_in(work)
            except RuntimeError as error:
                work.bad = [load.name for load in work.loads]
                work.error = TransferError(f"a copy from host memory failed ({error})")
        arena.changed.set()


def _finish(arena: _Arena, thread: threading.Thread) -> None:
    arena.work.put(None)
    thread.join(1.0)
