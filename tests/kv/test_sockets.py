"""KV blocks over ZeroMQ, and everything that may go wrong on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import zmq

from tests.kv.test_transfer import SENDER, fetch, pools
from twostroke.kv import sockets
from twostroke.kv.sockets import BlockHeader, BlockRequest, BlockServer, Sockets
from twostroke.kv.transfer import (
    Address,
    DamagedError,
    HostBlocks,
    KVTransfer,
    Offer,
    OfferWithdrawnError,
    SenderGoneError,
    StalledError,
    TransferError,
    TruncatedError,
    UnreachableError,
)

pytestmark = [
    pytest.mark.core,  # bounds of security
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only"),
]
ALL = [[(0, 1), (1, 2), (2, 3)], [(0, 4), (1, 5), (2, 6)]]


class Engines:
    def __init__(self, **how: Any) -> None:
        found = pools(transport="sockets", **how)
        self.sender, self.receiver, self.sending, self.fetching = found

    def offer(self) -> Offer:
        return self.sending.offer([[3, 5, 1], [4, 7, 2]], 12)

    @property
    def server(self) -> BlockServer:
        (transport,) = self.sending._transports
        assert isinstance(transport, Sockets)
        assert transport._server is not None
        return transport._server

    def assert_all_arrived(self) -> None:
        for group, sources in enumerate(([3, 5, 1], [4, 7, 2])):
            targets = [target for _, target in ALL[group]]
            sent, arrived = self.sender.data[group], self.receiver.data[group]
            assert np.array_equal(sent[sources], arrived[targets])


@pytest.fixture
def made() -> Iterator[list[Engines]]:
    found: list[Engines] = []
    yield found
    for one in found:
        one.fetching.close()
        one.sending.close()


@pytest.fixture
def engines(made: list[Engines]) -> Engines:
    made.append(Engines())
    return made[0]


def test_blocks_of_every_group_arrive_as_they_were_sent(engines: Engines) -> None:
    offer = engines.offer()
    assert [one.transport for one in offer.addresses] == ["sockets"]
    assert fetch(engines.fetching, offer, ALL) == offer.num_bytes
    engines.assert_all_arrived()
    assert not engines.receiver.data[0][[0, 4, 5, 6, 7, 8]].any(), "no other block was written"
    assert fetch(engines.fetching, offer, [[(2, 8)], []]) == engines.sender.data[0][0].nbytes
    assert np.array_equal(engines.receiver.data[0][8], engines.sender.data[0][1])


def test_a_few_blocks_at_a_time_are_on_their_way(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side holds more than the window, and a fetch may take several turns."""
    size = engines.sender.data[0][0].nbytes
    monkeypatch.setattr(sockets, "WINDOW_BYTES", 2 * size)
    asked: list[int] = []
    answer = engines.server.answer

    def counting(peer: bytes, wanted: BlockRequest) -> None:
        asked.append(len(wanted.entries))
        answer(peer, wanted)

    monkeypatch.setattr(engines.server, "answer", counting)
    offer = engines.offer()
    fetching = engines.fetching.fetch(offer, ALL)
    before, until = 0, monotonic() + 60
    while not fetching.advance(1):
        assert fetching.num_bytes - before in (0, *offer.block_bytes), "a block a turn"
        before = fetching.num_bytes
        assert monotonic() < until
        sleep(0.001)
    engines.assert_all_arrived()
    assert sum(asked) == 6
    assert max(asked) <= 3


def test_several_fetches_share_a_connection(engines: Engines) -> None:
    offer = engines.offer()
    (transport,) = engines.fetching._transports
    assert isinstance(transport, Sockets)
    both = [engines.fetching.fetch(offer, ALL) for _ in range(2)]
    assert len(transport._peers) == 1
    until = monotonic() + 60
    while both:
        both = [one for one in both if not one.advance()]
        assert monotonic() < until
    engines.assert_all_arrived()
    assert not any(peer.copies for peer in transport._peers.values()), "nothing is left of them"


