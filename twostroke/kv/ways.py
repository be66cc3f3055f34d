"""The ways that an engine has: `Sharing` says which, from the settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from twostroke.errors import ConfigError
from twostroke.kv.transfer import TIMEOUT_S, Blocks, HostBlocks, KVTransfer, Region, Way

if TYPE_CHECKING:  # they need packages that an engine alone does without
    from twostroke.kv.shared_memory import SharedPools
    from twostroke.kv.sockets import Sockets

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


class Sharing(NamedTuple):
    """How an engine's blocks can be fetched, and how it fetches those of others."""

    offers: str = "none"  # shared: others may fetch; checked: and compare checksums
    transport: str = "auto"  # auto: whichever way is best; memory, device, nixl, sockets: this
    host: str | None = None  # address for engines on other machines; None: there are none
    timeout_s: float = TIMEOUT_S  # in which nothing has come
    alone: bool = False  # there is no other engine
    receives: bool = False  # other engines' blocks will come
    secret: str | None = None  # that sockets of the engines share; None: they take any peer

    @property
    def offered(self) -> bool:
        return self.offers != "none"

    def allows(self, way: str) -> bool:
        return self.transport in ("auto", way)


NOT_SHARED = Sharing()


def host_transfer(blocks: HostBlocks, shared: SharedPools | None, sharing: Sharing) -> KVTransfer:
    """Of blocks in this process's memory. `shared`: where they are, if they are offered."""
    from twostroke.kv.shared_memory import SharedMemory

    ways: list[Way] = []
    if sharing.allows("memory"):
        ways.append(SharedMemory(blocks, shared))
    ways += nixl(blocks, blocks.regions(), shared, sharing)
    if sharing.allows("sockets"):
        ways.append(sockets(blocks, sharing))
    untouched = blocks if sharing.receives else None
    return KVTransfer(blocks, ways, shared, sharing.offers == "checked", untouched)


def nixl(
    blocks: Blocks, pools: Sequence[Region], shared: SharedPools | None, sharing: Sharing
) -> list[Way]:
    """Where it is asked for, or other machines are reached and this one has a card for it."""
    if sharing.transport != "nixl" and not (sharing.transport == "auto" and sharing.host):
        return []
    from twostroke.kv.nixl import Nixl, has_rdma, installed

    if sharing.transport == "auto" and not (has_rdma() and installed()):
        return []
    try:
        return [Nixl(blocks, pools, shared, sharing.timeout_s)]
    except ConfigError as error:
        if sharing.transport == "nixl":
            raise
        log.warning("%s", error)
        return []


def sockets(blocks: Blocks, sharing: Sharing, always: bool = False) -> Sockets:
    """`always`: offered on this machine, too, where another way may fail."""
    from twostroke.kv.sockets import BlockServer, Sockets

    host = sharing.host or (LOOPBACK if always or sharing.transport == "sockets" else None)
    server = BlockServer(blocks, host, sharing.secret) if sharing.offered and host else None
    return Sockets(blocks, server, sharing.timeout_s, sharing.secret)
