"""KV blocks in host memory that other processes of this machine can map. Linux only.

    memory    [ table of offers │ pool of group 0 │ pool of group 1 │ … ]

A fetch copies each block once, directly from the sender's pool to the receiver's pool. The numbers
of valid offers are stored before the pools, so that a receiver can check before and after the copy
whether the offer was valid.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec

from twostroke.kv.transfer import (
    Address,
    BlockPairs,
    Blocks,
    Copy,
    Offer,
    OfferWithdrawnError,
    SenderGoneError,
    TransferError,
    Transport,
    TruncatedError,
    this_host,
)

SLOTS = 4096  # maximum of simultaneous offers
SLOT_BYTES = 8
_decode_starts = msgspec.msgpack.Decoder(tuple[int, ...]).decode


class SharedPools:
    """The shared memory of one engine: its pools and its valid offers."""

    def __init__(self, pool_bytes: Sequence[int] = ()) -> None:
        """`pool_bytes`: size of each KV group's pool; empty if the pools are in other memory."""
        if not hasattr(os, "memfd_create"):
            raise TransferError("sharing KV blocks needs memfd_create, which only Linux has")
        import fcntl  # not available on Windows

        page = mmap.PAGESIZE
        sizes = [SLOTS * SLOT_BYTES, *pool_bytes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // page) * page)
        self._file = os.memfd_create("twostroke-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, starts[-1])
        # The file is sealed against shrinking, so that the system cannot kill a reader (SIGBUS).
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self._file, starts[-1])  # zeros; pages are allocated at first use
        # A path that every process of this user can open while this process lives.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.starts = tuple(starts[1:-1])
        whole = memoryview(self._memory)
        self.pools = [
            whole[start : start + size] for start, size in zip(self.starts, pool_bytes, strict=True)
        ]
        self.slots = whole[: SLOTS * SLOT_BYTES]
        self._slots = self.slots.cast("Q")
        self.num_offers = 0  # valid offers
        # Engines use different numbers, because the system may reuse a path for another process.
        self._next = secrets.randbits(48) << 12

    def open_offer(self) -> int:
        """Return the number of a new offer. With too many offers the new one is not valid, and its
        receiver computes the tokens."""
        if self.num_offers < SLOTS:
            while self._slots[self._next % SLOTS]:
                self._next += 1
            self._slots[self._next % SLOTS] = self._next
            self.num_offers += 1
        self._next += 1
        return self._next - 1

    def close_offer(self, number: int) -> None:
        if self._slots[number % SLOTS] == number:
            self._slots[number % SLOTS] = 0
            self.num_offers -= 1


class OthersMemory:
    """The shared memory of other engines, mapped at first use."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}  # path → memory

    def at(self, path: str) -> memoryview:
        """Return the memory at a path. Raise `SenderGoneError` if the path does not exist."""
        if path not in self._mapped:
            self._forget_dead()
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SenderGoneError(f"{path} cannot be opened ({error.strerror})") from None
            try:
                if os.fstat(file).st_size < SLOTS * SLOT_BYTES:
                    raise TruncatedError(f"{path} has {os.fstat(file).st_size} bytes")
                self._mapped[path] = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        return memoryview(self._mapped[path])

    def check_offer(self, path: str, number: int) -> None:
        """Raise `OfferWithdrawnError` if the offer is no longer valid."""
        at = number % SLOTS * SLOT_BYTES
        if int.from_bytes(self.at(path)[at : at + SLOT_BYTES], "little") != number:
            self._mapped.pop(path)  # the mapping may be of an earlier engine with the same path
            raise OfferWithdrawnError(f"offer {number} had been released before it was fetched")

    def _forget_dead(self) -> None:
        """Unmap the memory of ended engines, which frees the memory."""
        for path in [path for path in self._mapped if not os.path.exists(path)]:
            self._mapped.pop(path)  # unmapped with the last view


class SharedMemory(Transport):
    """The transport by shared host memory."""

    name = "memory"

    def __init__(self, blocks: Blocks, shared: SharedPools | None = None) -> None:
        """`shared`: the memory of the blocks, if other engines can fetch them."""
        self._blocks, self._shared = blocks, shared
        self._others = OthersMemory()

    def address(self) -> Address | None:
        if self._shared is None:
            return None
        starts = msgspec.msgpack.encode(self._shared.starts)
        return Address(self.name, this_host(), self._shared.path, starts)

    def reaches(self, address: Address) -> bool:
        return address.scope == this_host()

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
        return _MemoryCopy(self._blocks, self._others, address, offer, pairs)


class _MemoryCopy(Copy):
    def __init__(
        self,
        blocks: Blocks,
        others: OthersMemory,
        address: Address,
        offer: Offer,
        pairs: BlockPairs,
    ) -> None:
        self._blocks, self._others, self._path = blocks, others, address.endpoint
        self._offer, self._starts = offer, _decode_starts(address.data)
        self._left = [  # group, sender's block, receiver's block; last first
            (group, offer.tables[group][entry], target)
            for group, wanted in enumerate(pairs)
            for entry, target in wanted
        ][::-1]

    def advance(self, max_bytes: int | None) -> bool:
        number, start = self._offer.number, self.num_bytes
        self._others.check_offer(self._path, number)
        source = self._others.at(self._path)
        while self._left and (max_bytes is None or self.num_bytes - start < max_bytes):
            group, block, target = self._left.pop()
            size = self._offer.block_bytes[group]
            at = self._starts[group] + block * size
            if at + size > len(source):
                raise TruncatedError(
                    f"block {block} of group {group} ends at byte {at + size}, and the sender's "
                    f"memory has {len(source)}"
                )
            self._blocks.write(group, target, source[at : at + size])
            self.num_bytes += size
        self._others.check_offer(self._path, number)
        return not self._left
