"""KV blocks on their way from one engine to another: offer, fetch, release. Bytes only, no tensors.

    sender    its pools ─── offer(tables) ─▶ Offer, with its addresses ┄┄┄ told to ┄┄┄┐
                     ▲ the blocks stay owned                                          ▼
                     └── release ◀┄┄ told when all is there ┄┄ fetch(offer), advance() … receiver

A block of a group is one contiguous piece in every pool, so that blocks are copied one by one, from
any place of one pool to any place of another. How they travel depends on where the two engines are;
the one that offers says where it can be reached, the one that fetches picks:

    device_memory.py   the same machine, blocks on GPUs    CUDA IPC, one copy on the device
    shared_memory.py   the same machine, blocks of a CPU   one copy, pool to pool
    nixl.py            any machine, with RDMA              NIXL, by the network's cards
    sockets.py         any machine                         ZeroMQ, by a thread of the sender's

A fetch never waits: `advance` does what can be done now, between two steps of the engine. Nobody
takes a block for the real thing that was released meanwhile and may have been written anew: the
sender keeps a table of the offers that stand, which is looked at before and after a copy.

What goes wrong has a name (`TransferError`), and none of it harms the request: whoever fetches
computes the tokens again instead.
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
TIMEOUT_S = 3.0  # in which nothing has come
# Of each pool, the blocks that are taken first, and so much of it at one time: some milliseconds.
READY_BYTES, TOUCH_BYTES = 512 << 20, 8 << 20

# For each group: entries of an offer's table, and the block of the receiver that each goes to.
Places = Sequence[Sequence[tuple[int, int]]]


class TransferError(EngineError):
    """KV blocks could not be fetched; the request's tokens are to be computed again."""


class SenderGoneError(TransferError):
    """The engine that offered the blocks has ended."""


class OfferWithdrawnError(TransferError):
    """Fetched too late: the sender has released the blocks."""


class TruncatedError(TransferError):
    """A block, or the memory that it is in, is shorter than it should be."""


class DamagedError(TransferError):
    """A block's checksum is another than the sender's."""


class MismatchedError(TransferError):
    """The two engines keep their blocks in different sizes or types."""


class ReceiverFullError(TransferError):
    """The receiver has too few free blocks."""


class StalledError(TransferError):
    """The sender has stopped sending."""


class UnreachableError(TransferError):
    """The receiver can use none of the ways that the sender offers."""


class Address(NamedTuple):
    """One way to reach an engine's blocks. Plain data, sent as it is."""

    way: str  # memory, device, nixl, sockets
    reach: str  # only those can use it who have the same; "": anybody
    at: str
    more: bytes = b""  # what the way itself has to say


class Offer(NamedTuple):
    """Where the keys and values of a sequence's first tokens are. Plain data, sent as it is."""

    addresses: tuple[Address, ...]
    number: int
    num_tokens: int
    layout: str  # what a block holds, and in which order
    block_size: int
    block_bytes: tuple[int, ...]  # of each KV group
    tables: tuple[tuple[int, ...], ...]  # of each group; null where a window has passed
    checksums: tuple[tuple[int, ...], ...] = ()  # of each block, where they are asked for

    @property
    def num_bytes(self) -> int:
        """Of all blocks that may have to be copied."""
        sizes = zip(self.tables, self.block_bytes, strict=True)
        return sum((len(table) - table.count(NULL_BLOCK)) * size for table, size in sizes)


class Region(NamedTuple):
    """Where the blocks of one group are, for who reads them by their address."""

    address: int
    num_bytes: int
    device: int = 0
    kind: str = "DRAM"  # VRAM: of a GPU


class Blocks(Protocol):
    """The blocks of one engine, by group and number."""

    layout: str
    block_size: int
    block_bytes: tuple[int, ...]  # of each group

    def read(self, group: int, number: int) -> bytes:
        """A copy. Called in any thread."""
        ...

    def write(self, group: int, number: int, data: bytes | memoryview) -> None:
        """There for the next step."""
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
        """`pools`: of each KV group, as bytes."""
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
        """Have the system give some more of the pages, which it does when they are first written:
        in a virtual machine a copy to new ones takes eight times as long. False: there are
        enough. Called while nothing else writes."""
        pool, start = next(self._untouched, (None, 0))
        if pool is not None:
            one_each = pool[start : start + TOUCH_BYTES : PAGESIZE]
            one_each[:] = bytes(one_each)  # as it was
        return pool is not None

    def _block(self, group: int, number: int) -> memoryview:
        size = self.block_bytes[group]
        return self._pools[group][number * size : (number + 1) * size]


class Standing(Protocol):
    """The offers that stand; others ask in whichever way they reach this engine."""

    def open_offer(self) -> int:
        """The number of a new offer, which stands from now on."""
        ...

    def close_offer(self, number: int) -> None: ...


class Copy:
    """Blocks of one offer on their way."""

    num_bytes = 0  # that have come

    @property
    def own_bytes(self) -> int:
        """Of those, what this thread has copied itself."""
        return self.num_bytes

    def advance(self, most_bytes: int | None) -> bool:
        """Do what can be done without waiting; whether all blocks are there. `most_bytes`: that
        this thread is to copy itself, and a block at the least; None: any number."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Nobody wants the blocks any more: after this their places are not written."""


