"""`ConnectionWatch`: closes connections that send an endless message.

ZeroMQ delivers a message when its last part has arrived. ZeroMQ limits the bytes of a part, but not
the number of parts, so a peer that knows the secret could fill the memory with one message. The
watch counts the bytes that a connection has received since its last complete message. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

TICK_MS: Final = 25
EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
TCP_INFO_BYTES = 136  # size of Linux's `tcp_info`
RECEIVED_AT = 128  # offset of its `tcpi_bytes_received`


class ConnectionWatch:
    """A thread that watches the connections of one listening socket."""

    def __init__(
        self, listener: zmq.Socket[Any], max_bytes: int, on_connection_closed: Callable[[], None]
    ) -> None:
        """Make it after `bind`. `max_bytes`: the bytes that a connection may receive after its last
        complete message that has been read. `on_connection_closed`: called in the watch's thread
        for each connection that the watch closes."""
        self._listener, self._max_bytes = listener, max_bytes
        self._on_connection_closed = on_connection_closed
        self._port = int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._monitor = listener.get_monitor_socket(EVENTS)
        # By file descriptor: the bytes received when the last complete message was read.
        self._complete: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="twostroke-peers", daemon=True)
        self._thread.start()

    def message_received(self, frame: zmq.Frame) -> None:
        """Register that a complete message has been read. `frame`: any frame of the message."""
        with contextlib.suppress(zmq.ZMQError, TypeError):
            file = frame.get(zmq.SRCFD)
            if file in self._complete:
                self._complete[file] = bytes_received(file) or 0

    def close(self) -> None:
        """End the watch. Call it before the listener is closed, in the listener's thread."""
        self._listener.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                if self._monitor.poll(TICK_MS if self._complete else None):
                    event = recv_monitor_message(self._monitor)
                    if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                        break
                    if event["event"] == zmq.EVENT_ACCEPTED:
                        self._complete[int(event["value"])] = 0
                    else:
                        self._complete.pop(int(event["value"]), None)
                for file, complete in list(self._complete.items()):
                    num_unfinished = (bytes_received(file) or 0) - complete
                    if num_unfinished > self._max_bytes and self._close_connection(file):
                        self._complete.pop(file, None)
                        self._on_connection_closed()
        self._monitor.close(linger=0)

    def _close_connection(self, file: int) -> bool:
        """Close a connection of the listener. Return False if the descriptor is not one of its
        connections."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
            if connection.getsockname()[1] == self._port:  # else the descriptor has been reused
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


def bytes_received(file: int) -> int | None:
    """Return the bytes that a TCP connection has received; None if that is unknown."""
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(fileno=os.dup(file)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return int(struct.unpack_from("Q", info, RECEIVED_AT)[0])
    except (OSError, struct.error):  # closed meanwhile, or an old system
        return None
