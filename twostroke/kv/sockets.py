"""KV blocks over ZeroMQ, between engines on any machines.

    receiver  BlockRequest: key, fetch, offer, entries ──▶  a thread of the sender, while steps run
              writes each block to its place           ◀──  BlockHeader: fetch, group, entry │ bytes

The receiver requests a few blocks at a time (`WINDOW_BYTES`), which limits the memory of both
sides, and requests more as blocks arrive. Every message names its block, so the order does not
matter. A sender sends only blocks of valid offers, and only to receivers that know its key, which
is part of its offers. Engines of one server share a secret, without which every message is rejected
(`network_auth.py`). A receiver gives up after `timeout_s` without data, or when the connection
breaks.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from functools import partial
from time import monotonic

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from twostroke.connection_watch import ConnectionWatch, bytes_received
from twostroke.kv.transfer import (
    TIMEOUT_S,
    Address,
    BlockPairs,
    Blocks,
    Copy,
    Offer,
    OfferWithdrawnError,
    SenderGoneError,
    StalledError,
    TransferError,
    Transport,
    TruncatedError,
)
from twostroke.network_auth import (
    CURVE_BYTES,
    DECODE_ERRORS,
    ENDLESS_MESSAGE,
    REASONS,
    UNREADABLE_MESSAGE,
    WRONG_KEY,
    is_power_of_2,
    protect_connector,
    protect_listener,
    receive_parts,
)

WINDOW_BYTES = 16 << 20  # outstanding requests of one fetch; at least one block
MAX_REQUESTED = 256  # blocks in one message
QUEUED_BYTES = 8 * WINDOW_BYTES  # for a receiver that does not read; more is dropped
MAX_QUEUED = 4096  # messages to a sender
MAX_MESSAGE_BYTES = 64 << 10  # of a request, and of the header of a block
MAX_UNFINISHED_BYTES = 4 << 20  # of requests, after the last whole request of a connection
MAX_PEERS = 64  # open connections
BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
BROKEN |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

log = logging.getLogger(__name__)


class BlockRequest(msgspec.Struct, array_like=True, frozen=True):
    key: bytes
    fetch: int
    offer: int
    entries: list[tuple[int, int]]  # group, and index in its table


class BlockHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a block. The block follows in a separate frame, empty for a withdrawn offer."""

    fetch: int
    group: int
    entry: int
    withdrawn: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(BlockRequest).decode
_decode_header = msgspec.msgpack.Decoder(BlockHeader).decode


