"""KV blocks on their way from one engine to another on the same machine. Bytes only, no tensors.

    sender    its pools in shared memory ── offer(tables) ─▶ Offer ┄┄┄ told to ┄┄┄┐
                     ▲ the blocks stay owned                                      ▼
                     └── release ◀┄┄ told when the copy is made ┄┄ fetch(offer) receiver

A block of a group is one contiguous piece in every pool, so that fetching is one copy a block, from
the sender's pool straight into the receiver's; nothing is staged. The memory holds, before the
pools, the numbers of the offers that stand: a receiver looks before and after it copies, so that
what was released meanwhile, and may have been written anew, is never taken for the real thing.

    memory    [ offers that stand │ pool of group 0 │ pool of group 1 │ … ]

What goes wrong has a name (`TransferError`), and none of it harms the request: whoever fetches
computes the tokens again instead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from twostroke.errors import EngineError

SLOTS = 4096  # offers that may stand at one time
SLOT_BYTES = 8
NULL_BLOCK = 0


class TransferError(EngineError):
    """KV blocks could not be fetched; the request's tokens are to be computed again."""


class SenderGoneError(TransferError):
    """The memory that the blocks were in cannot be opened any more: its engine has ended."""


class OfferWithdrawnError(TransferError):
    """Fetched too late: the sender has released the blocks."""


class TruncatedError(TransferError):
    """The sender's memory is shorter than the blocks that were offered."""


class DamagedError(TransferError):
    """A block's checksum is another than the sender's."""


class MismatchedError(TransferError):
    """The two engines keep their blocks in different sizes."""


class ReceiverFullError(TransferError):
    """The receiver has too few free blocks."""


class Offer(NamedTuple):
    """Where the keys and values of a sequence's first tokens are. Plain data, sent as it is."""

    memory: str  # a path that any process of this user can open while the sender lives
    number: int
    num_tokens: int
    block_size: int
    block_bytes: tuple[int, ...]  # of each KV group
    starts: tuple[int, ...]  # of each group's pool in the memory
    tables: tuple[tuple[int, ...], ...]  # of each group; null where a window has passed
    checksums: tuple[tuple[int, ...], ...] = ()  # of each block, where they are asked for

    @property
    def num_bytes(self) -> int:
        """Of all blocks that may have to be copied."""
        sizes = zip(self.tables, self.block_bytes, strict=True)
        return sum((len(table) - table.count(NULL_BLOCK)) * size for table, size in sizes)


