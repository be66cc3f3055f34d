"""`TransportConfig`, and the transports of an engine with these settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from twostroke.errors import ConfigError
from twostroke.kv.transfer import TIMEOUT_S, Blocks, HostBlocks, KVTransfer, Region, Transport

if TYPE_CHECKING:  # these modules need packages that a single engine does not have
    from twostroke.kv.shared_memory import SharedPools
    from twostroke.kv.sockets import Sockets

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


class TransportConfig(NamedTuple):
    """Settings for offering KV blocks and for fetching blocks of other engines."""

    offers: str = "none"  # shared: others may fetch; checked: with checksums
    transport: str = "auto"  # auto (the best), memory, device, nixl or sockets
    host: str | None = None  # address for engines on other machines; None: no others
    timeout_s: float = TIMEOUT_S  # without any data
    alone: bool = False  # no other engine exists
    receives: bool = False  # blocks of other engines will arrive
    secret: str | None = None  # shared by the engines' sockets; None: accept any peer

    @property
    def offered(self) -> bool:
        return self.offers != "none"

    def allows(self, name: str) -> bool:
        return self.transport in ("auto", name)


NOT_OFFERED = TransportConfig()


def host_transfer(
    blocks: HostBlocks, shared: SharedPools | None, config: TransportConfig
) -> KVTransfer:
    """Return the transfer endpoint of blocks in host memory. `shared`: the memory of offered
    blocks."""
    from twostroke.kv.shared_memory import SharedMemory

    transports: list[Transport] = []
    if config.allows("memory"):
        transports.append(SharedMemory(blocks, shared))
    transports += nixl(blocks, blocks.regions(), shared, config)
    if config.allows("sockets"):
        transports.append(sockets(blocks, config))
    to_prepare = blocks if config.receives else None
    return KVTransfer(blocks, transports, shared, config.offers == "checked", to_prepare)


def nixl(
    blocks: Blocks, pools: Sequence[Region], shared: SharedPools | None, config: TransportConfig
) -> list[Transport]:
    """Return the NIXL transport if it is requested, or if other machines are configured and this
    machine has an RDMA card."""
    if config.transport != "nixl" and not (config.transport == "auto" and config.host):
        return []
    from twostroke.kv.nixl import Nixl, has_rdma, installed

    if config.transport == "auto" and not (has_rdma() and installed()):
        return []
    try:
        return [Nixl(blocks, pools, shared, config.timeout_s)]
    except ConfigError as error:
        if config.transport == "nixl":
            raise
        log.warning("%s", error)
        return []


def sockets(blocks: Blocks, config: TransportConfig, always: bool = False) -> Sockets:
    """Return the socket transport. `always`: offer it on this machine, too, as a fallback."""
    from twostroke.kv.sockets import BlockServer, Sockets

    host = config.host or (LOOPBACK if always or config.transport == "sockets" else None)
    server = BlockServer(blocks, host, config.secret) if config.offered and host else None
    return Sockets(blocks, server, config.timeout_s, config.secret)
