"""The process of an engine: `python -m twostroke.engine.process SEND_TO BUILDER`.

SEND_TO is the address for messages to the parent process. BUILDER is the function "module:name"
that builds the engine. The process reads its settings as a line of JSON from stdin. `remote.py`
starts the process, and `wire.py` defines the messages.

Between steps the process handles the messages that have arrived. If there is no work, the process
waits for messages. The process ends on `Shutdown`, or when stdin is closed because the parent has
ended.
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
    unpack_add,
)
from twostroke.network_auth import (
    DECODE_ERRORS,
    ENDLESS_MESSAGE,
    MAX_UNFINISHED_BYTES,
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
# Poll intervals while no request can run:
FETCHING_MS = 1  # because this engine is fetching the blocks of a request
STALLED_MS = 20  # because no blocks are free until other engines have fetched blocks of this one
TIDY_S = 1.0  # the time between two calls of `_tidy`
HANDLE_S = 0.005  # time for handling messages between two steps


class HeartbeatThread:
    """A thread that sends `Heartbeat`s on a socket of its own. The thread starts before the engine
    is built and runs until the process ends, so that the parent can tell a long step from a stopped
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
            with contextlib.suppress(zmq.Again):  # the parent hangs and reads no messages
                self._outbox.send(encode(message), zmq.NOBLOCK)
            if self._ending.wait(HEARTBEAT_S):
                break
        self._outbox.close()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()


