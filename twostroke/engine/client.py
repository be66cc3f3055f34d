"""Who carries requests to the engine and updates back.

`SyncClient` turns the loop itself, for a program that waits for its answers. `AsyncEngine` turns
it in a thread of its own and streams to any number of asyncio tasks; a server stands on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from twostroke.engine.api import EngineLoad
from twostroke.engine.build import Engine
from twostroke.engine.intake import Prepared, Prompt
from twostroke.engine.streams import OnError, OnOutput, Stream, StreamingEngine, Streams
from twostroke.errors import EngineError
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.scheduler import Update


class SyncClient:
    """Several users may share one: whoever waits turns the loop for all, and what it finds for
    the others is kept for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.frontend.warm()
        self._kept: dict[str, RequestOutput] = {}  # changed while somebody else turned the loop

    def add(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> str:
        """Queue a request; returns its id. Refusals are raised here and leave nothing behind."""
        frontend, core = self._engine.frontend, self._engine.core
        request_id, requests = frontend.enter(frontend.intake.prepare(prompt, params, priority))
        try:
            for request in requests:
                core.add(request)
        except Exception:
            self.abort(request_id)
            raise
        return request_id

    def abort(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        names = self._engine.frontend.forget(request_id)
        ends = [self._engine.core.abort(name) for name in names]
        _tell_ends(self._engine, [end for end in ends if end is not None])

    def run(self, request_ids: Iterable[str]) -> Iterator[list[RequestOutput]]:
        """Turn the loop until these requests have ended; after each step, which of their outputs
        have changed."""
        left = set(request_ids)
        while left and (self._engine.core.has_work or not left.isdisjoint(self._kept)):
            if left.isdisjoint(self._kept):
                for output in _take(self._engine, self._engine.core.step()):
                    self._kept[output.request_id] = output
            changed = [self._kept.pop(name) for name in left & self._kept.keys()]
            left.difference_update([output.request_id for output in changed if output.finished])
            yield changed


def _take(engine: Engine, updates: list[Update]) -> list[RequestOutput]:
    """The outputs that changed. What a stop string has hit ends in the engine, too."""
    outputs, hits = engine.frontend.take(updates)
    ends = [engine.core.abort(name) for name in hits]
    hit = [end for end in ends if end is not None]
    engine.frontend.take(hit)
    _tell_ends(engine, (*updates, *hit))
    return outputs


def _tell_ends(engine: Engine, updates: Iterable[Update]) -> None:
    """After the front end's last word on them."""
    for update in updates:
        if update.record is not None:
            engine.core.records.tell_request(update.record)


class AsyncEngine(StreamingEngine):
    """Streams from one engine to many tasks. Use as `async with`, or call `close`.

        async for output in engine.generate(prompt, params): ...

    Leaving the loop early aborts the request. The engine's thread owns the core. The lock guards
    the front end and the streams, since requests are prepared where they arrive, and keeps the
    inbox in their order: what is in `_streams` is in the inbox or in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info()
        self.intake = engine.frontend.intake
        engine.frontend.warm()
        self.records = engine.core.records
        self.num_restarts = 0
        self._inbox: queue.SimpleQueue[tuple[Stream, list[EngineRequest]] | str | None]
        self._inbox = queue.SimpleQueue()
        self._streams = Streams(engine.frontend)
        self._lock = threading.Lock()
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._turn, name="twostroke-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs and stop the thread; streams that are open raise `EngineError`."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def healthy(self) -> bool:
        return self._dead is None

    def load(self) -> EngineLoad:
        scheduler = self.engine.core.scheduler
        return EngineLoad(scheduler.num_waiting, scheduler.num_running, scheduler.kv.usage())

    def open(
        self, prepared: Prepared, on_output: OnOutput, on_error: OnError, request_id: str | None
    ) -> Stream:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._dead is not None:
                raise EngineError(f"the engine has stopped ({self._dead}); start a new one")
            told, ended = _in_loop(loop, on_output), _in_loop(loop, on_error)
            stream, requests = self._streams.open(prepared, told, ended, request_id)
            self._inbox.put((stream, requests))
        return stream

    def leave(self, stream: Stream) -> None:
        with self._lock:  # by now the name may be another request's
            if stream in self._streams:
                self._inbox.put(stream.request_id)

    def abort(self, request_id: str) -> None:
        """End a request from anywhere; its stream closes with finish_reason "abort"."""
        self._inbox.put(request_id)

    # ── in the engine's thread ──────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        core = self.engine.core
        try:
            while self._take_messages(block=not core.has_work):
                self._deliver(core.step())
            reason: Exception = EngineError("the engine was closed")
        except Exception as error:
            reason = error
        with self._lock:
            self._dead = reason
            for stream in self._streams:
                self._end(stream, EngineError(f"the engine has stopped ({reason})"))

    def _take_messages(self, block: bool) -> bool:
        """Take in what has arrived; False when asked to stop."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, str):
                self._abort(message)
            else:
                self._add(*message)
            block = block and not self.engine.core.has_work

    def _add(self, stream: Stream, requests: list[EngineRequest]) -> None:
        try:
            for request in requests:
                self.engine.core.add(request)
        except Exception as error:
            with self._lock:
                self._end(stream, error)

    def _abort(self, request_id: str) -> None:
        with self._lock:
            names = self.engine.frontend.children(request_id)
        updates = [self.engine.core.abort(name) for name in names]
        self._deliver([update for update in updates if update is not None])

    def _deliver(self, updates: list[Update]) -> None:
        if not updates:
            return
        _tell_ends(self.engine, updates)  # whoever hears of an end finds it counted
        with self._lock:
            ends = [self.engine.core.abort(name) for name in self._streams.take(updates)]
            hit = [end for end in ends if end is not None]
            self._streams.take(hit)
        _tell_ends(self.engine, hit)

    def _end(self, stream: Stream, reason: Exception) -> None:
        for name in self._streams.close(stream, reason):
            self.engine.core.abort(name)


def _in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None]
) -> Callable[[Any], None]:
    """The callback, to be called from another thread."""

    def call(item: Any) -> None:
        # RuntimeError: the loop is closed, so nobody is listening any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, item)

    return call
