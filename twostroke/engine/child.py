"""`Child`: the server's handle of one engine process (`process.py`). Does not import torch."""

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
from twostroke.engine.spawn import EngineProcess
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
    DECODE_ERRORS,
    ENDLESS_MESSAGE,
    MAX_UNFINISHED_BYTES,
    UNREADABLE_MESSAGE,
    is_power_of_2,
    protect_connector,
    protect_listener,
)

log = logging.getLogger(__name__)

# A process sends nothing while it imports its modules. Until this time it is not killed for that.
MIN_IMPORT_TIMEOUT_S = 30.0
MAX_READ_S = 0.001  # `_read` returns to the event loop after this time


class Child:
    """An engine process, a socket to the process and a socket from the process.

    Call `await start()` first, then `send`. `on_message` is called in the event loop with each
    message of the process. A process that hangs is killed, during its start and later.

    | method | kills the process | returns |
    |---|---|---|
    | `wait` | no | when the process has ended, for any reason |
    | `stop` | after a timeout: first it asks the process to end | when all is closed |
    | `kill_and_close` | yes | when the process has ended and all is closed |
    | `kill_nowait` | yes | at once |
    """

    def __init__(self, process: EngineProcess, hang_timeout_s: float = 0.0) -> None:
        """`hang_timeout_s`: a process that sends nothing for this time is killed; 0: never."""
        # Returns the duration from which a step counts as hanging. None: steps have no limit.
        self.step_limit_s: Callable[[], float] | None = None
        # Why the process ended: the message that it sent, or the reason for killing it.
        self.failure = ""
        self.ready_s = 0.0  # time (`monotonic`) at which the process was ready
        self.last_message_s = monotonic()  # time at which the last message arrived
        self.running_step_s = 0.0  # duration of the running step, by the last message
        self.clock = RemoteClock(clock_id())  # the clock of the process
        self.on_message: Callable[[FromEngine], None] | None = None
        self._any_message = False
        self._process, self._hang_timeout_s = process, hang_timeout_s
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox.rcvhwm, self._outbox.sndhwm = STEPS_AHEAD, 0  # in messages; 0: no limit
        for socket in (self._inbox, self._outbox):
            socket.linger = 0
        protect_listener(self._inbox, process.secret)
        protect_connector(self._outbox, process.secret)
        # The number of messages that were dropped, by reason.
        self.dropped = dict.fromkeys((UNREADABLE_MESSAGE, ENDLESS_MESSAGE), 0)
        self._inbox.bind(process.endpoint)
        self._loop.add_reader(self._inbox.FD, self._read)
        self._connections: ConnectionWatch | None = None
        if process.secret is not None:
            self._connections = ConnectionWatch(
                self._inbox, MAX_UNFINISHED_BYTES, self._on_connection_closed
            )
        process.set_parent_endpoint(self._inbox.get_string(zmq.LAST_ENDPOINT))
        threading.Thread(target=self._wait_in_thread, name="twostroke-watch", daemon=True).start()
        has_timeout = bool(hang_timeout_s or process.start_timeout_s)
        self._watch_task = self._loop.create_task(self._watch()) if has_timeout else None

    def _wait_in_thread(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has ended before the process
            self._loop.call_soon_threadsafe(self._ended.set_result, None)

    async def _watch(self) -> None:
        """Kill the process when it hangs or its start takes too long."""
        timeout_s, last_check_s = self._hang_timeout_s or math.inf, monotonic()
        starting_s = 0.0  # duration of the start so far
        while not self._ended.done():
            await asyncio.wait((self._ended,), timeout=min(1.0, timeout_s / 4))
            now = monotonic()
            slept_s, last_check_s = now - last_check_s, now
            # After a sleep that took much too long, this server was itself stopped (as by SIGSTOP)
            # and has not read messages. A process that has not been started sends no messages.
            if slept_s > timeout_s / 2 or not self._process.running:
                self.last_message_s, self.running_step_s = now, 0.0
                continue
            starting_s += slept_s
            max_start_s = self._process.start_timeout_s or math.inf
            silent_s = now - self.last_message_s
            # A process that was stopped (as by SIGSTOP) is not importing, so it gets no extra time.
            importing = not (self._any_message or self._process.stopped)
            limit_s = max(timeout_s, MIN_IMPORT_TIMEOUT_S) if importing else timeout_s
            if silent_s > limit_s:
                self.kill_nowait(
                    f"its process sent no message for {silent_s:.0f} s{self._during_start()}, "
                    "so it was killed"
                )
            elif starting_s > max_start_s and not self._ready.done():
                self.kill_nowait(
                    f"its start took more than {max_start_s:g} s{self._during_start()}, so its "
                    "process was killed; raise --engine-start-timeout-s if loading the model takes "
                    "longer"
                )
            elif self.step_limit_s is not None and self.running_step_s > self.step_limit_s():
                self.kill_nowait(
                    f"a step took more than {self.running_step_s:.0f} s, so its process was killed"
                )

    def _during_start(self) -> str:
        """Return the stage of the start for a message, as " while …". Return "" if the process is
        ready."""
        if self._ready.done():
            return ""
        return " while loading the model" if self._any_message else " while importing its modules"

    async def start(self) -> Ready:
        """Wait until the engine can run requests. Raise the error that the process reports if the
        engine cannot start."""
        try:
            awaited = (self._ready, self._ended)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # The last message may arrive a moment after the process has ended.
                await asyncio.wait((self._ready,), timeout=0.2)
            if not self._ready.done():
                raise EngineError(f"the engine could not start: {self.how_it_ended()}")
            ready = self._ready.result()
        except BaseException:
            await self.kill_and_close()
            raise
        self._outbox.connect(ready.endpoint)
        self.ready_s = monotonic()
        return ready

    def send(self, message: ToEngine) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        self._outbox.send(message, zmq.NOBLOCK)  # never full: the queue has no limit

    def _read(self) -> None:
        """Read all messages: the descriptor is signalled once for any number of them."""
        until = monotonic() + MAX_READ_S
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
        except DECODE_ERRORS as error:
            self.dropped[UNREADABLE_MESSAGE] += 1
            if is_power_of_2(count := self.dropped[UNREADABLE_MESSAGE]):
                log.warning(
                    "dropped %d messages of an engine, which could not be decoded (%s)",
                    count,
                    error,
                )
            return True
        self._handle(message)
        return True

    def _receive(self) -> bytes | memoryview:
        if self._connections is None:
            return self._inbox.recv(zmq.NOBLOCK)
        frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
        self._connections.message_received(frame)
        return frame.buffer

    def _on_connection_closed(self) -> None:
        self.dropped[ENDLESS_MESSAGE] += 1
        log.warning(
            "closed a connection from an engine: it sent more than %d bytes without the end of a "
            "message",
            MAX_UNFINISHED_BYTES,
        )

    def _handle(self, message: FromEngine) -> None:
        self.last_message_s, self._any_message = monotonic(), True
        self.running_step_s = message.step_s if isinstance(message, Heartbeat) else 0.0
        if isinstance(message, Heartbeat):
            self.clock.add_sample(message.now_s)
            return
        if isinstance(message, Ready):
            self.clock = RemoteClock(message.clock)
            self.clock.add_sample(message.now_s)
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Failed):
            self.failure = message.message
            if not self._ready.done():
                error = unpack_error(message.kind, message.message, "the engine could not start")
                self._ready.set_exception(error)
        elif self.on_message is not None:
            self.on_message(message)

    async def wait(self) -> None:
        """Wait until the process has ended and all its messages have been read."""
        await asyncio.shield(self._ended)
        while self._read_one():
            await asyncio.sleep(0)

    def how_it_ended(self) -> str:
        return self.failure or self._process.how_it_ended()

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, and kill it if it has not ended after `timeout_s`."""
        if not self._ended.done():
            with contextlib.suppress(zmq.ZMQError):
                self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ended), timeout_s)
        await self.kill_and_close()

    def kill_nowait(self, reason: str) -> None:
        """Kill the process and return at once. `wait` returns when the process has ended."""
        self.failure = self.failure or reason
        self._process.end()

    async def kill_and_close(self) -> None:
        """Kill the process, wait until it has ended, and close the sockets."""
        self._process.end()
        await asyncio.shield(self._ended)
        if self._watch_task is not None:
            self._watch_task.cancel()
        if not self._inbox.closed:
            self._loop.remove_reader(self._inbox.FD)
            if self._connections is not None:
                self._connections.close()
            self._context.destroy()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # else asyncio logs that the exception was never retrieved
        self._process.clean_up()
