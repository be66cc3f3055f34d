"""The engine's own process: `python -m twostroke.engine.process SEND_TO BUILDER`, the settings as
a line of JSON on stdin. `remote.py` starts it; `wire.py` has the messages.

Between steps it handles the messages that have arrived; without work it waits for messages. It ends
on `Shutdown`, or when stdin is closed because its parent has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from dataclasses import replace
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from twostroke import log_lines
from twostroke.config import EngineConfig
from twostroke.connection_watch import ConnectionWatch
from twostroke.engine.api import EngineLoad
from twostroke.engine.clocks import clock_id
from twostroke.engine.wire import (
    HEARTBEAT_S,
    STEPS_AHEAD,
    Abort,
    Add,
    AddAll,
    Audit,
    Audited,
    Failed,
    FetchAhead,
    FetchedOffer,
    FromEngine,
    Heartbeat,
    Profiled,
    Ready,
    Refused,
    Release,
    ResetPrefixes,
    Shutdown,
    StartProfile,
    StopProfile,
    ToEngine,
    decode_to_engine,
    encode,
    pack_error,
    pack_step,
)
from twostroke.network_auth import (
    ENDLESS,
    MAX_UNFINISHED_BYTES,
    UNREADABLE,
    UNREADABLE_MESSAGE,
    add_counts,
    is_power_of_2,
    protect_connector,
    protect_listener,
)
from twostroke.observe.record import StepRecord
from twostroke.sched.updates import Update

if TYPE_CHECKING:  # the builder decides which modules are imported
    from twostroke.engine.core import EngineCore

log = logging.getLogger(__name__)

ORPHAN_CHECK_MS = 1000  # how often an idle engine checks that its parent lives
LINGER_MS = 5000  # how long the parent may take to read the last messages
STALLED_MS = 20  # poll interval while all requests wait for other engines to fetch blocks
TIDY_S = 1.0  # how often memory of ended engines is released
FETCHING_MS = 1  # poll interval while all requests wait for blocks that are being fetched
RECEIVE_S = 0.005  # how long messages are handled while there is work


class Heart:
    """A thread that sends `Heartbeat`s on a socket of its own. It starts before the engine is built
    and runs until the process ends, so that the parent can tell a long step from a stopped
    process."""

    def __init__(self, outbox: zmq.Socket[bytes]) -> None:
        self.step_began_s = 0.0  # 0: no step runs
        self._outbox = outbox
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="twostroke-heart", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            began_s, now_s = self.step_began_s, monotonic()
            message = Heartbeat(now_s - began_s if began_s else 0.0, now_s)
            with contextlib.suppress(zmq.Again):  # the parent does not read: it hangs
                self._outbox.send(encode(message), zmq.NOBLOCK)
            if self._ending.wait(HEARTBEAT_S):
                break
        self._outbox.close()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()


class EngineServer:
    """Runs a core's loop for the parent at the other end of the sockets."""

    def __init__(
        self,
        core: EngineCore,
        heart: Heart,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        is_on_network: bool = False,
    ) -> None:
        """`inbox`: a socket that listens. `is_on_network`: other machines can reach it."""
        self._core, self._heart = core, heart
        self._inbox, self._outbox = inbox, outbox
        self._handles: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._unhandled: deque[ToEngine] = deque()
        self._aborted: set[int] = set()  # handles of requests whose `Add` may be in `_unhandled`
        self._ended: list[Update] = []  # of aborted requests; not sent yet
        self._ahead: dict[str, int] = {}  # handles of fetches ahead, by request id
        self._parent = os.getppid()
        self._dropped = dict.fromkeys((UNREADABLE_MESSAGE, ENDLESS), 0)  # messages, by reason
        self._watch: ConnectionWatch | None = None
        if is_on_network:
            self._watch = ConnectionWatch(inbox, MAX_UNFINISHED_BYTES, self._on_cut)
        self._sent_load = self.load()
        self._sent_step = -1
        self._tidied_s = 0.0

    def _on_cut(self) -> None:
        self._dropped[ENDLESS] += 1
        log.warning("a connection to the engine was closed: its message did not end")

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def load(self) -> EngineLoad:
        scheduler = self._core.scheduler
        dropped = add_counts(scheduler.offers.dropped(), self._dropped)
        return EngineLoad(
            self._core.num_waiting, scheduler.num_running, scheduler.kv.usage(), dropped
        )

    def run(self) -> None:
        while self._take_messages():
            self._heart.step_began_s = monotonic()
            updates = self._core.step()
            self._heart.step_began_s = 0.0
            self._send_fetched()
            self._send_step(updates)

    def _take_messages(self) -> bool:
        """Handle messages, and wait for one if there is no work; return False to shut down."""
        self._tidy()
        if not self._unhandled:  # the last call has left no message
            if self._core.awaits_fetch:
                self._inbox.poll(FETCHING_MS)
            elif self._core.is_stalled:
                self._inbox.poll(STALLED_MS)
        until = monotonic() + RECEIVE_S
        while True:
            self._receive()
            # Every call handles a message if there is one: on a busy machine the time may be up at
            # once, and what the engine waits for may be in a message.
            if self._unhandled:
                if not self._handle(self._unhandled.popleft()):
                    return False
                if not self._core.has_work or monotonic() <= until:
                    continue
            self._send_ended()
            if self._core.has_work:
                return True
            # While idle, prepare memory for fetched blocks in small parts until a message arrives.
            while not self._core.has_work and self._core.scheduler.offers.prepare_memory():
                if self._inbox.poll(0):
                    break
            if not self._core.has_work and not self._inbox.poll(ORPHAN_CHECK_MS):
                if os.getppid() != self._parent:
                    return False
                self._tidy()

    def _receive(self) -> None:
        """Receive all messages. Aborts overtake other messages, so that no step computes tokens
        for a client that has left."""
        while True:
            try:
                message = decode_to_engine(self._receive_one())
            except zmq.Again:
                break
            except UNREADABLE as error:
                self._dropped[UNREADABLE_MESSAGE] += 1
                if is_power_of_2(count := self._dropped[UNREADABLE_MESSAGE]):
                    log.warning("%d messages were dropped (%s)", count, error)
                continue
            if isinstance(message, Abort):
                for handle in message.handles:
                    self._abort(handle)
            else:
                self._unhandled.append(message)
        if not self._unhandled:
            self._aborted.clear()

    def _receive_one(self) -> bytes | memoryview:
        if self._watch is None:
            return self._inbox.recv(zmq.NOBLOCK)
        part = self._inbox.recv(zmq.NOBLOCK, copy=False)
        self._watch.received(part)
        return part.buffer

    def _handle(self, message: ToEngine) -> bool:
        """Handle a message; return False to shut down."""
        if not isinstance(message, Add | AddAll):
            self._send_ended()
        match message:
            case Add():
                self._add(message)
            case AddAll():
                for add in message.adds:
                    self._add(add)
            case FetchAhead():
                self._ahead[message.request.request_id] = message.handle
                self._core.fetch_ahead(message.request)
            case Release():
                self._core.release_offers(message.offers)
                self._send_step([])
            case ResetPrefixes():
                self._core.reset_prefix_cache()
                self._send_step([])  # reports the load, which has changed
            case Audit():
                self._audit()
            case StartProfile() | StopProfile():
                self._profile(isinstance(message, StartProfile))
            case Shutdown():
                return False
        return True

    def _tidy(self) -> None:
        if monotonic() - self._tidied_s > TIDY_S:
            self._core.scheduler.offers.release_memory_of_ended_engines()
            self._tidied_s = monotonic()

    def _add(self, message: Add) -> None:
        core, added = self._core, []
        try:
            prompt = message.requests[0].prompt_token_ids
            for request in message.requests:
                core.add(replace(request, prompt_token_ids=prompt))
                added.append(request.request_id)
        except Exception as error:
            for name in added:
                core.abort(name)
            self._send(Refused(message.first, len(message.requests), *pack_error(error)))
            return
        for handle, name in enumerate(added, message.first):
            self._handles[name], self._names[handle] = handle, name
            if handle in self._aborted:
                self._abort(handle)

    def _abort(self, handle: int) -> None:
        """Abort a request, or note that it must be aborted as soon as it is added."""
        if handle not in self._names:
            self._aborted.add(handle)
            return
        end = self._core.abort(self._names[handle])
        if end is not None:
            self._ended.append(end)

    def _send_ended(self) -> None:
        """Send the ends of aborted requests, many in one message."""
        ended, self._ended = self._ended, []
        if ended:
            self._send_step(ended)

    def _audit(self) -> None:
        problem = ""
        try:
            self._core.scheduler.audit()
            if not self._core.has_work:
                assert not self._handles, "a handle outlived its request"
                assert not self._ahead, "the end of a fetch ahead has not been reported"
        except AssertionError as error:
            problem = str(error) or "an assertion failed"
        self._send(Audited(problem))

    def _profile(self, start: bool) -> None:
        profiler, data = self._core.profiler, b""
        try:
            if start:
                profiler.start()
            else:
                data = msgspec.json.encode(profiler.stop())
        except Exception as error:
            self._send(Profiled(*pack_error(error), b""))
            return
        self._send(Profiled("", "", data))

    def _send_step(self, updates: list[Update]) -> None:
        load, steps = self.load(), self._new_steps()
        if not updates and not steps and load == self._sent_load:
            return
        self._sent_load = load
        self._send(pack_step(updates, self._handles, load, steps))
        for update in updates:
            if update.finish_reason is not None:
                del self._names[self._handles.pop(update.request_id)]

    def _send_fetched(self) -> None:
        for fetched in self._core.scheduler.received.take_fetched():
            name = fetched.request_id
            handle = self._ahead.pop(name) if fetched.ahead else self._handles[name]
            self._send(
                FetchedOffer(
                    handle,
                    num_bytes=fetched.num_bytes,
                    seconds=fetched.seconds,
                    problem=fetched.problem,
                    waited_s=fetched.waited_s,
                    way=fetched.way,
                )
            )

    def _new_steps(self) -> list[StepRecord]:
        """Return the records of steps since the last message, without their slots: these grow with
        the batch, and the parent does not use them."""
        new: list[StepRecord] = []
        for record in reversed(self._core.records.steps):
            if record.step <= self._sent_step:
                break
            new.append(record._replace(slots=()))
        if new:
            self._sent_step = new[0].step
            new.reverse()
        return new

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))  # blocks if `STEPS_AHEAD` messages have not been read