def test_an_idle_connection_is_closed_only_to_make_room_for_another(
    made: list[Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_PEERS", 1)
    made.append(Engines())
    (transport,) = made[0].fetching._transports
    assert isinstance(transport, Sockets)
    first = transport._peer("tcp://127.0.0.1:1")
    assert transport._peer("tcp://127.0.0.1:1") is first
    second = transport._peer("tcp://127.0.0.1:2")
    assert list(transport._peers.values()) == [second]


def test_a_released_offer_is_refused(engines: Engines) -> None:
    offer = engines.offer()
    engines.sending.release(offer.number)
    with pytest.raises(OfferWithdrawnError):
        fetch(engines.fetching, offer, ALL)
    fetch(engines.fetching, engines.offer(), ALL)
    engines.assert_all_arrived()


def test_one_released_while_it_is_read_is_refused(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, blocks = engines.offer(), engines.server._blocks
    read = blocks.read

    def slow(group: int, number: int) -> bytes:
        engines.sending.release(offer.number)
        return read(group, number)

    monkeypatch.setattr(blocks, "read", slow)
    with pytest.raises(OfferWithdrawnError):
        fetch(engines.fetching, offer, ALL)


Send = Callable[[bytes, BlockHeader, bytes], None]


def truncate(send: Send, *block: Any) -> None:
    peer, sent, data = block
    send(peer, sent, data[:-3])


def damage(send: Send, *block: Any) -> None:
    peer, sent, data = block
    send(peer, sent, bytes([data[0] ^ 1]) + data[1:])


def withhold(send: Send, *block: Any) -> None: ...


@pytest.mark.parametrize(
    ("harm", "error"),
    [(truncate, TruncatedError), (damage, DamagedError), (withhold, StalledError)],
)
def test_what_arrives_wrong_or_not_at_all_has_a_name(
    harm: Callable[..., None],
    error: type[TransferError],
    made: list[Engines],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made.append(Engines(checked=True))
    (engines,) = made
    (transport,) = engines.fetching._transports
    assert isinstance(transport, Sockets)
    transport._timeout_s = 20 if harm is not withhold else 0.2
    send = engines.server.send
    monkeypatch.setattr(engines.server, "send", lambda *block: harm(send, *block))
    with pytest.raises(error):
        fetch(engines.fetching, engines.offer(), ALL)
    monkeypatch.undo()
    fetch(engines.fetching, engines.offer(), ALL)  # the connection is as good as before
    engines.assert_all_arrived()


def test_the_order_in_which_blocks_come_does_not_matter(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, held = engines.server, []
    send = server.send

    def reversed_order(*block: Any) -> None:
        held.append(block)
        if len(held) == 6:
            for one in held[::-1]:
                send(*one)
                send(*one)  # and twice

    monkeypatch.setattr(server, "send", reversed_order)
    offer = engines.offer()
    assert fetch(engines.fetching, offer, ALL) == offer.num_bytes
    engines.assert_all_arrived()


def test_only_who_knows_the_key_is_sent_anything(engines: Engines) -> None:
    offer = engines.offer()
    (address,) = offer.addresses
    (transport,) = engines.fetching._transports
    assert isinstance(transport, Sockets)
    transport._timeout_s = 0.2
    stranger = offer._replace(addresses=(address._replace(data=b"?" * 16),))
    with pytest.raises(StalledError):
        fetch(engines.fetching, stranger, ALL)
    with pytest.raises(StalledError):  # nor blocks that the offer does not have
        fetch(engines.fetching, offer._replace(tables=((3,) * 9, (4,) * 9)), [[(8, 1)], []])
    fetch(engines.fetching, offer, ALL)
    engines.assert_all_arrived()


def test_an_abandoned_fetch_writes_nothing_more(engines: Engines) -> None:
    offer = engines.offer()
    engines.fetching.fetch(offer, ALL).abandon()
    sleep(0.05)
    fetch(engines.fetching, offer, [[(0, 8)], []])
    assert not engines.receiver.data[0][1:7].any()


def test_a_sender_that_dies_is_noticed_at_once() -> None:
    own = memoryview(bytearray(64 * 9))
    blocks = HostBlocks([own], [64], 4)
    transfer = KVTransfer(blocks, [Sockets(blocks, timeout_s=600)])
    with subprocess.Popen(
        [sys.executable, "-c", SENDER.replace("TRANSPORT", "sockets")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        offer = Offer(*eval(process.stdout.readline(), {"Address": Address}))
        assert fetch(transfer, offer, [[(0, 1), (1, 2)]]) == 128
        assert own[64:192].tobytes() == (bytes(range(1, 10)) * 64)[128:256]
        process.kill()
    with pytest.raises(SenderGoneError, match="has broken"):
        fetch(transfer, offer, [[(0, 1)]])
    with pytest.raises(SenderGoneError, match="has broken"):  # nobody listens there any more
        fetch(transfer, offer, [[(0, 1)]])
    transfer.close()


@pytest.fixture
def stranger(made: list[Engines]) -> Iterator[zmq.Socket[Any]]:
    """A connection of a program without the secret of the engines' server."""
    made.append(Engines(secret="the secret of one server's engines"))
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(made[0].server.endpoint)
    yield socket
    context.destroy(linger=0)


def test_a_stranger_is_not_heard_and_engines_with_the_secret_are(
    stranger: zmq.Socket[Any], made: list[Engines]
) -> None:
    (engines,) = made
    monitor = stranger.get_monitor_socket(sockets.BROKEN)
    for _ in range(64):  # of one message that does not end
        stranger.send(bytes(60_000), zmq.SNDMORE)
    assert monitor.poll(30_000), "the connection was refused"
    offer = engines.offer()
    assert fetch(engines.fetching, offer, ALL) == offer.num_bytes
    engines.assert_all_arrived()
    assert engines.server.num_dropped == 0, "nothing of it was taken in"


def test_blocks_larger_than_any_request_come_encrypted(made: list[Engines]) -> None:
    made.append(Engines(secret="the secret of one server's engines", block_size=1024))
    offer = made[0].offer()
    assert min(offer.block_bytes) > sockets.MAX_MESSAGE_BYTES
    assert fetch(made[0].fetching, offer, ALL) == offer.num_bytes
    made[0].assert_all_arrived()


def test_what_is_no_request_for_blocks_is_dropped_and_counted(engines: Engines) -> None:
    offer, server = engines.offer(), engines.server
    good = sockets._encode(BlockRequest(server.key, 1, offer.number, [(0, 0)]))
    bad = [
        [b"\xc1"],
        [b""],
        [good[:-1] + b"\x91" * 50_000],  # deeper than a decoder goes
        [b"", good],  # in parts
        [good] * 1000,
        [sockets._encode(BlockRequest(b"another key", 1, offer.number, [(0, 0)]))],
        [sockets._encode(BlockRequest(server.key, 1, offer.number, [(0, 0)] * 257))],
    ]
    context: zmq.Context[Any] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(server.endpoint)
    for frames in bad:
        peer.send_multipart(frames)
    peer.send(good)
    assert peer.poll(30_000)
    assert len(peer.recv_multipart()) == 2
    assert server.dropped == {"unreadable": len(bad) - 1, "wrong_key": 1, "endless": 0}
    context.destroy(linger=0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
PART = b"\x03" + (60_000).to_bytes(8, "big") + bytes(60_000)  # another part follows


@pytest.mark.skipif(sys.platform != "linux", reason="reads the bytes of a connection")
def test_a_message_without_an_end_closes_its_connection_and_no_other(
    engines: Engines,
) -> None:
    """ZeroMQ itself would keep all parts in memory. The peer writes to the connection itself,
    because ZeroMQ sends no message before its end."""
    server, offer = engines.server, engines.offer()
    assert fetch(engines.fetching, offer, ALL) == offer.num_bytes
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        answer = b""
        while b"ROUTER" not in answer:
            answer += peer.recv(1024)
        sent = 0
        peer.settimeout(5)  # a peer may not learn of the end while the server's buffer is full
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 4 << 30:
                peer.sendall(PART)
                sent += len(PART)
    assert sockets.MAX_UNFINISHED_BYTES < sent + len(PART) < 4 << 30
    while not server.dropped["endless"]:
        sleep(0.01)
    assert fetch(engines.fetching, offer, ALL) == offer.num_bytes, "another connection"
    assert server.dropped == {"unreadable": 0, "wrong_key": 0, "endless": 1}


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    blocks = HostBlocks([memoryview(bytearray(64))], [64], 4)
    with pytest.raises(TransferError, match=r"cannot be offered at '192\.0\.2\.1'"):
        BlockServer(blocks, "192.0.2.1")


def test_an_engine_that_has_one_way_says_which_ones_it_would_need(engines: Engines) -> None:
    _, _, _, by_memory = pools()
    with pytest.raises(UnreachableError, match=r"sockets at tcp://.*this engine supports memory"):
        by_memory.fetch(engines.offer(), ALL)
