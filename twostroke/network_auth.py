"""Sockets between engines that only processes with a shared secret can use: ZeroMQ's CURVE.

The key pair of every listening socket comes from the secret. A peer needs the public key to say its
first word, and no socket tells it: without the secret a peer gets no further than the handshake,
whose messages are small, and none of its messages reaches a queue. All that follows is encrypted
and authenticated by libsodium.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85

from twostroke.errors import ConfigError

SECRET: Final = "TWOSTROKE_ENGINE_SECRET"
SECRET_FILE: Final = "TWOSTROKE_ENGINE_SECRET_FILE"
MIN_CHARS: Final = 32
CURVE_BYTES: Final = 64  # more than encryption adds to a part of a message
# Of a part of a message between a server and an engine of its network. The largest ones hold the
# log-probabilities of a long prompt.
MAX_PART_BYTES: Final = 256 << 20
# Raised by a decoder for bytes that are no message of ours.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def engine_secret() -> str:
    """The secret of one server's engines: from the environment, from a file that it names, or by
    chance."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this installation's pyzmq has no CURVE, which engines on a network need; install "
            "pyzmq from PyPI (`pip install --force-reinstall pyzmq`)"
        )
    secret, path = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if secret is None and path is not None:
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{SECRET_FILE}: {path} cannot be read ({error})") from None
    if secret is None:
        return secrets.token_hex(32)
    if len(secret) < MIN_CHARS:
        raise ConfigError(
            f"{SECRET} has {len(secret)} characters, and at least {MIN_CHARS} are needed; make one "
            "with `openssl rand -hex 32`"
        )
    return secret


def protect_listener(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Before `bind`: take messages of peers that have the secret alone, and no part of a message
    beyond the socket's limit, or `MAX_PART_BYTES` without one. None: of every peer."""
    if secret is not None:
        if socket.getsockopt(zmq.MAXMSGSIZE) == -1:  # none is set
            socket.maxmsgsize = MAX_PART_BYTES
        socket.curve_secretkey = _listeners_key(secret)
        socket.curve_server = True


def protect_connector(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Before `connect`: talk to a listener that has the secret."""
    if secret is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(_listeners_key(secret))


def receive_parts(socket: zmq.Socket[Any], most: int, flags: int = 0) -> list[zmq.Frame] | None:
    """Receive a message. None: it had more than `most` parts, of which no more were kept."""
    parts: list[zmq.Frame] = []
    count, more = 0, True
    while more:
        part = socket.recv(0 if count else flags, copy=False)
        more = bool(socket.getsockopt(zmq.RCVMORE))
        count += 1
        if count <= most:
            parts.append(part)
    return parts if count <= most else None


def _listeners_key(secret: str) -> bytes:
    return z85.encode(hashlib.sha256(b"twostroke engines\0" + secret.encode()).digest())


def is_power_of_2(count: int) -> bool:
    """When a count of dropped messages is logged: often at first, then ever more seldom."""
    return count & (count - 1) == 0