def main(send_to: str, builder: str) -> int:
    # Only the parent ends this process, because it may let running requests finish first.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    log_lines.configure()
    config = EngineConfig(**json.loads(_read_line(0)))
    folder = _folder_of(send_to)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    listen_at = "tcp://127.0.0.1:*" if folder is None else f"ipc://{folder}/in"
    return run_engine(config, builder, send_to, listen_at)


def run_engine(
    config: EngineConfig,
    builder: str,
    send_to: str,
    listen_at: str,
    where: str = "",
    secret: str | None = None,
) -> int:
    """Build an engine and run it until it is told to end; return the exit code. `send_to`: the
    address for its messages. `listen_at`: the address of its inbox; the port may be *. `where`: the
    name of this machine in errors, if the parent runs on another machine. `secret`: the secret of
    the sockets, if other users can reach them."""
    context = zmq.Context()
    outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    beats = context.socket(zmq.PUSH)
    outbox.sndhwm, inbox.rcvhwm, beats.sndhwm = STEPS_AHEAD, 0, 1
    outbox.linger = inbox.linger = LINGER_MS
    beats.linger = 0
    protect_listener(inbox, secret)
    for connector in (outbox, beats):
        protect_connector(connector, secret)
    outbox.connect(send_to)
    beats.connect(send_to)
    heart = Heart(beats)
    server: EngineServer | None = None
    try:
        engine = _build(config, builder)
        inbox.bind(listen_at)
        server = EngineServer(engine.core, heart, inbox, outbox, is_on_network=secret is not None)
        endpoint = inbox.get_string(zmq.LAST_ENDPOINT)
        ready = Ready(
            engine.info(),
            server.load(),
            endpoint,
            pid=os.getpid(),
            host=socket.gethostname(),
            clock=clock_id(),
            now_s=monotonic(),
        )
        outbox.send(encode(ready))
        engine.core.warm()
        gc.freeze()  # these objects stay; a full collection would stop every stream
        server.run()
        code = 0
    except Exception as error:
        kind, message = pack_error(error)
        if not kind:  # an unexpected error
            with contextlib.suppress(OSError):  # a full disk must not cost the last message
                traceback.print_exc()
        outbox.send(encode(Failed(kind, f"{where}: {message}" if where else message)))
        code = 1
    if server is not None:
        server.close()
    heart.stop()
    context.destroy()
    return code


def _build(config: EngineConfig, builder: str) -> Any:
    module, _, function = builder.partition(":")
    return getattr(import_module(module), function)(config)


def _folder_of(endpoint: str) -> str | None:
    """Return the folder of the sockets, if they are files."""
    return os.path.dirname(endpoint.removeprefix("ipc://")) if "ipc:" in endpoint else None


def _read_line(file: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(file, 1 << 16)
        if not data:
            raise SystemExit("no settings on stdin; this process is started by twostroke itself")
        line += data
    return line


def _end_with_parent(folder: str | None) -> None:
    # Not through sys.stdin: a thread that holds its lock would disturb the interpreter's exit.
    while os.read(0, 1):
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
