"""Transfer of KV blocks between engines: offer, fetch, release. Bytes only, no tensors.

    sender    its pools ─── offer(tables) ─▶ Offer, with its addresses ┄┄┄┄ sent to ┄┄┐
                     ▲ the blocks stay owned                                          ▼
                     └── release ◀┄┄ after the last block ┄┄┄┄ fetch(offer), advance() … receiver

A block of a group is contiguous in every pool, so that blocks are copied one by one between any
places of two pools. The transport depends on the locations of the engines. The sender lists its
addresses, and the receiver chooses:

    device_memory.py   the same machine, blocks on GPUs    CUDA IPC, one copy on the device
    shared_memory.py   the same machine, blocks of a CPU   one copy, pool to pool
    nixl.py            any machine, with RDMA              NIXL, through network cards
    sockets.py         any machine                         ZeroMQ, by a thread of the sender

A fetch never blocks: `advance` makes the progress that is possible between two steps of the engine.
A block that was released during the copy may have been overwritten: the sender has a table of valid
offers, and the receiver checks the table before and after a copy.

A failure raises a `TransferError` and does not harm the request: the receiver computes the tokens
instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import addressof, c_char
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from zlib import crc32

from twostroke.errors import EngineError

NULL_BLOCK = 0
TIMEOUT_S = 3.0  # without any data
# Memory to prepare: the first blocks of each pool, and the bytes per call, some milliseconds.
READY_BYTES, TOUCH_BYTES = 512 << 20, 8 << 20

# For each group: entries of an offer's table, and the receiver's block of each entry.
Places = Sequence[Sequence[tuple[int, int]]]


class TransferError(EngineError):
    """KV blocks could not be fetched. The engine computes the tokens of the request."""


class SenderGoneError(TransferError):
    """The engine that offered the blocks has ended."""


class OfferWithdrawnError(TransferError):
    """The sender has released the blocks."""


class TruncatedError(TransferError):
    """A block, or the memory of a block, is too short."""


class DamagedError(TransferError):
    """The checksum of a block differs from the sender's."""


class MismatchedError(TransferError):
    """The blocks of the two engines have different sizes or types."""


class ReceiverFullError(TransferError):
    """The receiver has too few free blocks."""


class StalledError(TransferError):
    """The sender has stopped sending."""


class UnreachableError(TransferError):
    """The receiver supports none of the sender's transports."""


class Address(NamedTuple):
    """An address of an engine's blocks under one transport. Plain data, sent between processes."""

    transport: str  # memory, device, nixl, sockets
    reach: str  # the receiver must have the same value; "": any receiver
    at: str
    more: bytes = b""  # data of the transport


class Offer(NamedTuple):
    """The blocks of the first tokens of a sequence. Plain data, sent between processes."""

    addresses: tuple[Address, ...]
    number: int
    num_tokens: int
    layout: str  # contents and order of a block
    block_size: int
    block_bytes: tuple[int, ...]  # of each KV group
    tables: tuple[tuple[int, ...], ...]  # per group; null for blocks outside a window
    checksums: tuple[tuple[int, ...], ...] = ()  # per block, if enabled

    @property
    def num_bytes(self) -> int:
        """Bytes of all offered blocks."""
        sizes = zip(self.tables, self.block_bytes, strict=True)
        return sum((len(table) - table.count(NULL_BLOCK)) * size for table, size in sizes)


class Region(NamedTuple):
    """The memory region of one group, for transports that read by address."""

    address: int
    num_bytes: int
    device: int = 0
    kind: str = "DRAM"  # VRAM: on a GPU


class Blocks(Protocol):
    """The blocks of one engine, by group and number."""

    layout: str
    block_size: int
    block_bytes: tuple[int, ...]  # of each group

    def read(self, group: int, number: int) -> bytes:
        """Return a copy of a block. Called in any thread."""
        ...

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        """Write a block before the next step."""
        ...


