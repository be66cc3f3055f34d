"""KV blocks in memory that other processes of this machine can map. Linux only.

    memory    [ offers that stand │ pool of group 0 │ pool of group 1 │ … ]

Fetching is one copy a block, from the sender's pool straight into the receiver's; nothing is
staged. The numbers of the offers that stand lie before the pools, so that whoever copies sees
before and after it whether the blocks were still the sender's to give.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import msgspec

from twostroke.kv.transfer import (
    Address,
    Blocks,
    Copy,
    Offer,
    OfferWithdrawnError,
    Places,
    SenderGoneError,
    TransferError,
    TruncatedError,
    Way,
    this_host,
)

SLOTS = 4096  # offers that may stand at one time
SLOT_BYTES = 8
_decode_starts = msgspec.msgpack.Decoder(tuple[int, ...]).decode


class SharedPools:
    """The memory of all pools of one engine, and the offers of it that stand."""

    def __init__(self, pool_bytes: Sequence[int] = ()) -> None:
        """`pool_bytes`: of each KV group; none where the pools are elsewhere."""
        if not hasattr(os, "memfd_create"):
            raise TransferError("KV blocks are shared by memfd_create, which only Linux has")
        import fcntl  # which Windows does not have

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
        # A path that any process of this user can open while this one lives.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.starts = tuple(starts[1:-1])
        whole = memoryview(self._memory)
        self.pools = [
            whole[start : start + size] for start, size in zip(self.starts, pool_bytes, strict=True)
        ]
        self.slots = whole[: SLOTS * SLOT_BYTES]
        self._slots = self.slots.cast("Q")
        self.num_offers = 0  # that stand
        # No two engines use the same numbers: the system may give a path to another process later.
        self._next = secrets.randbits(48) << 12

    def open_offer(self) -> int:
        """The number of a new offer, which stands from now on; where too many do, it does not, and
        whoever fetches it computes the tokens again."""
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
    """What other engines share, mapped when first asked for."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}  # by path

    def of(self, path: str) -> memoryview:
        """Raises `SenderGoneError` if there is none."""
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

    def check_stands(self, path: str, number: int) -> None:
        """Raises `OfferWithdrawnError` if the offer was released."""
        at = number % SLOTS * SLOT_BYTES
        if int.from_bytes(self.of(path)[at : at + SLOT_BYTES], "little") != number:
            self._mapped.pop(path)  # perhaps another engine's, of the same path before
            raise OfferWithdrawnError(f"offer {number} had been released before it was fetched")

    def _forget_dead(self) -> None:
        """Memory of engines that have ended is freed when the last who mapped it lets it go."""
        for path in [path for path in self._mapped if not os.path.exists(path)]:
            self._mapped.pop(path)  # unmapped with its last view


class SharedMemory(Way):
    name = "memory"

    def __init__(self, blocks: Blocks, shared: SharedPools | None = None) -> None:
        """`shared`: where the blocks are, if others can fetch them."""
        self._blocks, self._shared = blocks, shared
        self._others = OthersMemory()

    def address(self) -> Address | None:
        if self._shared is None:
            return None
        starts = msgspec.msgpack.encode(self._shared.starts)
        return Address(self.name, this_host(), self._shared.path, starts)

    def reaches(self, address: Address) -> bool:
        return address.reach == this_host()

    def begin(self, address: Address, offer: Offer, places: Places) -> Copy:
        return _MemoryCopy(self._blocks, self._others, address, offer, places)


class _MemoryCopy(Copy):
    def __init__(
        self, blocks: Blocks, others: OthersMemory, address: Address, offer: Offer, places: Places
    ) -> None:
        self._blocks, self._others, self._path = blocks, others, address.at
        self._offer, self._starts = offer, _decode_starts(address.more)
        self._left = [  # group, block there, block here; the last first
            (group, offer.tables[group][entry], target)
            for group, wanted in enumerate(places)
            for entry, target in wanted
        ][::-1]

    def advance(self, most_bytes: int | None) -> bool:
        number, start = self._offer.number, self.num_bytes
        self._others.check_stands(self._path, number)
        source = self._others.of(self._path)
        while self._left and (most_bytes is None or self.num_bytes - start < most_bytes):
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
        self._others.check_stands(self._path, number)
        return not self._left
