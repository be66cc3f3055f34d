"""`SupervisedEngine`: an engine in a child process, which is started again when it dies, or when it
hangs and is killed. Does not import torch.

    add, abort_all ──▶ Child ──▶ the process (`process.py`)
    on_updates, on_refused, on_fetched ◀── messages of the process
    on_death, on_restart, on_end       ◀── death and restart of the process

Subclasses store the requests and decide how a death affects them: `remote.py` with one engine,
`route/` with several. After `MAX_QUICK_DEATHS` deaths in a row the engine is not restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic

import msgspec

from twostroke.engine.api import EngineLoad
from twostroke.engine.child import Child
from twostroke.engine.spawn import Launcher
from twostroke.engine.wire import (
    Abort,
    Add,
    AddAll,
    Audit,
    Audited,
    FetchAhead,
    FetchedOffer,
    FromEngine,
    Profiled,
    Ready,
    Refused,
    Release,
    ResetPrefixes,
    StartProfile,
    Step,
    StopProfile,
    encode,
    pack_add,
    unpack_error,
    unpack_step,
)
from twostroke.errors import EngineError, RequestError
from twostroke.kv.usage import KVUsage
from twostroke.network_auth import add_counts
from twostroke.observe.record import Records
from twostroke.request import EngineRequest
from twostroke.sched.updates import Update

MAX_QUICK_DEATHS = 6  # deaths in a row, each within STEADY_S of the start
STEADY_S = 30.0
HANG_TIMEOUT_S = 30.0  # without a message; a thread of the engine sends heartbeats
# A step hangs if it takes longer than TIMEOUTS_OF_STEP times the timeout and longer than
# LONGEST_STEPS times the longest of the RECENT_STEPS newest steps.
TIMEOUTS_OF_STEP, LONGEST_STEPS, RECENT_STEPS = 10, 20, 256
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
STOP_PATIENCE_S = 10.0  # time for the running step to end

log = logging.getLogger(__name__)


class SupervisedEngine(ABC):
    """Takes a child process that is ready. `watch` begins the supervision, `stop` ends it."""

    def __init__(
        self,
        launcher: Launcher,
        child: Child,
        ready: Ready,
        hang_timeout_s: float,
        restart_limit: int,
    ) -> None:
        self.info, self.pid, self.host = ready.info, ready.pid, ready.host
        self.records = Records()  # copies of the engine's records, kept when its process ends
        self.num_restarts = 0
        self._launcher, self._child = launcher, child
        self._load = ready.load
        self._up = True
        self._lost: str = ""  # why no process will be started any more; "": it is restarted
        self._hang_timeout_s, self._restart_limit = hang_timeout_s, restart_limit
        self._step_s: deque[float] = deque([0.0], RECENT_STEPS)  # durations of recent steps
        self._earlier_dropped: dict[str, int] = {}  # messages dropped by earlier processes
        self._next_handle = 0
        self._together: list[Add] | None = None  # requests to send in one message
        self._handles: dict[str, int] = {}  # handles of requests in the engine, by their ids
        self._names: dict[int, str] = {}  # ids of engine requests, by handle
        self._ahead: set[int] = set()  # handles of fetches ahead
        self._audits: list[asyncio.Future[str]] = []
        self._profiles: list[asyncio.Future[bytes]] = []  # in the order of the answers
        self._supervisors: list[asyncio.Task[None]] = []
        self._wanted = asyncio.Event()  # the engine should run; cleared while it sleeps
        self._wanted.set()
        self._settled = asyncio.Event()  # the engine runs, or never will again
        self._settled.set()

    # ── events, for subclasses ──────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def num_open(self) -> int:
        """The number of requests that the next process will run."""

    @abstractmethod
    def on_updates(self, updates: list[Update]) -> None: ...

    @abstractmethod
    def on_refused(self, names: list[str], reason: Exception) -> None:
        """An `add` was refused; the engine has none of its requests."""

    @abstractmethod
    def on_death(self, reason: str) -> None:
        """The process has died with all its requests; another is being started."""

    @abstractmethod
    def on_restart(self) -> None:
        """The next process is up."""

    @abstractmethod
    def on_end(self, reason: str) -> None:
        """No other process will be started."""

    def on_fetched(self, name: str, fetched: FetchedOffer) -> None:
        """The fetch of a request's blocks from another engine has ended."""
        raise AssertionError("nothing was offered to this engine")

    def on_fetched_ahead(self, handle: int, fetched: FetchedOffer) -> None:
        """A fetch ahead has ended."""
        raise AssertionError("nothing was offered to this engine")

    # ── to the engine ───────────────────────────────────────────────────────────────────────

    @property
    def healthy(self) -> bool:
        return self._up

    @property
    def given_up(self) -> bool:
        """Return whether no other process will be started."""
        return bool(self._lost)

    def load(self) -> EngineLoad:
        return self._load

    @property
    def dropped(self) -> dict[str, int]:
        """The messages that this engine and this process dropped, by reason."""
        return add_counts(self._earlier_dropped, self._load.dropped, self._child.dropped)

    def watch(self) -> None:
        self._child.on_message = self._on_message
        self._child.step_limit_s = self._step_limit_s
        self._supervisors.append(asyncio.create_task(self._supervise()))

    async def stop(self) -> None:
        """End the process; open requests end with an error."""
        for task in self._supervisors:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._give_up("the engine was closed")
        await self._child.stop(STOP_PATIENCE_S)
        await self._launcher.close()

    def add(self, requests: Sequence[EngineRequest]) -> bool:
        """Send the completions of one request, all with the same prompt. Return False if the engine
        is down. Raise `RequestError` if a value of the request cannot be encoded."""
        first = self._next_handle
        converted = [self._child.clock.to_theirs(request) for request in requests]
        add = pack_add(first, converted)
        try:
            message = encode(add)
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        if not self._up:
            return False
        self._next_handle += len(requests)
        for handle, request in enumerate(requests, first):
            self._handles[request.request_id] = handle
            self._names[handle] = request.request_id
        if self._together is not None:
            self._together.append(add)
        else:
            self._child.send_encoded(message)
        return True

    @contextlib.contextmanager
    def adding_together(self) -> Iterator[None]:
        """Send the requests that are added in this context in one message."""
        self._together = adds = list[Add]()
        try:
            yield
        finally:
            self._together = None
            if adds and self._up:
                self._child.send(AddAll(adds))

    def abort_all(self, names: Sequence[str]) -> None:
        """Abort those of the requests that are in the engine. Updates report their ends."""
        handles = [self._handles[name] for name in names if name in self._handles]
        if handles:
            self._child.send(Abort(handles))

    def forget(self, name: str) -> None:
        """Abort a request and ignore its updates, because it continues in another engine."""
        self.abort_all([name])
        self._names.pop(self._handles.pop(name, -1), None)

    def fetch_ahead(self, request: EngineRequest) -> int | None:
        """Make the engine fetch the part of a prompt that another engine has computed. Return the
        handle for `on_fetched_ahead`, or None if the engine is down."""
        if not self._up:
            return None
        handle = self._next_handle
        self._next_handle += 1
        self._ahead.add(handle)
        self._child.send(FetchAhead(handle, self._child.clock.to_theirs(request)))
        return handle

    def release(self, offer: int) -> None:
        """Tell the engine that the blocks of an offer are not needed any more."""
        if self._up:
            self._child.send(Release([offer]))

    def reset_prefix_cache(self) -> None:
        if self._up:  # the next process has an empty cache
            self._child.send(ResetPrefixes())

    async def audit(self) -> None:
        """Make the engine audit its bookkeeping. Raise `EngineError` if the audit fails."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._audits.append(answer)
        self._child.send(Audit())
        problem = await answer
        if problem:
            raise EngineError(f"the audit of the engine failed: {problem}")

    async def start_profile(self) -> None:
        await self._profile(StartProfile())

    async def stop_profile(self) -> bytes:
        return await self._profile(StopProfile())

    async def _profile(self, message: StartProfile | StopProfile) -> bytes:
        if not self._up:
            raise EngineError("the engine is not running")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._profiles.append(answer)
        self._child.send(message)
        return await answer

    # ── messages of the engine ────────────────────────────────────────────────────────────────

    def _on_message(self, message: FromEngine) -> None:
        if not self._up:
            return  # the engine has been given up
        match message:
            case Step():
                self._on_step(message)
            case Refused():
                self._on_refused_add(message)
            case FetchedOffer():
                if message.handle in self._names:
                    self.on_fetched(self._names[message.handle], message)
                elif message.handle in self._ahead:
                    self._ahead.discard(message.handle)
                    self.on_fetched_ahead(message.handle, message)
            case Audited():
                self._audits.pop(0).set_result(message.problem)
            case Profiled():
                self._on_profiled(message)

    def _on_profiled(self, message: Profiled) -> None:
        answer = self._profiles.pop(0)
        if answer.done():  # the caller has left
            return
        if message.problem:
            reason = unpack_error(message.kind, message.problem, "profiling failed")
            answer.set_exception(reason)
        else:
            answer.set_result(message.data)

    def _on_step(self, step: Step) -> None:
        self._load, clock = step.load, self._child.clock
        updates = unpack_step(step, self._names)
        for update in updates:
            if update.record is not None:
                clock.record_to_ours(update.record)
        for full in step.full:
            if full.finish_reason is not None and full.handle in self._names:
                del self._handles[self._names.pop(full.handle)]
        for record in map(clock.step_to_ours, step.steps):
            self.records.add_step(record)
            self._step_s.append(record.committed_s - record.planned_s)
        self.on_updates(updates)

    def _on_refused_add(self, message: Refused) -> None:
        handles = range(message.first, message.first + message.count)
        names = [self._names.pop(handle) for handle in handles if handle in self._names]
        if not names:
            return
        for name in names:
            del self._handles[name]
        reason = unpack_error(message.kind, message.message, "the engine failed on this request")
        self.on_refused(names, reason)

    # ── death and restart ───────────────────────────────────────────────────────────────────

    async def _supervise(self) -> None:
        try:
            deaths = 0
            while deaths < self._restart_limit:
                await self._child.wait()
                lived_s, reason = monotonic() - self._child.ready_s, self._child.how_it_ended()
                if self._wanted.is_set():
                    log.warning("the engine died (%s); starting another", reason)
                    self._died(reason)
                    deaths = 1 if lived_s > STEADY_S else deaths + 1
                else:
                    self._died("it was put to sleep")
                    await self._wanted.wait()
                    deaths = 0
                while not self._up and deaths < self._restart_limit:
                    try:
                        await self._restart(deaths)
                    except Exception as error:
                        reason = str(error)
                        log.warning("the engine could not be started again: %s", reason)
                        deaths += 1
            reason = (
                f"it died {deaths} times in a row soon after its start; the last time, {reason}"
            )
        except Exception as error:
            log.exception("the supervision of the engine failed")
            reason = f"{type(error).__name__}: {error}"
        self._give_up(reason)
        await self._launcher.close()

    def _step_limit_s(self) -> float:
        """Return the time after which a step counts as hanging."""
        return max(TIMEOUTS_OF_STEP * self._hang_timeout_s, LONGEST_STEPS * max(self._step_s))

    def _died(self, reason: str) -> None:
        self._forget_engine()
        self.on_death(reason)

    def _forget_engine(self) -> None:
        self._up = False
        self._settled.clear()
        self._handles.clear()
        self._names.clear()
        self._ahead.clear()
        for answer in self._audits:
            answer.cancel()
        self._audits.clear()
        for profile in self._profiles:
            if not profile.done():
                profile.set_exception(EngineError("the engine ended while it was profiled"))
        self._profiles.clear()
        kv = self._load.kv
        empty = KVUsage(kv.reserved, 0, 0, 0, kv.reserved)
        self._load = replace(self._load, waiting=self.num_open, running=0, kv=empty)

    async def _restart(self, deaths: int) -> None:
        await self._child.kill_and_close()
        self._earlier_dropped = self.dropped
        self._load = replace(self._load, dropped={})
        if deaths > 1:
            backoff_s = FIRST_BACKOFF_S * 2.0 ** (deaths - 2)
            await asyncio.sleep(min(MAX_BACKOFF_S, backoff_s))
        self._child = Child(self._launcher.launch(), self._hang_timeout_s)
        self._child.on_message = self._on_message
        self._child.step_limit_s = self._step_limit_s
        ready = await self._child.start()
        self.info, self.pid, self.host = ready.info, ready.pid, ready.host
        self._load, self._up = ready.load, True
        self._settled.set()
        if deaths:
            self.num_restarts += 1
        self.on_restart()

    def _give_up(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._forget_engine()
        self.on_end(self._lost)
        self._settled.set()