class Way:
    """One kind of transport, at this engine's end."""

    name: str

    def address(self) -> Address | None:
        """Where others can fetch from here; None: they cannot, this way."""
        return None

    def open_offer(self, offer: Offer) -> None:
        """It stands from now on."""

    def close_offer(self, number: int) -> None: ...

    def reaches(self, address: Address) -> bool:
        raise NotImplementedError

    def begin(self, address: Address, offer: Offer, places: Places) -> Copy:
        """Raises `UnreachableError` where it does not reach after all."""
        raise NotImplementedError

    def warm(self) -> None:
        """Make ready what the first fetch would wait for."""

    def tidy(self) -> None:
        """Let go what engines had that have ended. Called now and then."""

    def close(self) -> None: ...


class Fetch:
    """An offer that is being fetched; made by `KVTransfer.fetch`."""

    def __init__(self, way: str, copy: Copy, blocks: Blocks, offer: Offer, places: Places) -> None:
        self.way, self.began_s = way, monotonic()
        self._copy, self._blocks, self._offer, self._places = copy, blocks, offer, places

    @property
    def num_bytes(self) -> int:
        """That have come so far."""
        return self._copy.num_bytes

    @property
    def own_bytes(self) -> int:
        """Of those, what the engine's thread has copied itself."""
        return self._copy.own_bytes

    def advance(self, most_bytes: int | None = None) -> bool:
        """Whether all blocks are there. See `Copy.advance`.

        Raises a `TransferError`; what the blocks hold then is of no use."""
        if not self._copy.advance(most_bytes):
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
    """One engine's end: offers its own blocks, if it can be reached, and fetches others'."""

    def __init__(
        self,
        blocks: Blocks,
        ways: Sequence[Way],
        standing: Standing | None = None,
        checked: bool = False,
        untouched: HostBlocks | None = None,
    ) -> None:
        """`ways`: the best first. `standing`: of an engine that offers. `checked`: checksums go
        with every offer. `untouched`: blocks that are to be made ready for what will come."""
        self._blocks, self._ways = blocks, ways
        self._standing, self._checked, self._untouched = standing, checked, untouched
        self._addresses = tuple(one for way in ways if (one := way.address()) is not None)

    @property
    def offers(self) -> bool:
        """Whether others can fetch from here."""
        return bool(self._addresses)

    @property
    def layout(self) -> str:
        """What a block holds: the same in all engines between which blocks travel."""
        return _described(self._blocks)

    def offer(self, tables: Sequence[Sequence[int]], num_tokens: int) -> Offer:
        """Let others fetch these blocks. The caller keeps them as they are until `release`."""
        assert self._standing is not None, "an engine that cannot be reached has nothing to offer"
        blocks = self._blocks
        checksums: tuple[tuple[int, ...], ...] = ()
        if self._checked:
            checksums = tuple(
                tuple(crc32(blocks.read(group, block)) if block else 0 for block in table)
                for group, table in enumerate(tables)
            )
        offer = Offer(
            self._addresses,
            self._standing.open_offer(),
            num_tokens,
            blocks.layout,
            blocks.block_size,
            blocks.block_bytes,
            tuple(map(tuple, tables)),
            checksums,
        )
        for way in self._ways:
            way.open_offer(offer)
        return offer

    def release(self, number: int) -> None:
        """An offer stands no longer; after this its blocks may be written again."""
        assert self._standing is not None, "an engine that cannot be reached has nothing to offer"
        self._standing.close_offer(number)
        for way in self._ways:
            way.close_offer(number)

    def fetch(self, offer: Offer, places: Places) -> Fetch:
        """Begin to copy blocks of an offer here. Raises a `TransferError` if that cannot be."""
        own = self._blocks
        here = own.layout, own.block_size, own.block_bytes
        if (offer.layout, offer.block_size, offer.block_bytes) != here:
            raise MismatchedError(
                f"{_described(offer)} were offered, and here there are {_described(own)}"
            )
        problem = ""
        for way in self._ways:
            for address in offer.addresses:
                if address.way == way.name and way.reaches(address):
                    try:
                        copy = way.begin(address, offer, places)
                    except UnreachableError as error:  # perhaps in another way
                        problem = f" ({error})"
                    else:
                        return Fetch(way.name, copy, own, offer, places)
        offered = ", ".join(f"{one.way} at {one.at}" for one in offer.addresses) or "nothing"
        raise UnreachableError(
            f"the sender can be reached by {offered}; this engine has "
            f"{', '.join(way.name for way in self._ways)}, and is on {this_host()}{problem}"
        )

    def warm(self) -> None:
        for way in self._ways:
            way.warm()

    def make_ready(self) -> bool:
        """Do some of what fetches would wait for; whether there is more. Called when idle."""
        return self._untouched is not None and self._untouched.touch()

    def tidy(self) -> None:
        for way in self._ways:
            way.tidy()

    def close(self) -> None:
        for way in self._ways:
            way.close()


def _described(blocks: Blocks | Offer) -> str:
    sizes = ", ".join(map(str, blocks.block_bytes))
    return f"blocks of {blocks.block_size} tokens and {sizes} bytes ({blocks.layout})"


@cache
def this_host() -> str:
    """The same for processes that can open each other's memory: one machine since its last start,
    one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "a system without /proc"