class EngineServer:
    """Runs the loop of an engine core, and exchanges messages with the parent over sockets."""

    def __init__(
        self,
        core: EngineCore,
        heartbeats: HeartbeatThread,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        is_on_network: bool = False,
    ) -> None:
        """`inbox`: the listening socket for messages of the parent. `is_on_network`: other machines
        can connect to `inbox`."""
        self._core, self._heartbeats = core, heartbeats
        self._inbox, self._outbox = inbox, outbox
        self._handles: dict[str, int] = {}  # numbers of the requests in messages, by request id
        self._request_ids: dict[int, str] = {}  # by handle
        self._messages: deque[ToEngine] = deque()  # received, not handled yet
        self._aborted: set[int] = set()  # handles of requests whose `Add` may be in `_messages`
        self._ended: list[Update] = []  # last updates of aborted requests, not sent yet
        self._ahead: dict[str, int] = {}  # handles of fetches ahead, by request id
        self._parent = os.getppid()
        # The number of messages that were dropped, by reason.
        self._dropped = dict.fromkeys((UNREADABLE_MESSAGE, ENDLESS_MESSAGE), 0)
        self._watch: ConnectionWatch | None = None
        if is_on_network:
            self._watch = ConnectionWatch(inbox, MAX_UNFINISHED_BYTES, self._on_connection_closed)
        self._sent_load = self.load()
        self._sent_step = -1
        self._tidied_s = 0.0

    def _on_connection_closed(self) -> None:
        """Count a connection that was closed because its message was larger than allowed."""
        self._dropped[ENDLESS_MESSAGE] += 1
        log.warning(
            "a connection to the engine was closed: its message is longer than %d bytes",
            MAX_UNFINISHED_BYTES,
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def load(self) -> EngineLoad:
        scheduler = self._core.scheduler
        return EngineLoad(
            self._core.num_waiting,
            scheduler.num_running,
            scheduler.kv.usage(),
            dropped=add_counts(scheduler.offers.dropped(), self._dropped),
            tiers=scheduler.kv.tier_status(),
        )

    def run(self) -> None:
        while self._take_messages():
            self._heartbeats.step_began_s = monotonic()
            updates = self._core.step()
            self._heartbeats.step_began_s = 0.0
            self._send_fetched()
            self._send_step(updates)

    def _take_messages(self) -> bool:
        """Handle messages between two steps. If there is no work, wait for a message. Return False
        to shut down."""
        self._tidy()
        if not self._messages:
            if self._core.awaits_fetch:
                self._inbox.poll(FETCHING_MS)
            elif self._core.is_stalled:
                self._inbox.poll(STALLED_MS)
        deadline_s = monotonic() + HANDLE_S
        while True:
            self._receive()
            # Every call handles at least one message, even after the deadline: a stalled engine may
            # wait for this message.
            if self._messages:
                if not self._handle(self._messages.popleft()):
                    return False
                if not self._core.has_work or monotonic() <= deadline_s:
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
                self._send_step([])  # reports finished copies to tiers, if the load has changed

    def _receive(self) -> None:
        """Receive all messages. Aborts overtake other messages, so that no step computes tokens
        for a client that has left."""
        while True:
            try:
                message = decode_to_engine(self._receive_one())
            except zmq.Again:
                break
            except DECODE_ERRORS as error:
                self._dropped[UNREADABLE_MESSAGE] += 1
                if is_power_of_2(count := self._dropped[UNREADABLE_MESSAGE]):
                    log.warning("%d messages were dropped (%s)", count, error)
                continue
            if isinstance(message, Abort):
                for handle in message.handles:
                    self._abort(handle)
            else:
                self._messages.append(message)
        if not self._messages:
            self._aborted.clear()

    def _receive_one(self) -> bytes | memoryview:
        if self._watch is None:
            return self._inbox.recv(zmq.NOBLOCK)
        part = self._inbox.recv(zmq.NOBLOCK, copy=False)
        self._watch.message_received(part)
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
        """Release the memory of ended engines, and register finished copies to tiers."""
        if monotonic() - self._tidied_s > TIDY_S:
            self._core.scheduler.offers.release_memory_of_ended_engines()
            self._core.take_finished_copies()
            self._tidied_s = monotonic()

    def _add(self, message: Add) -> None:
        core, added = self._core, []
        try:
            for request in unpack_add(message):
                core.add(request)
                added.append(request.request_id)
        except Exception as error:
            for name in added:
                core.abort(name)
            self._send(Refused(message.first, 1 + len(message.others), *pack_error(error)))
            return
        for handle, name in enumerate(added, message.first):
            self._handles[name], self._request_ids[handle] = handle, name
            if handle in self._aborted:
                self._abort(handle)

    def _abort(self, handle: int) -> None:
        """Abort a request, or note that it must be aborted as soon as it is added."""
        if handle not in self._request_ids:
            self._aborted.add(handle)
            return
        end = self._core.abort(self._request_ids[handle])
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
                del self._request_ids[self._handles.pop(update.request_id)]

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
                    transport=fetched.transport,
                )
            )

    def _new_steps(self) -> list[StepRecord]:
        """Return the records of the steps since the last message. The field `slots` is left out: it
        grows with the batch, and the parent does not use it."""
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
    # Signals do not end this process: the parent ends it, perhaps after the running requests.
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
    host_name: str = "",
    secret: str | None = None,
) -> int:
    """Build an engine and run it until a `Shutdown` message; return the exit code.

    `send_to`: the address for messages to the parent. `listen_at`: the address for messages to the
    engine; port "*" chooses a free port. `host_name`: the name of this machine in error messages,
    if the parent runs on another machine. `secret`: authenticates the peers of the sockets, if the
    sockets are on a network."""
    context = zmq.Context()
    outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    heartbeat_socket = context.socket(zmq.PUSH)
    outbox.sndhwm, inbox.rcvhwm, heartbeat_socket.sndhwm = STEPS_AHEAD, 0, 1
    outbox.linger = inbox.linger = LINGER_MS
    heartbeat_socket.linger = 0
    protect_listener(inbox, secret)
    for connector in (outbox, heartbeat_socket):
        protect_connector(connector, secret)
    outbox.connect(send_to)
    heartbeat_socket.connect(send_to)
    heartbeats = HeartbeatThread(heartbeat_socket)
    server: EngineServer | None = None
    try:
        engine = _build(config, builder)
        inbox.bind(listen_at)
        server = EngineServer(
            engine.core, heartbeats, inbox, outbox, is_on_network=secret is not None
        )
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
        # Exclude the engine's objects from collections: scanning them would delay all streams.
        gc.freeze()
        server.run()
        engine.core.close()
        code = 0
    except Exception as error:
        kind, message = pack_error(error)
        if not kind:  # an unexpected error
            with contextlib.suppress(OSError):  # if stderr cannot be written, still send `Failed`
                traceback.print_exc()
        outbox.send(encode(Failed(kind, f"{host_name}: {message}" if host_name else message)))
        code = 1
    if server is not None:
        server.close()
    heartbeats.stop()
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
    # Not through `sys.stdin`: this thread would hold the lock of `sys.stdin`, which the interpreter
    # needs at its exit.
    while os.read(0, 1):
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
