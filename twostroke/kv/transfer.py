"""Transfer of KV blocks between engines: offer, fetch, release.

    sender                                                 receiver
    offer(tables) ────────── Offer, with addresses ──────▶ fetch(offer)
      │ the blocks stay unchanged ───── blocks ──────────▶ advance(), until all blocks have arrived
    release(number) ◀─────── all blocks have arrived ──────┘

This module handles bytes and imports no tensor library. A block of a group is contiguous in every
pool, so a transport can copy any block of the sender to any block of the receiver. The transport
depends on the locations of the engines. The sender lists its addresses, and the receiver chooses:

    device_memory.py   the same machine, blocks in GPU memory    CUDA IPC, one copy on the device
    shared_memory.py   the same machine, blocks in host memory   one copy, pool to pool
    nixl.py            any machine, with RDMA                    NIXL, through network cards
    sockets.py         any machine                               ZeroMQ, by a thread of the sender

A fetch never blocks: `advance` makes the progress that is possible between two steps of the engine.
A block may be overwritten if the sender releases the block during a copy. To notice this, the
receiver looks up the offer in the sender's table of valid offers, before and after the copy.

A failure raises a `TransferError` and does not harm the request: the receiver computes the tokens
instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import addressof, c_char
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from zlib import crc32

from twostroke.errors import EngineError

NULL_BLOCK = 0
TIMEOUT_S = 3.0  # a fetch fails if no data arrives for this time
PREPARED_BYTES = 512 << 20  # memory at the start of each pool that is prepared for fetches
PREPARED_BYTES_PER_CALL = 8 << 20  # takes some milliseconds

# For each group: pairs of an index in the offer's table and the receiver's block for it.
BlockPairs = Sequence[Sequence[tuple[int, int]]]


class TransferError(EngineError):
    """KV blocks could not be fetched. The engine computes the tokens of the request."""


class SenderGoneError(TransferError):
    """The engine that offered the blocks has ended."""


class OfferWithdrawnError(TransferError):
    """The sender has released the blocks."""


class TruncatedError(TransferError):
    """Fewer bytes arrived than a block has, or the sender's memory is smaller than its blocks."""


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
    scope: str  # receivers in the same scope can use the address; "": all receivers
    endpoint: str
    data: bytes = b""  # further data of the transport