class BlockServer:
    """A thread that sends blocks to receivers."""

    def __init__(self, blocks: Blocks, host: str, secret: str | None = None) -> None:
        """`host`: the address at which other engines reach this machine. `secret`: of the engines;
        None: accept every peer, for tests."""
        self._blocks = blocks
        self._tables: dict[int, tuple[tuple[int, ...], ...]] = {}  # tables of valid offers
        self.key = secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES + CURVE_BYTES
        self._socket.sndhwm = max(16, QUEUED_BYTES // max(blocks.block_bytes))
        self._socket.rcvhwm = MAX_QUEUED
        # Sending to a receiver that does not read fails instead of waiting.
        self._socket.router_mandatory = True
        self._socket.ipv6 = ":" in host
        protect_listener(self._socket, secret)
        self.dropped = dict.fromkeys(REASONS, 0)  # rejected messages by reason
        try:
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise TransferError(
                f"KV blocks cannot be offered at {host!r} ({error}); name an address of this "
                "machine that the other engines reach"
            ) from None
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.rstrip(b"\0").decode()
        endless = partial(self._drop, ENDLESS_MESSAGE)
        self._watch = ConnectionWatch(self._socket, MAX_UNFINISHED_BYTES, endless)
        self._thread = threading.Thread(target=self._run, name="twostroke-kv", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def open_offer(self, offer: Offer) -> None:
        self._tables[offer.number] = offer.tables

    def close_offer(self, number: int) -> None:
        self._tables.pop(number, None)

    def close(self) -> None:
        self._context.term()  # ends the thread
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                parts = receive_parts(self._socket, max_parts=2)
            except zmq.ContextTerminated:
                self._socket.close()
                return
            self._watch.message_received(parts[0])
            wanted = self._read(parts)
            if wanted is None:
                continue
            try:
                self.answer(parts[0].bytes, wanted)
            except Exception:  # an unanswerable message must not stop other answers
                log.exception("KV blocks could not be sent")

    def _read(self, parts: list[zmq.Frame]) -> BlockRequest | None:
        """Return the request of a message; None if the message is invalid and was counted."""
        try:
            if len(parts) != 2:
                raise ValueError("a request has one part, after the name of its sender")
            wanted = _decode_request(parts[1].buffer)
            if len(wanted.entries) > MAX_REQUESTED:
                raise ValueError("too many blocks")
        except DECODE_ERRORS:
            self._drop(UNREADABLE_MESSAGE)
            return None
        if not secrets.compare_digest(wanted.key, self.key):
            self._drop(WRONG_KEY)
            return None
        return wanted

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if is_power_of_2(self.num_dropped):
            log.warning(
                "%d messages to the server of KV blocks were dropped: they were not requests for "
                "blocks, lacked the server's key, or did not end",
                self.num_dropped,
            )

    def answer(self, peer: bytes, wanted: BlockRequest) -> None:
        for group, entry in wanted.entries:
            tables = self._tables.get(wanted.offer)
            data = b""
            if tables is not None:
                if not (0 <= group < len(tables) and 0 <= entry < len(tables[group])):
                    continue
                data = self._blocks.read(group, tables[group][entry])
            # A block that was released while it was read may have been overwritten.
            withdrawn = wanted.offer not in self._tables
            self.send(
                peer, BlockHeader(wanted.fetch, group, entry, withdrawn), b"" if withdrawn else data
            )
            if withdrawn:
                return

    def send(self, peer: bytes, sent: BlockHeader, data: bytes) -> None:
        # A receiver that is gone or does not read gets nothing, and computes the tokens itself.
        with contextlib.suppress(zmq.ZMQError):
            frames = [peer, _encode(sent), data]
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(data) < MAX_MESSAGE_BYTES)


class Sockets(Transport):
    """The transport over ZeroMQ."""

    name = "sockets"

    def __init__(
        self,
        blocks: Blocks,
        server: BlockServer | None = None,
        timeout_s: float = TIMEOUT_S,
        secret: str | None = None,
    ) -> None:
        """`server`: of an engine that offers blocks. `secret`: as for `BlockServer`."""
        self._blocks, self._server, self._timeout_s = blocks, server, timeout_s
        self._secret = secret
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._peers: dict[str, _Peer] = {}  # by endpoint; the last used peer is at the end
        self._next = 0

    def address(self) -> Address | None:
        if self._server is None:
            return None
        return Address(self.name, "", self._server.endpoint, self._server.key)

    def open_offer(self, offer: Offer) -> None:
        if self._server is not None:
            self._server.open_offer(offer)

    def close_offer(self, number: int) -> None:
        if self._server is not None:
            self._server.close_offer(number)

    def dropped(self) -> dict[str, int]:
        return {} if self._server is None else dict(self._server.dropped)

    def tidy(self) -> None:
        for peer in self._peers.values():
            peer.check()

    def reaches(self, address: Address) -> bool:
        return True

    def begin(self, address: Address, offer: Offer, pairs: BlockPairs) -> Copy:
        self._next += 1
        peer = self._peer(address.endpoint)
        copy = _SocketCopy(
            self._blocks, peer, self._next, address.data, offer, pairs, self._timeout_s
        )
        peer.copies[self._next] = copy
        return copy

    def _peer(self, endpoint: str) -> _Peer:
        for at in [at for at, peer in self._peers.items() if peer.problem is not None]:
            self._peers.pop(at).close()
        others = {at: peer for at, peer in self._peers.items() if at != endpoint}
        idle = [at for at, peer in others.items() if not peer.copies]
        for at in idle[: max(0, len(others) - MAX_PEERS + 1)]:
            self._peers.pop(at).close()
        self._context = self._context or zmq.Context()
        peer = self._peers.pop(endpoint, None) or _Peer(
            self._context, endpoint, max(self._blocks.block_bytes), self._secret
        )
        self._peers[endpoint] = peer
        return peer

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._context is not None:
            self._context.term()
        if self._server is not None:
            self._server.close()


class _Peer:
    """The connection to one sender."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        largest_bytes: int,
        secret: str | None,
    ) -> None:
        self.endpoint = endpoint
        self.problem: TransferError | None = None  # set when the connection is unusable
        self.copies: dict[int, _SocketCopy] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = max(largest_bytes, MAX_MESSAGE_BYTES) + CURVE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = MAX_QUEUED
        self._socket.ipv6 = "[" in endpoint
        protect_connector(self._socket, secret)
        self._monitor = self._socket.get_monitor_socket(BROKEN | zmq.EVENT_CONNECTED)
        self._file: int | None = None  # of the connection
        self._whole_bytes = 0  # bytes received up to the last whole message
        self._max_bytes = 4 * QUEUED_BYTES + largest_bytes
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def send_request(self, wanted: BlockRequest) -> bool:
        if self.problem is not None:
            return False
        try:
            self._socket.send(_encode(wanted), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self, max_bytes: int | None) -> bool:
        """Receive messages for all fetches. Return whether no message is left."""
        taken, any_whole = 0, False
        while self.problem is None and (max_bytes is None or taken < max_bytes):
            try:
                parts = receive_parts(self._socket, 2, zmq.NOBLOCK)
            except zmq.Again:
                self._note_whole(any_whole)
                self.check()
                return True
            any_whole = True
            try:
                if len(parts) != 2:
                    raise ValueError("a block message must have two frames")
                sent, data = _decode_header(parts[0].buffer), parts[1].buffer
            except DECODE_ERRORS:
                self.problem = TransferError(f"{self.endpoint} has sent an invalid message")
                break
            taken += len(data)
            if sent.fetch in self.copies:
                self.copies[sent.fetch].take(sent, data)
        self._note_whole(any_whole)
        return self.problem is not None

    def _note_whole(self, received: bool) -> None:
        if received and self._file is not None:
            self._whole_bytes = bytes_received(self._file) or 0

    def check(self) -> None:
        """Set `problem` if the connection has broken, or if it receives an endless message."""
        while self.problem is None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_CONNECTED:
                self._file = int(event["value"])
            else:
                self.problem = SenderGoneError(f"the connection to {self.endpoint} has broken")
        if self.problem is not None or self._file is None:
            return
        if (bytes_received(self._file) or 0) - self._whole_bytes > self._max_bytes:
            self.problem = TransferError(f"{self.endpoint} sends a message without an end")
            self._socket.disconnect(self.endpoint)


class _SocketCopy(Copy):
    def __init__(
        self,
        blocks: Blocks,
        peer: _Peer,
        fetch: int,
        key: bytes,
        offer: Offer,
        pairs: BlockPairs,
        timeout_s: float,
    ) -> None:
        self._blocks, self._peer, self._fetch, self._key = blocks, peer, fetch, key
        self._offer, self._timeout_s = offer, timeout_s
        self._targets = {
            (group, entry): target for group, wanted in enumerate(pairs) for entry, target in wanted
        }
        self._to_request = list(self._targets)[::-1]  # last first
        self._awaited_bytes = 0
        self._problem: TransferError | None = None
        self._last_data_s = monotonic()

    def take(self, sent: BlockHeader, data: memoryview) -> None:
        """Receive a block."""
        target = self._targets.get((sent.group, sent.entry))
        if target is None or self._problem is not None:
            return  # received before, or the copy has failed
        size = self._offer.block_bytes[sent.group]
        if sent.withdrawn:
            self._problem = OfferWithdrawnError(
                f"offer {self._offer.number} had been released before it was fetched"
            )
        elif len(data) != size:
            self._problem = TruncatedError(
                f"entry {sent.entry} of group {sent.group} has arrived with {len(data)} bytes, "
                f"but a block has {size}"
            )
        else:
            self._blocks.write(sent.group, target, data)
            del self._targets[sent.group, sent.entry]
            self._awaited_bytes -= size
            self.num_bytes += size
            self._last_data_s = monotonic()

    def advance(self, max_bytes: int | None) -> bool:
        peer = self._peer
        self._request_more()
        took_all = peer.take(max_bytes)
        self._request_more()
        if self._problem is None and self._targets:
            if peer.problem is not None:
                self._problem = peer.problem
            elif took_all and monotonic() - self._last_data_s > self._timeout_s:
                self._problem = StalledError(
                    f"nothing has come from {peer.endpoint} for {self._timeout_s:g} s, and "
                    f"{len(self._targets)} blocks are missing"
                )
        if self._problem is not None:
            self.abandon()
            raise self._problem
        if self._targets:
            return False
        self.abandon()  # messages that are still on their way are ignored
        return True

    def _request_more(self) -> None:
        """Fill the window with requests, in few messages."""
        if 2 * self._awaited_bytes > WINDOW_BYTES:
            return
        entries: list[tuple[int, int]] = []
        awaited = self._awaited_bytes
        while self._to_request and awaited < WINDOW_BYTES and len(entries) < MAX_REQUESTED:
            entries.append(self._to_request.pop())
            awaited += self._offer.block_bytes[entries[-1][0]]
        wanted = BlockRequest(self._key, self._fetch, self._offer.number, entries)
        if entries and self._peer.send_request(wanted):
            self._awaited_bytes = awaited
        else:
            self._to_request += entries[::-1]

    def abandon(self) -> None:
        self._peer.copies.pop(self._fetch, None)
