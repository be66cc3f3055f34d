"""`Feed`: the outputs of what one HTTP request has asked of the engine, as they arrive.

    engine ──▶ on_output ──▶ tell_now ──────────▶ one write      a reader that keeps up
                   └──▶ [ … ] ──▶ batch() ──▶ one write      one that does not, and every end

What came while the connection was busy is taken in one batch. A failure, wherever it happens (the
engine, the client's leaving, a shutdown), ends the feed for its reader; leaving the feed aborts
what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, cast

from twostroke.engine.api import EngineClient
from twostroke.engine.intake import Prepared
from twostroke.errors import EngineError, RequestError
from twostroke.outputs import RequestOutput

Batch = list[tuple[int, RequestOutput]]  # which of the request's prompts, what is new of it


class CallbackClient(Protocol):
    """An engine client that can do without a task for each request."""

    def submit(
        self,
        prepared: Prepared,
        on_output: Callable[[RequestOutput], None],
        on_error: Callable[[Exception], None],
        request_id: str | None = None,
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...


class Feed:
    """Use as `with`, inside the event loop that the client delivers to."""

    def __init__(self, client: EngineClient, prepared: Sequence[Prepared], request_id: str) -> None:
        self._client = client
        self._prepared = prepared
        several = len(prepared) > 1
        # The engine's names for them.
        self.names = [f"{request_id}.{n}" if several else request_id for n in range(len(prepared))]
        self._ready: Batch = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Tells an output to a reader that waits in `batch`, if it can be told at once.
        self.tell_now: Callable[[int, RequestOutput], bool] | None = None
        self._running: dict[int, Any] = {}  # prompt → its name in the engine, or its task

    def __enter__(self) -> Feed:
        direct = hasattr(self._client, "submit")
        try:
            for index, (prepared, name) in enumerate(zip(self._prepared, self.names, strict=True)):
                start = self._submit if direct else self._pump
                self._running[index] = start(index, prepared, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._running.values():
            if isinstance(handle, str):
                self._client.abort(handle)
            else:
                handle.cancel()  # which leaves the client's stream, and that aborts
        self._running.clear()

    async def batch(self) -> Batch:
        """What has arrived, at least one output; nothing once everything has ended."""
        while not self._ready and self._error is None and self._running:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not self._ready:
            raise self._error
        batch, self._ready = self._ready, []
        return batch

    async def final(self) -> list[RequestOutput]:
        """The last output of every prompt, in order."""
        ends: dict[int, RequestOutput] = {}
        while batch := await self.batch():
            ends.update(batch)
        return [ends[index] for index in range(len(self._prepared))]

    def fail(self, error: Exception) -> None:
        """End it for its reader, now; the first reason counts."""
        self._error = self._error or error
        self._wake()

    # ── arriving ────────────────────────────────────────────────────────────────────────────

    def _submit(self, index: int, prepared: Prepared, name: str) -> str:
        client = cast(CallbackClient, self._client)
        take = partial(self._take, index)
        return client.submit(prepared, take, take, name)

    def _pump(self, index: int, prepared: Prepared, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self._read(index, prepared, name))

    async def _read(self, index: int, prepared: Prepared, name: str) -> None:
        try:
            outputs: Any = self._client.stream(prepared, name)
            async with aclosing(outputs):
                async for output in outputs:
                    self._take(index, output)
        except Exception as error:
            self._take(index, error)

    def _take(self, index: int, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._running.pop(index, None)
            self.fail(output)
            return
        if self._error is not None:  # what comes after a failure is not told
            return
        if output.finished:
            self._running.pop(index, None)
            if error := _failure(output):
                self.fail(error)
                return
        elif self._waiter is not None and self.tell_now is not None and not self._ready:
            try:
                if self.tell_now(index, output):
                    return
            except Exception as error:
                self.fail(error)
                return
        self._ready.append((index, output))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _failure(output: RequestOutput) -> Exception | None:
    if output.error:
        return RequestError(output.error) if output.impossible else EngineError(output.error)
    ends = {completion.finish_reason for completion in output.outputs}
    if ends & {"abort", "error"}:
        return EngineError("the engine ended the request early")
    return None