class HostBlocks:
    """Blocks in the memory of this process."""

    def __init__(
        self,
        pools: Sequence[memoryview],
        block_bytes: Sequence[int],
        block_size: int,
        layout: str = "bytes",
    ) -> None:
        """`pools`: the bytes of each KV group."""
        self.layout, self.block_size, self.block_bytes = layout, block_size, tuple(block_bytes)
        self._pools = pools
        self._untouched = (
            (pool, start)
            for pool in pools
            for start in range(0, min(len(pool), READY_BYTES), TOUCH_BYTES)
        )

    def read(self, group: int, number: int) -> bytes:
        return bytes(self._block(group, number))

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        self._block(group, number)[:] = data

    def regions(self) -> list[Region]:
        starts = (addressof(c_char.from_buffer(pool)) for pool in self._pools)
        return [Region(at, len(pool)) for at, pool in zip(starts, self._pools, strict=True)]

    def touch(self) -> bool:
        """Write to some new pages, so that the system allocates them: in a virtual machine a copy
        to new pages takes eight times as long. Return False when enough pages are allocated. Called
        while no other code writes."""
        pool, start = next(self._untouched, (None, 0))
        if pool is not None:
            one_each = pool[start : start + TOUCH_BYTES : PAGESIZE]
            one_each[:] = bytes(one_each)  # unchanged
        return pool is not None

    def _block(self, group: int, number: int) -> memoryview:
        size = self.block_bytes[group]
        return self._pools[group][number * size : (number + 1) * size]


class OfferTable(Protocol):
    """The valid offers of this engine, which receivers check."""

    def open_offer(self) -> int:
        """Return the number of a new valid offer."""
        ...

    def close_offer(self, number: int) -> None: ...


class Copy:
    """A copy of the blocks of one offer, in progress."""

    num_bytes = 0  # received so far

    @property
    def own_bytes(self) -> int:
        """Bytes that this thread has copied itself."""
        return self.num_bytes

    def advance(self, max_bytes: int | None) -> bool:
        """Make progress without waiting. Return whether all blocks have arrived. `max_bytes`: limit
        of this thread's own copies, at least one block; None: no limit."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Cancel the copy. Afterwards the receiver's blocks are not written."""


class Transport:
    """This engine's endpoint of one kind of transport."""

    name: str

    def address(self) -> Address | None:
        """Return the address for receivers; None if they cannot fetch by this transport."""
        return None

    def open_offer(self, offer: Offer) -> None:
        """Make an offer valid."""

    def close_offer(self, number: int) -> None: ...

    def reaches(self, address: Address) -> bool:
        raise NotImplementedError

    def begin(self, address: Address, offer: Offer, places: Places) -> Copy:
        """Start a copy. Raise `UnreachableError` if the sender cannot be reached."""
        raise NotImplementedError

    def warm(self) -> None:
        """Prepare resources that would delay the first fetch."""

    def tidy(self) -> None:
        """Release resources of engines that have ended. Called periodically."""

    def dropped(self) -> dict[str, int]:
        """Return how many messages of other engines were dropped, by reason."""
        return {}

    def close(self) -> None: ...


class Fetch:
    """A fetch of one offer, returned by `KVTransfer.fetch`."""

    def __init__(
        self, transport: str, copy: Copy, blocks: Blocks, offer: Offer, places: Places
    ) -> None:
        self.transport, self.began_s = transport, monotonic()
        self._copy, self._blocks, self._offer, self._places = copy, blocks, offer, places

    @property
    def num_bytes(self) -> int:
        """Bytes received so far."""
        return self._copy.num_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that the engine's thread has copied itself."""
        return self._copy.own_bytes

    def advance(self, max_bytes: int | None = None) -> bool:
        """Make progress and return whether all blocks have arrived; see `Copy.advance`.

        Raise a `TransferError` on failure; the blocks are then invalid."""
        if not self._copy.advance(max_bytes):
            return False
        if self._offer.checksums:
            self._check_sums()
        return True

    def abandon(self) -> None:
        self._copy.abandon()

    def _check_sums(self) -> None:
        offer = self._offer
        for group, wanted in enumerate(self._places):
            for entry, target in wanted:
                if crc32(self._blocks.read(group, target)) != offer.checksums[group][entry]:
                    raise DamagedError(
                        f"block {offer.tables[group][entry]} of group {group} has arrived with "
                        "another checksum than it was sent with"
                    )


