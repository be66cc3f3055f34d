"""KV blocks by NIXL, between engines on any two machines: RDMA, where there is hardware for it.

    sender    registers its pools and its table of offers ── where they are ─▶ Address
    receiver  reads the offer's number there, then the blocks, then the number again

The receiver's network card reads the sender's memory; the sender's engine is not asked. NIXL uses
what UCX finds: InfiniBand, RoCE, NVLink, and without those shared memory or TCP (`UCX_TLS` and
`UCX_NET_DEVICES` say otherwise). It needs the package `nixl`, which needs torch.

Whoever knows an offer's address can read all that its sender has registered: keep the engines'
network to yourself.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import msgspec

from twostroke.errors import ConfigError
from twostroke.kv.shared_memory import SLOT_BYTES, SLOTS, SharedPools
from twostroke.kv.transfer import (
    TIMEOUT_S,
    Address,
    Blocks,
    Copy,
    Offer,
    OfferWithdrawnError,
    Places,
    Region,
    SenderGoneError,
    StalledError,
    TransferError,
    TruncatedError,
    UnreachableError,
    Way,
)

PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")  # the first asks which of the others fits
WINDOW_BYTES: Final = 16 << 20  # read at one time, of one fetch; and a block at the least
COPIES: Final = 64  # at one time
GIVE_UP_S: Final = 10.0  # that reads may go on which nobody waits for

log = logging.getLogger(__name__)


class Reach(msgspec.Struct, array_like=True, frozen=True):
    """How a sender's memory is read."""

    metadata: bytes  # NIXL's own
    pools: list[Region]
    slots: int  # address of the offers that stand


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reach).decode


def installed() -> str | None:
    """The package to import; None: there is none."""
    return next((name for name in PACKAGES if find_spec(name) is not None), None)


def has_rdma() -> bool:
    """Whether this machine has a card for it."""
    cards = Path("/sys/class/infiniband")
    return cards.is_dir() and any(cards.iterdir())


