"""`Tier`: the interface between the bookkeeping of a tier and the code that copies its data.
`Store`: a copy into a tier.

A tier holds pieces. A piece consists of `span` consecutive full blocks of a sequence, in every KV
group:

    sequence   [ block 0 | block 1 | block 2 | block 3 | block 4 | …      span 2
                 └───── piece 0 ───┘ └───── piece 1 ───┘
    piece      [ group 0: block, block │ group 1: block, block │ … ]      contiguous in the tier

A tier copies in its own threads. `store`, `drop` and `touch` return at once and are executed in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import NamedTuple, Protocol

from twostroke.kv.transfer import Blocks, TransferError

PIECE_BYTES = 1 << 20  # minimum size of a piece, unless this needs more than MAX_SPAN blocks
MAX_SPAN = 4


class MissingPieceError(TransferError):
    """A piece is no longer in the tier, because another server has removed it."""


class TierBlocks(Blocks, Protocol):
    """The blocks of an engine with tiers. Any thread may read and write them."""

    def read_into(self, group: int, number: int, data: memoryview) -> None:
        """Copy a block to `data`."""
        ...

    def pinned(self, data: memoryview) -> AbstractContextManager[None]:
        """Keep memory in place in this context, so that a GPU copies from and to it directly."""
        ...


class Store:
    """A copy of a piece into a tier. The copy is an owner of the blocks that it reads: the pool
    evicts a block only after `cancel`."""

    def __init__(
        self, name: bytes, tokens: bytes, blocks: Sequence[Sequence[int]], step: int = -1
    ) -> None:
        """`blocks`: the block numbers of each KV group. `step`: the step that computes the
        blocks."""
        self.name, self.tokens, self.step = name, tokens, step
        self.blocks = tuple(map(tuple, blocks))
        self.slot = -1  # in the tier
        self.tier = -1  # index of the tier
        self.cancelled = False
        self.lock = Lock()  # held while blocks are read

    def cancel(self) -> None:
        """Cancel the copy if it has not ended. Afterwards the blocks are not read."""
        with self.lock:
            self.cancelled = True

    def copy(self, blocks: TierBlocks, pieces: Sequence[memoryview]) -> bool:
        """Copy the blocks to `pieces`, one for each group. Return False if the copy is
        cancelled."""
        with self.lock:
            if self.cancelled:
                return False
            for group, numbers in enumerate(self.blocks):
                size = blocks.block_bytes[group]
                for n, number in enumerate(numbers):
                    blocks.read_into(group, number, pieces[group][n * size : (n + 1) * size])
            return True


class StoreResult(NamedTuple):
    """The end of a `Store`."""

    store: Store
    ok: bool
    num_bytes: int = 0
    seconds: float = 0.0


class Load(NamedTuple):
    """A piece to fetch, and the blocks that its parts are copied to."""

    name: bytes
    slot: int
    tokens: bytes
    targets: tuple[tuple[int, int, int], ...]  # group, index in the piece, block


class Read(Protocol):
    """A fetch from one tier, in progress."""

    num_bytes: int  # fetched so far
    seconds: float  # from the first copy to the last, once all blocks have arrived
    bad: list[bytes]  # names of pieces that the tier cannot deliver

    def poll(self) -> bool:
        """Return whether all blocks have arrived. Raise a `TransferError` if one cannot."""
        ...

    def abandon(self) -> None:
        """Cancel the fetch. Afterwards the blocks are not written."""
        ...


class TierSpeed(NamedTuple):
    """The measured speed of a tier."""

    bytes_per_s: float
    latency_s: float = 0.0


class Tier(Protocol):
    name: str  # host or disk
    capacity: int  # pieces
    piece_bytes: int  # size of a piece in the tier
    speed: TierSpeed  # of fetches, measured at the start

    def name_of(self, digest: bytes) -> bytes:
        """Return the name of the piece whose last block has this digest."""
        ...

    def names(self) -> list[bytes]:
        """Return the names of the pieces at the start, the least recently used first."""
        ...

    def store(self, store: Store) -> None:
        """Copy a piece to `store.slot`."""
        ...

    def fetch(self, loads: Sequence[Load]) -> Read: ...

    def drop(self, names: Sequence[bytes]) -> None:
        """Remove pieces."""
        ...

    def touch(self, names: Sequence[bytes]) -> None:
        """Record that pieces were used, the last one most recently."""
        ...

    def finished(self) -> list[StoreResult]:
        """Return the copies that have ended since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a copy or a fetch has ended."""
        ...

    def close(self, timeout_s: float) -> None:
        """End the threads. Wait at most this time for queued copies."""
        ...


def piece_span(block_bytes: Sequence[int], block_size: int, windows: Sequence[int | None]) -> int:
    """Return the number of blocks in a piece: enough for long reads, but so few that a sliding
    window still has all blocks of a piece when its last block is full."""
    span = min(MAX_SPAN, -(-PIECE_BYTES // sum(block_bytes)))
    for window in windows:
        if window is not None:
            span = min(span, max(1, window // (2 * block_size)))
    return span
