"""A builder for `RoutedEngine` whose engines damage KV blocks during transfer. The file named by
`FAULT_FILE` has one of `FAULTS` and a number; it is read for every block."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep
from typing import Any

from twostroke.config import EngineConfig
from twostroke.engine.build import Engine, build_core_engine
from twostroke.kv.sockets import BlockHeader, BlockRequest, BlockServer
from twostroke.kv.transfer import KVTransfer, Offer

BUILDER = "tests.server.engines.faulty_transfer:build"
FAULT_FILE = "TWOSTROKE_TEST_FAULT_FILE"
FAULTS = ("none", "truncated", "delayed", "reordered", "corrupted")


def fault() -> tuple[str, float]:
    name, value = Path(os.environ[FAULT_FILE]).read_text().split()
    assert name in FAULTS
    return name, float(value)


class FaultyServer(BlockServer):
    """A socket transport that sends damaged bytes."""

    def answer(self, peer: bytes, wanted: BlockRequest) -> None:
        self._held: list[tuple[bytes, BlockHeader, bytes]] = []
        super().answer(peer, wanted)
        for one in reversed(self._held):
            super().send(*one)

    def send(self, peer: bytes, sent: BlockHeader, data: bytes) -> None:
        name, value = fault()
        if name == "delayed":
            sleep(value)
        if name == "reordered":
            self._held.append((peer, sent, data))
        elif name == "truncated":
            super().send(peer, sent, data[: len(data) // 2])
        elif name == "corrupted":
            super().send(peer, sent, data[:-1] + bytes([data[-1] ^ 4]))
        else:
            super().send(peer, sent, data)


class FaultyTransfer(KVTransfer):
    """A shared-memory transport with damaged blocks, or with a table that points beyond them."""

    def offer(self, *what: Any) -> Offer:
        offer = super().offer(*what)
        name = fault()[0]
        if name == "truncated":
            return offer._replace(tables=tuple((*table[:-1], 10**6) for table in offer.tables))
        if name == "corrupted":
            block = offer.tables[0][0]
            data = self._blocks.read(0, block)
            self._blocks.write(0, block, data[:-1] + bytes([data[-1] ^ 4]))
        return offer


def build(config: EngineConfig) -> Engine:
    engine = build_core_engine(config)
    transfer = engine.core.scheduler.offers.transfer
    assert transfer is not None
    if config.kv_transport == "sockets":
        for transport in transfer._transports:
            server = getattr(transport, "_server", None)
            if server is not None:  # its thread looks its methods up for every message
                server.__class__ = FaultyServer
    else:
        transfer.__class__ = FaultyTransfer
    return engine
