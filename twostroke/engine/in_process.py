"""Clients of an engine in the same process.

`SyncClient` runs the engine's loop in the caller's thread, for a program that waits for its
answers. `AsyncEngine` runs the loop in a thread of its own and streams to any number of asyncio
tasks; a server can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from twostroke.engine.api import EngineLoad
from twostroke.engine.build import Engine, build_engine
from twostroke.engine.input_processor import Prompt
from twostroke.engine.output_processor import OnError, OnOutput, RequestState
from twostroke.engine.request_client import RequestClient
from twostroke.errors import EngineError
from twostroke.observe.totals import Totals, TransferTotals
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.updates import Update
from twostroke.vllm_settings import VLLMSettings

T = TypeVar("T")
# To the engine's thread: a request, a function to call, a request to abort, None to end.
Inbound = tuple[RequestState, list[EngineRequest]] | Callable[[], None] | RequestState | None


class SyncClient:
    """Several users may share one client: each `run` runs the loop for all requests, and outputs of
    other users are kept for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info, self.records = engine.info(), engine.core.records
        self.totals: Totals | None = None
        self.transfers: TransferTotals | None = None
        self.healthy, self.num_restarts = True, 0  # the engine runs as long as this process
        self.asleep, self.phase = False, ""
        self.dropped: dict[str, int] = {}
        engine.output_processor.warm()
        # Outputs that changed while another user ran the loop, by request id.
        self._kept: dict[str, RequestOutput] = {}

    def load(self) -> EngineLoad:
        return _load(self._engine)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        on_output: OnOutput | None = None,
    ) -> str:
        """Queue a request and return its id. Raise an error if the request is refused.

        `on_output`: called with each output while the loop runs, in the form of `output_kind`."""
        engine = self._engine
        request = engine.input_processor.process(prompt, params, priority)
        state, requests = engine.output_processor.add(request, request_id, on_output)
        try:
            for one in requests:
                engine.core.add(one)
        except Exception:
            self.abort(state.request_id)
            raise
        return state.request_id

    def abort(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        state = self._engine.output_processor.get(request_id)
        if state is not None:
            names = self._engine.output_processor.close(state)
            _note_ends(self._engine, _abort_all(self._engine, names))

    def run(self, request_ids: Iterable[str]) -> Iterator[list[RequestOutput]]:
        """Run the loop until these requests have ended; yield their changed outputs after each
        step."""
        left = set(request_ids)
        while left and (self._engine.core.has_work or not left.isdisjoint(self._kept)):
            if left.isdisjoint(self._kept):
                for output in self.step():
                    self._kept[output.request_id] = output
            changed = [self._kept.pop(name) for name in left & self._kept.keys()]
            left.difference_update([output.request_id for output in changed if output.finished])
            yield changed

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the changed outputs of all requests; later steps change these
        objects again."""
        engine = self._engine
        updates = engine.core.step()
        outputs, aborts = engine.output_processor.process(updates)
        if aborts:
            ends = _abort_all(engine, aborts)
            engine.output_processor.process(ends)
            updates += ends
        _note_ends(engine, updates)
        return outputs


def _load(engine: Engine) -> EngineLoad:
    scheduler = engine.core.scheduler
    return EngineLoad(
        engine.core.num_waiting,
        scheduler.num_running,
        scheduler.kv.usage(),
        tiers=scheduler.kv.tier_status(),
    )


def _abort_all(engine: Engine, names: Iterable[str]) -> list[Update]:
    updates = [engine.core.abort(name) for name in names]
    return [update for update in updates if update is not None]


def _note_ends(engine: Engine, updates: Iterable[Update]) -> None:
    """Pass the records of requests that have ended to the listeners of the records."""
    for update in updates:
        if update.record is not None:
            engine.core.records.notify_listeners(update.record)


class AsyncEngine(RequestClient):
    """Streams from one engine to many tasks. Use as `async with`, or call `close`.

        async for output in engine.generate(prompt, params): ...

    Leaving the loop early aborts the request. The engine's thread owns the core. The lock guards
    the output processor, which the caller's thread uses, too. It also makes sure that each request
    in `_outputs` is in the inbox or in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info()
        self.input_processor = engine.input_processor
        self._outputs = engine.output_processor
        self._outputs.warm()
        self.records = engine.core.records
        self.num_restarts = 0
        self._inbox: queue.SimpleQueue[Inbound]
        self._inbox = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: VLLMSettings) -> AsyncEngine:
        return cls(build_engine(engine_args.engine_config()))

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort running requests and stop the thread. Open streams raise `EngineError`."""
        self._inbox.put(None)
        self._thread.join()

    shutdown = close  # vLLM's name

    @property
    def healthy(self) -> bool:
        return self._dead is None

    def load(self) -> EngineLoad:
        return _load(self.engine)

    def submit(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        on_error: OnError,
        request_id: str | None = None,
    ) -> RequestState:
        """Submit a request. The callbacks are called in the event loop of the caller."""
        loop = asyncio.get_running_loop()
        listeners = _in_loop(loop, on_output), _in_loop(loop, on_error)
        return super().submit(request, *listeners, request_id)

    def _why_stopped(self) -> str:
        return "" if self._dead is None else str(self._dead) or type(self._dead).__name__

    def _send(self, state: RequestState, requests: list[EngineRequest]) -> None:
        self._inbox.put((state, requests))

    def _abort(self, state: RequestState) -> None:
        self._inbox.put(state)

    def reset_prefix_cache(self) -> None:
        self._inbox.put(self.engine.core.reset_prefix_cache)

    async def start_profile(self) -> None:
        await self._call(self.engine.core.profiler.start)

    async def stop_profile(self) -> bytes:
        return json.dumps(await self._call(self.engine.core.profiler.stop)).encode()

    async def _call(self, function: Callable[[], T]) -> T:
        """Call the function in the engine's thread. Return its result or raise its exception."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller has left
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        with self._lock:
            if self._dead is not None:
                raise EngineError(f"the engine has stopped ({self._dead})")
            self._inbox.put(run)
        return await asyncio.wrap_future(done)

    # ── in the engine's thread ──────────────────────────────────────────────────────────────

    def _run(self) -> None:
        core = self.engine.core
        try:
            while self._receive(block=not core.has_work):
                self._process(core.step())
            reason: Exception = EngineError("the engine was closed")
        except Exception as error:
            reason = error
        with self._lock:
            self._dead = reason
            for state in self._outputs:
                self._end(state, EngineError(f"the engine has stopped ({reason})"))

    def _receive(self, block: bool) -> bool:
        """Handle the messages in the inbox; return False if the thread must stop."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, RequestState):
                self._abort_in_core(message)
            elif callable(message):
                message()
            else:
                self._add(*message)
            block = block and not self.engine.core.has_work

    def _add(self, state: RequestState, requests: list[EngineRequest]) -> None:
        try:
            for request in requests:
                self.engine.core.add(request)
        except Exception as error:
            with self._lock:
                self._end(state, error)

    def _abort_in_core(self, state: RequestState) -> None:
        with self._lock:
            names = self._outputs.ids_in_engine(state)
        self._process(_abort_all(self.engine, names))

    def _process(self, updates: list[Update]) -> None:
        if not updates:
            return
        _note_ends(self.engine, updates)  # metrics count the end before the user sees it
        with self._lock:
            _, aborts = self._outputs.process(updates)
            ends = _abort_all(self.engine, aborts)
            self._outputs.process(ends)
        _note_ends(self.engine, ends)

    def _end(self, state: RequestState, reason: Exception) -> None:
        _abort_all(self.engine, self._outputs.close(state, reason))


def _in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None]
) -> Callable[[Any], None]:
    """Return a function that makes the loop call `callback`. Any thread may call the function."""

    def call(item: Any) -> None:
        # RuntimeError: the loop is closed, so its tasks have ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, item)

    return call