class KVTransfer:
    """The transfer endpoint of one engine: offers its blocks and fetches blocks of other
    engines."""

    def __init__(
        self,
        blocks: Blocks,
        transports: Sequence[Transport],
        offer_table: OfferTable | None = None,
        checked: bool = False,
        untouched: HostBlocks | None = None,
    ) -> None:
        """`transports`: the best first. `offer_table`: of an engine that offers. `checked`: offers
        contain checksums. `untouched`: blocks whose memory is prepared for later fetches."""
        self._blocks, self._transports = blocks, transports
        self._offer_table, self._checked, self._untouched = offer_table, checked, untouched
        addresses = (transport.address() for transport in transports)
        self._addresses = tuple(address for address in addresses if address is not None)

    @property
    def offers(self) -> bool:
        """True if other engines can fetch from this engine."""
        return bool(self._addresses)

    @property
    def layout(self) -> str:
        """The contents of a block, which must be equal in both engines."""
        return _described(self._blocks)

    def offer(self, tables: Sequence[Sequence[int]], num_tokens: int) -> Offer:
        """Offer these blocks. The caller keeps the blocks unchanged until `release`."""
        assert self._offer_table is not None, (
            "an engine that cannot be reached has nothing to offer"
        )
        blocks = self._blocks
        checksums: tuple[tuple[int, ...], ...] = ()
        if self._checked:
            checksums = tuple(
                tuple(crc32(blocks.read(group, block)) if block else 0 for block in table)
                for group, table in enumerate(tables)
            )
        offer = Offer(
            self._addresses,
            self._offer_table.open_offer(),
            num_tokens,
            blocks.layout,
            blocks.block_size,
            blocks.block_bytes,
            tuple(map(tuple, tables)),
            checksums,
        )
        for transport in self._transports:
            transport.open_offer(offer)
        return offer

    def release(self, number: int) -> None:
        """Withdraw an offer. Afterwards its blocks may be overwritten."""
        assert self._offer_table is not None, (
            "an engine that cannot be reached has nothing to offer"
        )
        self._offer_table.close_offer(number)
        for transport in self._transports:
            transport.close_offer(number)

    def fetch(self, offer: Offer, places: Places) -> Fetch:
        """Start to copy blocks of an offer. Raise a `TransferError` if that is impossible."""
        own = self._blocks
        here = own.layout, own.block_size, own.block_bytes
        if (offer.layout, offer.block_size, offer.block_bytes) != here:
            raise MismatchedError(
                f"{_described(offer)} were offered, and here there are {_described(own)}"
            )
        problem = ""
        for transport in self._transports:
            for address in offer.addresses:
                if address.transport == transport.name and transport.reaches(address):
                    try:
                        copy = transport.begin(address, offer, places)
                    except UnreachableError as error:  # try the next transport
                        problem = f" ({error})"
                    else:
                        return Fetch(transport.name, copy, own, offer, places)
        offered = ", ".join(f"{one.transport} at {one.at}" for one in offer.addresses) or "nothing"
        names = ", ".join(transport.name for transport in self._transports)
        raise UnreachableError(
            f"the sender can be reached by {offered}; this engine has "
            f"{names}, and is on {this_host()}{problem}"
        )

    def warm(self) -> None:
        for transport in self._transports:
            transport.warm()

    def make_ready(self) -> bool:
        """Prepare some memory for fetches. Return whether more is left. Called when idle."""
        return self._untouched is not None and self._untouched.touch()

    def tidy(self) -> None:
        for transport in self._transports:
            transport.tidy()

    def dropped(self) -> dict[str, int]:
        """Return how many messages of other engines were dropped, by reason."""
        counts: dict[str, int] = {}
        for transport in self._transports:
            counts |= transport.dropped()  # one transport at most has messages
        return counts

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def _described(blocks: Blocks | Offer) -> str:
    sizes = ", ".join(map(str, blocks.block_bytes))
    return f"blocks of {blocks.block_size} tokens and {sizes} bytes ({blocks.layout})"


@cache
def this_host() -> str:
    """Return a name that is equal for processes that can map each other's memory: on one machine
    since its last start, in one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "a system without /proc"
