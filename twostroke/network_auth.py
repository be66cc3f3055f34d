"""Authentication of the sockets between engines on a network, with ZeroMQ's CURVE.

The key pair of every listening socket is derived from a shared secret. A peer needs the public key
for the handshake, and no socket sends the key. So a peer without the secret cannot complete the
handshake, and none of its messages reaches a queue. After the handshake libsodium encrypts and
authenticates all messages.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85

from twostroke import environment
from twostroke.errors import ConfigError

MIN_CHARS: Final = 32
CURVE_BYTES: Final = 64  # more than encryption adds to a part of a message
# The maximum size of a part of a message between a server and an engine on its network. The
# log-probabilities of a long prompt are the largest parts.
MAX_PART_BYTES: Final = 256 << 20
# The maximum number of bytes of an incomplete message between a server and an engine.
MAX_UNFINISHED_BYTES: Final = 4 * MAX_PART_BYTES
# Reasons for which messages are dropped, as in the metrics: the bytes cannot be decoded, the
# message lacks the server's key, the message does not end.
UNREADABLE_MESSAGE, WRONG_KEY, ENDLESS_MESSAGE = REASONS = ("unreadable", "wrong_key", "endless")
# A decoder raises one of these for bytes that cannot be decoded.
DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def engine_secret() -> str:
    """Return the secret of a server's engines: from the environment, from a file that the
    environment names, or a random one."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this installation's pyzmq has no CURVE, which engines on a network need; install "
            "pyzmq from PyPI (`pip install --force-reinstall pyzmq`)"
        )
    secret, path = environment.engine_secret(), environment.engine_secret_file()
    if secret is None and path is not None:
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{environment.ENGINE_SECRET_FILE}: {path} cannot be read ({error})"
            ) from None
    if secret is None:
        return secrets.token_hex(32)
    if len(secret) < MIN_CHARS:
        raise ConfigError(
            f"{environment.ENGINE_SECRET} has {len(secret)} characters, and at least {MIN_CHARS} "
            "are needed; make one with `openssl rand -hex 32`"
        )
    return secret


def protect_listener(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Prepare a socket before `bind`. The socket then accepts messages only from peers with the
    secret, and no part of a message above the socket's limit (`MAX_PART_BYTES`, unless another is
    set). Without a secret the socket accepts every peer."""
    if secret is not None:
        if socket.getsockopt(zmq.MAXMSGSIZE) == -1:  # not set
            socket.maxmsgsize = MAX_PART_BYTES
        socket.curve_secretkey = _listener_key(secret)
        socket.curve_server = True


def protect_connector(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Prepare a socket before `connect` to a listener with the secret."""
    if secret is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(_listener_key(secret))


def receive_parts(socket: zmq.Socket[Any], max_parts: int, flags: int = 0) -> list[zmq.Frame]:
    """Receive a message. Return at most `max_parts + 1` of its parts, so that the caller can see
    that it has too many."""
    parts: list[zmq.Frame] = []
    count, more = 0, True
    while more:
        part = socket.recv(0 if count else flags, copy=False)
        more = bool(socket.getsockopt(zmq.RCVMORE))
        count += 1
        if count <= max_parts + 1:
            parts.append(part)
    return parts


def _listener_key(secret: str) -> bytes:
    return z85.encode(hashlib.sha256(b"twostroke engines\0" + secret.encode()).digest())


def add_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums by reason."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def is_power_of_2(count: int) -> bool:
    """Return whether a count is a power of 2. Only such counts of dropped messages are logged."""
    return count & (count - 1) == 0
