"""KV blocks over NIXL, between engines on any machines, with RDMA where the hardware supports it.

    sender    registers its pools and its table of offers ── their places ─▶ Address
    receiver  reads the offer's number, then the blocks, then the number again

The receiver's network card reads the sender's memory, without work of the sender's engine. NIXL
uses the links that UCX finds: InfiniBand, RoCE, NVLink, otherwise shared memory or TCP (`UCX_TLS`
and `UCX_NET_DEVICES` override this). NIXL needs the package `nixl`, which needs torch.

An offer's address gives read access to all registered memory of its sender: keep the network of the
engines private.
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
    BlockPairs,
    Blocks,
    Copy,
    Offer,
    OfferWithdrawnError,
    Region,
    SenderGoneError,
    StalledError,
    TransferError,
    Transport,
    TruncatedError,
    UnreachableError,
)

PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")  # the first selects one of the other two
WINDOW_BYTES: Final = 16 << 20  # outstanding reads of one fetch; at least one block
COPIES: Final = 64  # simultaneous copies
GIVE_UP_S: Final = 10.0  # wait for the end of cancelled reads

log = logging.getLogger(__name__)


class Reach(msgspec.Struct, array_like=True, frozen=True):
    """The data that a receiver needs to read a sender's memory."""

    metadata: bytes  # of NIXL
    pools: list[Region]
    slots: int  # address of the table of offers


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reach).decode


def installed() -> str | None:
    """Return the package to import, or None."""
    return next((name for name in PACKAGES if find_spec(name) is not None), None)


def has_rdma() -> bool:
    """Return whether this machine has an RDMA card."""
    cards = Path("/sys/class/infiniband")
    return cards.is_dir() and any(cards.iterdir())


