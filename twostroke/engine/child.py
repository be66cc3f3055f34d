"""`Child`: one engine process (`process.py`) as its parent sees it. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable
from time import monotonic

import zmq

from twostroke.config import EngineConfig
from twostroke.engine.wire import (
    STEPS_AHEAD,
    Failed,
    FromEngine,
    Ready,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
    unpack_error,
)
from twostroke.errors import EngineError

TURN_S = 0.001  # how long messages are read before the loop's other callbacks get their turn
LONGEST_IPC_FOLDER = 90  # a socket's path has room for about 100 bytes


class Child:
    """A process, a socket to it and one from it, in a folder that only this user may enter.

    `await start`, then `send`; what it says is given to `on_message` in the event loop. `wait`
    returns as soon as it has ended, however that came; `stop` ends it and leaves nothing.
    """

    def __init__(self, config: EngineConfig, builder: str) -> None:
        self.failure = ""  # why it ended, in its own words
        self.ready_s = 0.0
        self.on_message: Callable[[FromEngine], None] | None = None
        self._config, self._builder = config, builder
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._process: Process | None = None
        self._folder: str | None = None
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox.rcvhwm, self._outbox.sndhwm = STEPS_AHEAD, 0
        for socket in (self._inbox, self._outbox):
            socket.linger = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Ready:
        """Until it can be sent requests. Raises what it says if it cannot start."""
        try:
            process = await self._spawn(self._listen())
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait((self._ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # Its last words may come a moment after its end.
                await asyncio.wait((self._ready,), timeout=0.2)
            if not self._ready.done():
                raise EngineError(f"the engine could not start: {self.how_it_ended()}")
            ended.cancel()
            ready = self._ready.result()
        except BaseException:
            await self.kill()
            raise
        self._outbox.connect(ready.endpoint)
        self.ready_s = monotonic()
        return ready

    def _listen(self) -> str:
        if sys.platform == "win32":
            self._inbox.bind("tcp://127.0.0.1:*")
            endpoint = self._inbox.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            return endpoint.rstrip(b"\0").decode()
        self._folder = tempfile.mkdtemp(prefix="twostroke-")
        if len(self._folder) > LONGEST_IPC_FOLDER:
            os.rmdir(self._folder)
            self._folder = tempfile.mkdtemp(prefix="twostroke-", dir="/tmp")
        self._inbox.bind(f"ipc://{self._folder}/out")
        return f"ipc://{self._folder}/out"

    async def _spawn(self, endpoint: str) -> Process:
        # It finds modules where this process does, "" being the present folder, and nowhere else.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "twostroke.engine.process", endpoint, self._builder),
            stdin=asyncio.subprocess.PIPE,  # its end tells the child that we are gone
            env=os.environ | {"PYTHONPATH": path},
        )
        self._process = process
        self._loop.add_reader(self._inbox.FD, self._read)
        assert process.stdin is not None
        process.stdin.write(json.dumps(dataclasses.asdict(self._config)).encode() + b"\n")
        return process

    def send(self, message: ToEngine) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        self._outbox.send(message, zmq.NOBLOCK)  # the queue has no limit

    def _read(self) -> None:
        """The descriptor speaks up once for any number of messages: read until there is none."""
        until = monotonic() + TURN_S
        while self._read_one():
            if monotonic() > until:
                self._loop.call_soon(self._read)
                return

    def _read_one(self) -> bool:
        if self._inbox.closed:
            return False
        try:
            data = self._inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._take(decode_from_engine(data))
        return True

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
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
        """Until it has ended; what it said before that has been read."""
        assert self._process is not None
        await self._process.wait()
        while self._read_one():
            await asyncio.sleep(0)

    def how_it_ended(self) -> str:
        code = None if self._process is None else self._process.returncode
        if self.failure:
            return self.failure
        if code is not None and code < 0:
            memory = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
            return f"its process was ended by signal {-code}{memory}"
        return f"its process ended with exit code {code}"

    async def stop(self, patience_s: float) -> None:
        """Ask it to end; make it, if it does not."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(zmq.ZMQError):
                self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), patience_s)
        await self.kill()

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        if not self._inbox.closed:
            self._loop.remove_reader(self._inbox.FD)
            self._context.destroy()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # it has been seen
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