def address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Nixl(Way):
    name = "nixl"

    def __init__(
        self,
        blocks: Blocks,
        pools: Sequence[Region],
        shared: SharedPools | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`pools`: where the blocks are. `shared`: has the offers that stand, if others can fetch
        from here."""
        package = installed()
        if package is None:
            raise ConfigError(
                "kv_transport nixl: the package nixl is not installed; pip install "
                "'twostroke[nixl]', or leave kv_transport out"
            )
        self.pools, self.timeout_s, self.block_bytes = list(pools), timeout_s, blocks.block_bytes
        self._shared = shared
        self._known: dict[str, str] = {}  # agents that have been added, as NIXL calls them
        self._name = f"twostroke-{secrets.token_hex(8)}"
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            api: Any = importlib.import_module(f"{package}._api")
            self.agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
            for pool in pools:
                self._register(pool)
            # The numbers of offers, one for each copy, as they were read from their senders.
            self._numbers = mmap.mmap(-1, COPIES * SLOT_BYTES)
            self.numbers_at = address_of(self._numbers)
            self._register(Region(self.numbers_at, COPIES * SLOT_BYTES))
            self._free = list(range(COPIES))
            self._slots_at = 0
            if shared is not None:
                self._slots_at = address_of(shared.slots)
                self._register(Region(self._slots_at, SLOTS * SLOT_BYTES))
        except Exception as error:  # whatever it raises
            raise ConfigError(
                f"kv_transport nixl: NIXL cannot be used here ({error}); leave kv_transport out"
            ) from None

    def _register(self, region: Region) -> None:
        where = [(region.address, region.num_bytes, region.device, "")]
        self.agent.register_memory(self.agent.get_reg_descs(where, region.kind))

    def address(self) -> Address | None:
        if self._shared is None:
            return None
        reach = Reach(self.agent.get_agent_metadata(), self.pools, self._slots_at)
        return Address(self.name, "", self._name, _encode(reach))

    def reaches(self, address: Address) -> bool:
        return True

    def begin(self, address: Address, offer: Offer, places: Places) -> Copy:
        reach = _decode(address.more)
        if address.at not in self._known:
            try:
                added = self.agent.add_remote_agent(reach.metadata)
            except Exception as error:  # whatever it raises
                raise UnreachableError(f"NIXL does not reach the sender: {error}") from None
            self._known[address.at] = added.decode() if isinstance(added, bytes) else added
        return _NixlCopy(self, address.at, reach, offer, places)

    def read(
        self,
        sender: str,
        here: list[tuple[int, int, int]],
        there: list[tuple[int, int, int]],
        kinds: tuple[str, str],
    ) -> Any:
        """Begin to read; its handle. Address, bytes and device of each piece, on both sides."""
        to, at = (
            self.agent.get_xfer_descs(here, kinds[0]),
            self.agent.get_xfer_descs(there, kinds[1]),
        )
        handle = self.agent.initialize_xfer("READ", to, at, self._known[sender])
        self.agent.transfer(handle)
        return handle

    def take_number(self) -> int:
        """A place for the number of an offer."""
        if not self._free:
            raise TransferError(f"{COPIES} requests' blocks are on their way already")
        return self._free.pop()

    def number_at(self, place: int) -> int:
        start = place * SLOT_BYTES
        return int.from_bytes(self._numbers[start : start + SLOT_BYTES], "little")

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def forget(self, sender: str) -> None:
        """It has ended, or cannot be reached any more."""
        name = self._known.pop(sender, None)
        if name is not None:
            try:
                self.agent.remove_remote_agent(name)
            except Exception as error:  # it has gone already
                log.debug("NIXL: %s could not be forgotten: %s", sender, error)


class _NixlCopy(Copy):
    """Reads, one after another: the offer's number, the blocks in pieces, the number."""

    def __init__(self, way: Nixl, sender: str, reach: Reach, offer: Offer, places: Places) -> None:
        self._way, self._sender, self._reach, self._offer = way, sender, reach, offer
        self._left = [  # group, block there, block here; the last first
            (group, offer.tables[group][entry], target)
            for group, wanted in enumerate(places)
            for entry, target in wanted
        ][::-1]
        for group, there, _ in self._left:
            if (there + 1) * way.block_bytes[group] > reach.pools[group].num_bytes:
                raise TruncatedError(
                    f"block {there} of group {group} was offered, and the sender's memory has "
                    f"{reach.pools[group].num_bytes} bytes"
                )
        self._place: int | None = way.take_number()
        self._checks = 0  # of the number, that have passed; the second is the last thing to do
        self._handle: Any = None  # of what is being read
        self._read_bytes, self._began_s = 0, 0.0  # of that

    def advance(self, most_bytes: int | None) -> bool:
        try:
            done = self._advance(most_bytes)
        except TransferError:
            self.abandon()
            raise
        except Exception as error:  # whatever NIXL raises
            self._handle = None
            self.abandon()
            self._way.forget(self._sender)
            raise SenderGoneError(f"NIXL: {error}") from None
        if done:
            self.abandon()
        return done

    def _advance(self, most_bytes: int | None) -> bool:
        start = self.num_bytes
        while self._checks < 2:
            if self._handle is None:
                left = None if most_bytes is None else most_bytes - (self.num_bytes - start)
                if left is not None and left <= 0 and self._left and self._checks:
                    return False
                self._begin(left)
            if not self._is_read():
                return False
            self.num_bytes += self._read_bytes
            if not self._read_bytes:
                self._check_stands()
        return True

    def _begin(self, most_bytes: int | None) -> None:
        here, there = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        self._read_bytes, self._began_s = 0, monotonic()
        kinds = "DRAM", "DRAM"
        if self._checks and self._left:
            most = min(WINDOW_BYTES, WINDOW_BYTES if most_bytes is None else most_bytes)
            while self._left and self._read_bytes < most:
                group, block, target = self._left.pop()
                size = self._way.block_bytes[group]
                own, other = self._way.pools[group], self._reach.pools[group]
                here.append((own.address + target * size, size, own.device))
                there.append((other.address + block * size, size, other.device))
                self._read_bytes += size
            kinds = self._way.pools[0].kind, self._reach.pools[0].kind
        else:
            assert self._place is not None
            here = [(self._way.numbers_at + self._place * SLOT_BYTES, SLOT_BYTES, 0)]
            slot = self._offer.number % SLOTS
            there = [(self._reach.slots + slot * SLOT_BYTES, SLOT_BYTES, 0)]
        self._handle = self._way.read(self._sender, here, there, kinds)

    def _is_read(self) -> bool:
        state = self._way.agent.check_xfer_state(self._handle)
        if state == "PROC":
            if monotonic() - self._began_s > self._way.timeout_s:
                raise StalledError(
                    f"nothing has come from {self._sender} for {self._way.timeout_s:g} s"
                )
            return False
        self._way.agent.release_xfer_handle(self._handle)
        self._handle = None
        if state != "DONE":
            raise SenderGoneError(f"NIXL: the blocks could not be read ({state})")
        return True

    def _check_stands(self) -> None:
        assert self._place is not None
        if self._way.number_at(self._place) != self._offer.number:
            raise OfferWithdrawnError(
                f"offer {self._offer.number} had been released before it was fetched"
            )
        self._checks += 1

    def abandon(self) -> None:
        """Its places may be given to others now: what is being read is waited for."""
        until = monotonic() + GIVE_UP_S
        while self._handle is not None:
            try:
                reading = self._way.agent.check_xfer_state(self._handle) == "PROC"
                if reading and monotonic() < until:
                    sleep(0.0005)
                    continue
                self._way.agent.release_xfer_handle(self._handle)
            except Exception as error:  # it has ended, with an error
                log.debug("NIXL: %s", error)
            self._handle = None
        if self._place is not None:
            self._way.give_back(self._place)
            self._place = None
        self._left = []
