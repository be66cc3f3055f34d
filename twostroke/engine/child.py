"""`Child`: the parent's side of one engine process (`process.py`). No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from time import monotonic

import zmq

from twostroke.connection_watch import ConnectionWatch
from twostroke.engine.clocks import RemoteClock, clock_id
from twostroke.engine.spawn import Launched
from twostroke.engine.wire import (
    STEPS_AHEAD,
    Failed,
    FromEngine,
    Heartbeat,
    Ready,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
    unpack_error,
)
from twostroke.errors import EngineError
from twostroke.network_auth import (
    ENDLESS,
    MAX_UNFINISHED_BYTES,
    UNREADABLE,
    UNREADABLE_MESSAGE,
    is_power_of_2,
    protect_connector,
    protect_listener,
)

log = logging.getLogger(__name__)

FIRST_MESSAGE_S = 30.0  # minimum allowance for imports before the first message
READ_S = 0.001  # how long messages are read before other callbacks of the loop run


class Child:
    """An engine process, a socket to it and a socket from it.

    `await start`, then `send`; `on_message` gets its messages in the event loop. `wait` returns as
    soon as the process has ended, for any reason; `stop` ends it and leaves nothing behind. A
    process that hangs is killed, at every stage of its start and after it.
    """

    def __init__(self, launched: Launched, hang_timeout_s: float = 0.0) -> None:
        """`hang_timeout_s`: a process that sends nothing for so long is killed; 0: never."""
        self.step_limit_s: Callable[[], float] | None = None  # a longer step hangs
        self.failure = ""  # why it ended: its own message, or the reason for killing it
        self.ready_s = 0.0
        self.heard_s = monotonic()  # when its last message came
        self.step_s = 0.0  # how long its step had been running then
        self.clock = RemoteClock(clock_id())  # the engine's
        self.on_message: Callable[[FromEngine], None] | None = None
        self._heard_any = False
        self._launched, self._hang_timeout_s = launched, hang_timeout_s
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox.rcvhwm, self._outbox.sndhwm = STEPS_AHEAD, 0
        for socket in (self._inbox, self._outbox):
            socket.linger = 0
        protect_listener(self._inbox, launched.secret)
        protect_connector(self._outbox, launched.secret)
        self.dropped = dict.fromkeys((UNREADABLE_MESSAGE, ENDLESS), 0)  # messages, by reason
        self._inbox.bind(launched.endpoint)
        self._loop.add_reader(self._inbox.FD, self._read)
        self._connections: ConnectionWatch | None = None
        if launched.secret is not None:
            self._connections = ConnectionWatch(self._inbox, MAX_UNFINISHED_BYTES, self._on_cut)
        launched.listening(self._inbox.get_string(zmq.LAST_ENDPOINT))
        threading.Thread(target=self._wait, name="twostroke-watch", daemon=True).start()
        watched = hang_timeout_s or launched.start_timeout_s
        self._watching = self._loop.create_task(self._watch()) if watched else None

    def _wait(self) -> None:
        self._launched.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended before it
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    async def _watch(self) -> None:
        """Kill the process when it hangs or its start takes too long."""
        timeout_s, slept_from = self._hang_timeout_s or math.inf, monotonic()
        starting_s = 0.0  # how long its start has been running
        while not self._ended.done():
            await asyncio.wait((self._ended,), timeout=min(1.0, timeout_s / 4))
            now = monotonic()
            slept_s, slept_from = now - slept_from, now
            # This process was stopped itself, and has missed messages; or nothing runs yet.
            if slept_s > timeout_s / 2 or not self._launched.running:
                self.heard_s, self.step_s = now, 0.0
                continue
            starting_s += slept_s
            max_start_s = self._launched.start_timeout_s or math.inf
            silent_s = now - self.heard_s
            importing = not (self._heard_any or self._launched.stopped)
            limit_s = max(timeout_s, FIRST_MESSAGE_S) if importing else timeout_s
            if silent_s > limit_s:
                self.end(
                    f"its process was silent for {silent_s:.0f} s{self._stage()} and was killed"
                )
            elif starting_s > max_start_s and not self._ready.done():
                self.end(
                    f"its start took more than {max_start_s:g} s{self._stage()}, so its process "
                    "was killed; raise --engine-start-timeout-s if reading the model takes longer"
                )
            elif self.step_limit_s is not None and self.step_s > self.step_limit_s():
                self.end(f"a step took more than {self.step_s:.0f} s, so its process was killed")

    def _stage(self) -> str:
        """Name the stage of its start, as a part of a sentence; empty once it is ready."""
        if self._ready.done():
            return ""
        return " while reading the model" if self._heard_any else " while importing its modules"

    async def start(self) -> Ready:
        """Wait until it can run requests; raises the error that it reports if it cannot start."""
        try:
            awaited = (self._ready, self._ended)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # Its last message may come a moment after its end.
                await asyncio.wait((self._ready,), timeout=0.2)
            if not self._ready.done():
                raise EngineError(f"the engine could not start: {self.how_it_ended()}")
            ready = self._ready.result()
        except BaseException:
            await self.kill()
            raise
        self._outbox.connect(ready.endpoint)
        self.ready_s = monotonic()
        return ready

    def send(self, message: ToEngine) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        self._outbox.send(message, zmq.NOBLOCK)  # the queue has no limit

    def _read(self) -> None:
        """Read all messages: the descriptor is signalled once for any number of them."""
        until = monotonic() + READ_S
        while self._read_one():
            if monotonic() > until:
                self._loop.call_soon(self._read)
                return

    def _read_one(self) -> bool:
        if self._inbox.closed:
            return False
        try:
            data = self._receive()
        except zmq.Again:
            return False
        try:
            message = decode_from_engine(data)
        except UNREADABLE as error:
            self.dropped[UNREADABLE_MESSAGE] += 1
            if is_power_of_2(count := self.dropped[UNREADABLE_MESSAGE]):
                log.warning("%d messages of an engine were dropped (%s)", count, error)
            return True
        self._take(message)
        return True

    def _receive(self) -> bytes | memoryview:
        if self._connections is None:
            return self._inbox.recv(zmq.NOBLOCK)
        part = self._inbox.recv(zmq.NOBLOCK, copy=False)
        self._connections.received(part)
        return part.buffer

    def _on_cut(self) -> None:
        self.dropped[ENDLESS] += 1
        log.warning("a connection of an engine was closed: its message did not end")

    def _take(self, message: FromEngine) -> None:
        self.heard_s, self._heard_any = monotonic(), True
        self.step_s = message.step_s if isinstance(message, Heartbeat) else 0.0
        if isinstance(message, Heartbeat):
            self.clock.heard(message.now_s)
            return
        if isinstance(message, Ready):
            self.clock = RemoteClock(message.clock)
            self.clock.heard(message.now_s)
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Failed):
            self.failure = message.message
            if not self._ready.done():
                otherwise = "the engine could not start"
                self._ready.set_exception(unpack_error(message.kind, message.message, otherwise))
        elif self.on_message is not None:
            self.on_message(message)

    async def wait(self) -> None:
        """Wait until it has ended and its messages have been read."""
        await asyncio.shield(self._ended)
        while self._read_one():
            await asyncio.sleep(0)

    def how_it_ended(self) -> str:
        return self.failure or self._launched.how_it_ended()

    async def stop(self, patience_s: float) -> None:
        """Ask it to end; kill it if it does not."""
        if not self._ended.done():
            with contextlib.suppress(zmq.ZMQError):
                self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), patience_s)
        await self.kill()

    def end(self, reason: str) -> None:
        """Kill it, without waiting; `wait` returns when it has ended."""
        self.failure = self.failure or reason
        self._launched.end()

    async def kill(self) -> None:
        self._launched.end()
        await asyncio.shield(self._ended)
        if self._watching is not None:
            self._watching.cancel()
        if not self._inbox.closed:
            self._loop.remove_reader(self._inbox.FD)
            if self._connections is not None:
                self._connections.close()
            self._context.destroy()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # else asyncio logs that the exception was never retrieved
        self._launched.clean_up()