def address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Nixl(Transport):
    """The transport over NIXL."""

    name = "nixl"

    def __init__(
        self,
        blocks: Blocks,
        pools: Sequence[Region],
        shared: SharedPools | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`pools`: the memory of the blocks. `shared`: the table of offers, if other engines can
        fetch from this engine."""
        package = installed()
        if package is None:
            raise ConfigError(
                "kv_transport nixl: the package nixl is not installed; pip install "
                "'twostroke[nixl]', or leave kv_transport out"
            )
        self.pools, self.timeout_s, self.block_bytes = list(pools), timeout_s, blocks.block_bytes
        self._shared = shared
        self._known: dict[str, str] = {}  # known agents and their NIXL names
        self._name = f"twostroke-{secrets.token_hex(8)}"
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            api: Any = importlib.import_module(f"{package}._api")
            self.agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
            for pool in pools:
                self._register(pool)
            # The offer numbers read from the senders, one place per copy.
            self._numbers = mmap.mmap(-1, COPIES * SLOT_BYTES)
            self.numbers_at = address_of(self._numbers)
            self._register(Region(self.numbers_at, COPIES * SLOT_BYTES))
            self._free = list(range(COPIES))
            self._slots_at = 0
            if shared is not None:
                self._slots_at = address_of(shared.slots)
                self._register(Region(self._slots_at, SLOTS * SLOT_BYTES))
        except Exception as error:  # NIXL documents no exception types
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

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
        reach = _decode(address.data)
        if address.endpoint not in self._known:
            try:
                added = self.agent.add_remote_agent(reach.metadata)
            except Exception as error:  # NIXL documents no exception types
                raise UnreachableError(f"NIXL does not reach the sender: {error}") from None
            self._known[address.endpoint] = added.decode() if isinstance(added, bytes) else added
        return _NixlCopy(self, address.endpoint, reach, offer, pairs)

    def read(
        self,
        sender: str,
        here: list[tuple[int, int, int]],
        there: list[tuple[int, int, int]],
        kinds: tuple[str, str],
    ) -> Any:
        """Start to read and return the handle. Each piece is (address, bytes, device), on both
        sides."""
        to, at = (
            self.agent.get_xfer_descs(here, kinds[0]),
            self.agent.get_xfer_descs(there, kinds[1]),
        )
        handle = self.agent.initialize_xfer("READ", to, at, self._known[sender])
        self.agent.transfer(handle)
        return handle

    def take_number(self) -> int:
        """Take a place for the number of an offer."""
        if not self._free:
            raise TransferError(f"{COPIES} fetches are in progress already")
        return self._free.pop()

    def number_at(self, place: int) -> int:
        start = place * SLOT_BYTES
        return int.from_bytes(self._numbers[start : start + SLOT_BYTES], "little")

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def forget(self, sender: str) -> None:
        """Forget a sender that has ended or cannot be reached."""
        name = self._known.pop(sender, None)
        if name is not None:
            try:
                self.agent.remove_remote_agent(name)
            except Exception as error:  # the agent is gone already
                log.debug("NIXL: %s could not be forgotten: %s", sender, error)


class _NixlCopy(Copy):
    """A copy that reads the offer's number, the blocks in pieces, and the number again."""

    def __init__(
        self, transport: Nixl, sender: str, reach: Reach, offer: Offer, pairs: BlockPairs
    ) -> None:
        self._transport, self._sender, self._reach, self._offer = transport, sender, reach, offer
        self._left = [  # group, sender's block, receiver's block; last first
            (group, offer.tables[group][entry], target)
            for group, wanted in enumerate(pairs)
            for entry, target in wanted
        ][::-1]
        for group, there, _ in self._left:
            if (there + 1) * transport.block_bytes[group] > reach.pools[group].num_bytes:
                raise TruncatedError(
                    f"block {there} of group {group} was offered, and the sender's memory has "
                    f"{reach.pools[group].num_bytes} bytes"
                )
        self._place: int | None = transport.take_number()
        self._checks = 0  # passed checks of the number; the second ends the copy
        self._handle: Any = None  # of the current read
        self._read_bytes, self._began_s = 0, 0.0  # of the current read

    def advance(self, max_bytes: int | None) -> bool:
        try:
            done = self._advance(max_bytes)
        except TransferError:
            self.abandon()
            raise
        except Exception as error:  # NIXL documents no exception types
            self._handle = None
            self.abandon()
            self._transport.forget(self._sender)
            raise SenderGoneError(f"NIXL: {error}") from None
        if done:
            self.abandon()
        return done

    def _advance(self, max_bytes: int | None) -> bool:
        start = self.num_bytes
        while self._checks < 2:
            if self._handle is None:
                left = None if max_bytes is None else max_bytes - (self.num_bytes - start)
                if left is not None and left <= 0 and self._left and self._checks:
                    return False
                self._begin(left)
            if not self._is_read():
                return False
            self.num_bytes += self._read_bytes
            if not self._read_bytes:
                self._check_offer()
        return True

    def _begin(self, max_bytes: int | None) -> None:
        here, there = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        self._read_bytes, self._began_s = 0, monotonic()
        kinds = "DRAM", "DRAM"
        if self._checks and self._left:
            limit = min(WINDOW_BYTES, WINDOW_BYTES if max_bytes is None else max_bytes)
            while self._left and self._read_bytes < limit:
                group, block, target = self._left.pop()
                size = self._transport.block_bytes[group]
                own, other = self._transport.pools[group], self._reach.pools[group]
                here.append((own.address + target * size, size, own.device))
                there.append((other.address + block * size, size, other.device))
                self._read_bytes += size
            kinds = self._transport.pools[0].kind, self._reach.pools[0].kind
        else:
            assert self._place is not None
            here = [(self._transport.numbers_at + self._place * SLOT_BYTES, SLOT_BYTES, 0)]
            slot = self._offer.number % SLOTS
            there = [(self._reach.slots + slot * SLOT_BYTES, SLOT_BYTES, 0)]
        self._handle = self._transport.read(self._sender, here, there, kinds)

    def _is_read(self) -> bool:
        state = self._transport.agent.check_xfer_state(self._handle)
        if state == "PROC":
            if monotonic() - self._began_s > self._transport.timeout_s:
                raise StalledError(
                    f"nothing has come from {self._sender} for {self._transport.timeout_s:g} s"
                )
            return False
        self._transport.agent.release_xfer_handle(self._handle)
        self._handle = None
        if state != "DONE":
            raise SenderGoneError(f"NIXL: the blocks could not be read ({state})")
        return True

    def _check_offer(self) -> None:
        assert self._place is not None
        if self._transport.number_at(self._place) != self._offer.number:
            raise OfferWithdrawnError(
                f"offer {self._offer.number} had been released before it was fetched"
            )
        self._checks += 1

    def abandon(self) -> None:
        """Wait for the current read, because the receiver's blocks may be reused afterwards."""
        until = monotonic() + GIVE_UP_S
        while self._handle is not None:
            try:
                reading = self._transport.agent.check_xfer_state(self._handle) == "PROC"
                if reading and monotonic() < until:
                    sleep(0.0005)
                    continue
                self._transport.agent.release_xfer_handle(self._handle)
            except Exception as error:  # the read has ended with an error
                log.debug("NIXL: %s", error)
            self._handle = None
        if self._place is not None:
            self._transport.give_back(self._place)
            self._place = None
        self._left = []