class SharedPools:
    """The memory of all pools of one engine, which others can map. Linux only."""

    def __init__(self, pool_bytes: Sequence[int]) -> None:
        """`pool_bytes`: of each KV group."""
        if not hasattr(os, "memfd_create"):
            raise TransferError("KV blocks are shared by memfd_create, which only Linux has")
        page = mmap.PAGESIZE
        sizes = [SLOTS * SLOT_BYTES, *pool_bytes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // page) * page)
        self._file = os.memfd_create("twostroke-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, starts[-1])
        # It never shrinks, so that nobody who reads it can be ended by the system for that.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self._file, starts[-1])  # zeros, each page when it is first used
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.starts = tuple(starts[1:-1])
        whole = memoryview(self._memory)
        self.pools = [
            whole[start : start + size] for start, size in zip(self.starts, pool_bytes, strict=True)
        ]
        self._slots = whole[: SLOTS * SLOT_BYTES].cast("Q")
        # No two engines use the same numbers: the system may give a path to another process later.
        self._next = secrets.randbits(48) << 12

    def open_offer(self) -> int:
        """The number of a new offer, which stands from now on."""
        while self._slots[self._next % SLOTS]:
            self._next += 1
        number = self._next
        self._slots[number % SLOTS] = number
        self._next += 1
        return number

    def close_offer(self, number: int) -> None:
        if self._slots[number % SLOTS] == number:
            self._slots[number % SLOTS] = 0

    @property
    def num_offers(self) -> int:
        return sum(map(bool, self._slots))


class KVTransfer:
    """One engine's end: offers its own blocks, if its pools are shared, and fetches others'."""

    def __init__(
        self,
        pools: Sequence[memoryview],
        block_bytes: Sequence[int],
        block_size: int,
        shared: SharedPools | None = None,
        checked: bool = False,
    ) -> None:
        """`pools`: of each KV group, as bytes. `checked`: checksums go with every offer."""
        self._pools, self._block_bytes = pools, tuple(block_bytes)
        self._block_size, self._shared, self._checked = block_size, shared, checked
        self._mapped: dict[str, mmap.mmap] = {}  # memory of others, by path

    @property
    def offers(self) -> bool:
        """Whether others can fetch from here."""
        return self._shared is not None

    def offer(self, tables: Sequence[Sequence[int]], num_tokens: int) -> Offer:
        """Let others fetch these blocks. The caller keeps them as they are until `release`."""
        assert self._shared is not None, "pools that are not shared cannot be offered"
        checksums: tuple[tuple[int, ...], ...] = ()
        if self._checked:
            checksums = tuple(
                tuple(crc32(self._block(group, block)) if block else 0 for block in table)
                for group, table in enumerate(tables)
            )
        return Offer(
            self._shared.path,
            self._shared.open_offer(),
            num_tokens,
            self._block_size,
            self._block_bytes,
            self._shared.starts,
            tuple(map(tuple, tables)),
            checksums,
        )

    def release(self, number: int) -> None:
        """An offer stands no longer; after this its blocks may be written again."""
        assert self._shared is not None, "pools that are not shared cannot be offered"
        self._shared.close_offer(number)

    def fetch(self, offer: Offer, places: Sequence[Sequence[tuple[int, int]]]) -> int:
        """Copy blocks of an offer here; how many bytes. `places`: for each group the entries of the
        offer's table that are wanted, and the block of this engine that each goes to.

        Raises a `TransferError`; what the blocks hold then is of no use."""
        if (offer.block_size, offer.block_bytes) != (self._block_size, self._block_bytes):
            raise MismatchedError(
                f"blocks of {offer.block_size} tokens and {offer.block_bytes} bytes were offered, "
                f"and those here have {self._block_size} tokens and {self._block_bytes} bytes"
            )
        memory = self._memory_of(offer)
        source = memoryview(memory)
        try:
            self._check_stands(offer, source)
        except OfferWithdrawnError:
            self._mapped.pop(offer.memory)  # perhaps another engine's, of the same path before
            raise
        num_bytes = 0
        for group, (start, size) in enumerate(zip(offer.starts, offer.block_bytes, strict=True)):
            table = offer.tables[group]
            for entry, target in places[group]:
                at = start + table[entry] * size
                if at + size > len(memory):
                    raise TruncatedError(
                        f"block {table[entry]} of group {group} ends at byte {at + size}, and the "
                        f"sender's memory has {len(memory)}"
                    )
                self._block(group, target)[:] = source[at : at + size]
            num_bytes += len(places[group]) * size
        self._check_stands(offer, source)
        if offer.checksums:
            self._check_sums(offer, places)
        return num_bytes

    def _block(self, group: int, number: int) -> memoryview:
        size = self._block_bytes[group]
        return self._pools[group][number * size : (number + 1) * size]

    def _memory_of(self, offer: Offer) -> mmap.mmap:
        if offer.memory not in self._mapped:
            self._forget_dead()
            try:
                file = os.open(offer.memory, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SenderGoneError(
                    f"{offer.memory} cannot be opened ({error.strerror})"
                ) from None
            try:
                if os.fstat(file).st_size < SLOTS * SLOT_BYTES:
                    raise TruncatedError(f"{offer.memory} has {os.fstat(file).st_size} bytes")
                self._mapped[offer.memory] = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        return self._mapped[offer.memory]

    def _forget_dead(self) -> None:
        """Memory of engines that have ended is freed when the last who mapped it lets it go."""
        for path in [path for path in self._mapped if not os.path.exists(path)]:
            self._mapped.pop(path)  # unmapped with its last view

    def _check_stands(self, offer: Offer, source: memoryview) -> None:
        at = offer.number % SLOTS * SLOT_BYTES
        if int.from_bytes(source[at : at + SLOT_BYTES], "little") != offer.number:
            raise OfferWithdrawnError(
                f"offer {offer.number} had been released before it was fetched"
            )

    def _check_sums(self, offer: Offer, places: Sequence[Sequence[tuple[int, int]]]) -> None:
        for group, wanted in enumerate(places):
            for entry, target in wanted:
                if crc32(self._block(group, target)) != offer.checksums[group][entry]:
                    raise DamagedError(
                        f"block {offer.tables[group][entry]} of group {group} has arrived with "
                        "another checksum than it was sent with"
                    )