class Offer(NamedTuple):
    """The blocks of the first tokens of a sequence. Plain data, sent between processes."""

    addresses: tuple[Address, ...]
    number: int  # of this offer, unique in the sender
    num_tokens: int
    layout: str  # contents and order of a block
    block_size: int
    block_bytes: tuple[int, ...]  # of each KV group
    tables: tuple[tuple[int, ...], ...]  # per group; `NULL_BLOCK` outside a sliding window
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
        self._parts_to_prepare = (
            pool[start : start + PREPARED_BYTES_PER_CALL]
            for pool in pools
            for start in range(0, min(len(pool), PREPARED_BYTES), PREPARED_BYTES_PER_CALL)
        )

    def read(self, group: int, number: int) -> bytes:
        return bytes(self._block(group, number))

    def read_into(self, group: int, number: int, data: memoryview) -> None:
        data[:] = self._block(group, number)

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        self._block(group, number)[:] = data

    def pinned(self, data: memoryview) -> AbstractContextManager[None]:
        return nullcontext()

    def regions(self) -> list[Region]:
        starts = (addressof(c_char.from_buffer(pool)) for pool in self._pools)
        return [Region(at, len(pool)) for at, pool in zip(starts, self._pools, strict=True)]

    def prepare_memory(self) -> bool:
        """Write to some new pages, so that the system allocates the pages before the first fetch.
        In a virtual machine a copy to new pages takes eight times as long. Return False if all
        pages were prepared before. Called while no other code writes."""
        part = next(self._parts_to_prepare, None)
        if part is not None:
            byte_per_page = part[::PAGESIZE]
            byte_per_page[:] = bytes(byte_per_page)  # the value stays
        return part is not None

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
        """Bytes of `num_bytes` that were copied in calls of `advance`, not by another thread."""
        return self.num_bytes

    def advance(self, max_bytes: int | None) -> bool:
        """Make progress without waiting. Return whether all blocks have arrived. `max_bytes`: limit
        of the copies in this call, but one block is always copied; None: no limit."""
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
        """Return whether this engine can fetch from an address of this kind of transport."""
        raise NotImplementedError

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
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
        self, transport: str, copy: Copy, blocks: Blocks, offer: Offer, pairs: BlockPairs
    ) -> None:
        self.transport, self.began_s = transport, monotonic()
        self._copy, self._blocks, self._offer, self._pairs = copy, blocks, offer, pairs

    @property
    def num_bytes(self) -> int:
        """Bytes received so far."""
        return self._copy.num_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that were copied in calls of `advance`; see `Copy.own_bytes`."""
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
        for group, pairs in enumerate(self._pairs):
            for entry, target in pairs:
                if crc32(self._blocks.read(group, target)) != offer.checksums[group][entry]:
                    raise DamagedError(
                        f"block {offer.tables[group][entry]} of group {group} is damaged: its "
                        "checksum differs from the sender's"
                    )


class KVTransfer:
    """The transfer endpoint of one engine: offers and fetches blocks."""

    def __init__(
        self,
        blocks: Blocks,
        transports: Sequence[Transport],
        offer_table: OfferTable | None = None,
        with_checksums: bool = False,
        to_prepare: HostBlocks | None = None,
    ) -> None:
        """`transports`: the best first. `offer_table`: needed by an engine that offers blocks.
        `with_checksums`: offers contain checksums. `to_prepare`: the blocks whose memory
        `prepare_memory` prepares."""
        self._blocks, self._transports = blocks, transports
        self._offer_table, self._with_checksums = offer_table, with_checksums
        self._to_prepare = to_prepare
        addresses = (transport.address() for transport in transports)
        self._addresses = tuple(address for address in addresses if address is not None)

    @property
    def can_offer(self) -> bool:
        """True if other engines can fetch from this engine."""
        return bool(self._addresses)

    @property
    def layout(self) -> str:
        """The contents of a block, which must be equal in both engines."""
        return _described(self._blocks)

    def offer(self, tables: Sequence[Sequence[int]], num_tokens: int) -> Offer:
        """Offer these blocks. The caller keeps the blocks unchanged until `release`."""
        assert self._offer_table is not None, "this engine was created without an offer table"
        blocks = self._blocks
        checksums: tuple[tuple[int, ...], ...] = ()
        if self._with_checksums:
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
        assert self._offer_table is not None, "this engine was created without an offer table"
        self._offer_table.close_offer(number)
        for transport in self._transports:
            transport.close_offer(number)

    def fetch(self, offer: Offer, pairs: BlockPairs) -> Fetch:
        """Start to copy blocks of an offer. Raise a `TransferError` if that is impossible."""
        blocks = self._blocks
        expected = blocks.layout, blocks.block_size, blocks.block_bytes
        if (offer.layout, offer.block_size, offer.block_bytes) != expected:
            raise MismatchedError(
                f"the sender offers {_described(offer)}, but this engine has {_described(blocks)}"
            )
        problem = ""
        for transport in self._transports:
            for address in offer.addresses:
                if address.transport == transport.name and transport.reaches(address):
                    try:
                        copy = transport.begin(address, offer, pairs)
                    except UnreachableError as error:  # try the next transport
                        problem = f" ({error})"
                    else:
                        return Fetch(transport.name, copy, blocks, offer, pairs)
        offered = ", ".join(f"{a.transport} at {a.endpoint}" for a in offer.addresses) or "nothing"
        names = ", ".join(transport.name for transport in self._transports)
        raise UnreachableError(
            f"no common transport: the sender offers {offered}; this engine supports {names} and "
            f"is on {this_host()}{problem}"
        )

    def warm(self) -> None:
        for transport in self._transports:
            transport.warm()

    def prepare_memory(self) -> bool:
        """Prepare some memory for fetches. Return False if no memory is left to prepare. Called
        when the engine is idle."""
        return self._to_prepare is not None and self._to_prepare.prepare_memory()

    def tidy(self) -> None:
        for transport in self._transports:
            transport.tidy()

    def dropped(self) -> dict[str, int]:
        """Return how many messages of other engines were dropped, by reason."""
        counts: dict[str, int] = {}
        for transport in self._transports:
            counts |= transport.dropped()  # at most one transport receives messages
        return counts

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def _described(blocks: Blocks | Offer) -> str:
    sizes = ", ".join(map(str, blocks.block_bytes))
    return f"blocks of {blocks.block_size} tokens and {sizes} bytes ({blocks.layout})"


@cache
def this_host() -> str:
    """Return a name of this machine and container, from the machine's boot id. Processes with the
    same name can map each other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "a system without /proc"
