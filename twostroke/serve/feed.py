"""`Feed`: what one HTTP request has asked of the engine, as it arrives.

    engine ──▶ output ──▶ written at once ──▶ the connection      a reader that keeps up
                               └──▶ unread ──▶ next()             one that does not, and every end
    engine ──▶ last output of each prompt ──▶ final()             an answer in one piece

An output becomes bytes when it arrives, so that what a slow reader has not taken yet is small, is
counted, and is cheap to write or to drop. A reader that lets too much wait loses its stream, so
does whoever lets most wait when all of them together do (`Unread`). A failure, wherever it happens
(the engine, the client's leaving, a shutdown), ends the feed for its reader; leaving the feed
aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, cast

from twostroke.engine.api import EngineClient
from twostroke.engine.intake import Prepared
from twostroke.errors import EngineError, RequestError
from twostroke.outputs import RequestOutput
from twostroke.plan import BROKEN_LOGITS
from twostroke.serve.errors import ApiError, ClientGone
from twostroke.serve.exchange import Direct

OPENED_AT_ONCE = 16  # prompts of one request that are sent before other requests get their turn
MOST_UNREAD = 8  # streams with all that one may have: so much may be unread in total

Written = bytes | Iterator[bytes]  # an iterator: too much to be made at once


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


class Unread:
    """What streams have written and their clients have not read: bounded for each, and in total."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_total_bytes = MOST_UNREAD * max_bytes
        self._bytes: dict[Feed, int] = {}
        self.num_bytes = 0

    def add(self, feed: Feed, count: int) -> None:
        """One output may have any size; what comes after it may not wait."""
        before = self._bytes.get(feed, 0)
        self._bytes[feed] = before + count
        self.num_bytes += count
        if before and before + count > self._max_bytes:
            self._end(feed)
        elif self.num_bytes > self.max_total_bytes and len(self._bytes) > 1:
            self._end(max(self._bytes, key=lambda one: self._bytes[one]))

    def remove(self, feed: Feed, count: int | None = None) -> None:
        """So much has been read, or will never be; None: all of it."""
        held = self._bytes.pop(feed, 0)
        left = 0 if count is None else max(0, held - count)
        self.num_bytes -= held - left
        if left:
            self._bytes[feed] = left

    def _end(self, feed: Feed) -> None:
        count = self._bytes[feed]
        feed.give_up(
            ApiError(
                408,
                f"the stream was not read: {count} bytes of it were waiting, and at most "
                f"{self._max_bytes} may (--max-unread-bytes); read faster, or ask for less",
                code="slow_reader",
            )
        )


class Feed:
    """Use as `async with`, inside the event loop that the client delivers to."""

    def __init__(
        self,
        client: EngineClient,
        prepared: Sequence[Prepared],
        request_id: str,
        unread: Unread,
        write: Callable[[int, RequestOutput], Written] | None = None,
    ) -> None:
        self._client = client
        self._prepared = prepared
        several = len(prepared) > 1
        # The engine's names for them.
        self.names = [f"{request_id}.{n}" if several else request_id for n in range(len(prepared))]
        self._unread = unread
        self._write = write  # makes a stream's events; None: only the last outputs are wanted
        self._ready: list[Written] = []
        self._handed = 0  # bytes that `next` has given last
        self._ends: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.direct: Direct | None = None  # the connection, once the answer has begun
        self._running: dict[int, Any] = {}  # prompt → its name in the engine, or its task

    async def __aenter__(self) -> Feed:
        start = self._submit if hasattr(self._client, "submit") else self._pump
        try:
            for index, (prepared, name) in enumerate(zip(self._prepared, self.names, strict=True)):
                if index and index % OPENED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if self._error is None:
                    self._running[index] = start(index, prepared, name)
        except BaseException:
            self._abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort()
        self._drop()

    def _abort(self) -> None:
        for handle in self._running.values():
            if isinstance(handle, str):
                self._client.abort(handle)
            else:
                handle.cancel()  # which leaves the client's stream, and that aborts
        self._running.clear()

    def _drop(self) -> None:
        self._ready.clear()
        self._unread.remove(self)

    async def next(self) -> list[Written]:
        """What there is to be told, at least something; nothing once all has been. Until the next
        call it counts as unread."""
        self._unread.remove(self, self._handed)
        self._handed = 0
        while not self._ready and self._error is None and self._running:
            await self._wait()
        if self._error is not None and not self._ready:
            raise self._error
        ready, self._ready = self._ready, []
        self._handed = sum(map(_size, ready))
        return ready

    async def final(self) -> list[RequestOutput]:
        """The last output of every prompt, in order."""
        while self._error is None and self._running:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._ends[index] for index in range(len(self._prepared))]

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def fail(self, error: Exception) -> None:
        """End it for its reader, after what is ready; the first reason counts."""
        self._error = self._error or error
        if isinstance(error, ClientGone):
            self._drop()
        self._wake()

    def give_up(self, error: Exception) -> None:
        """`fail`, and keep nothing: whether the reader will ever look is not known."""
        self._abort()
        self._drop()
        self.fail(error)

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
        if self._write is None:
            self._ends[index] = output
            if not self._running:
                self._wake()
            return
        try:
            self._tell(self._write(index, output), output.finished)
        except Exception as error:
            self.fail(error)

    def _tell(self, written: Written, last: bool) -> None:
        direct = self.direct
        if (
            self._waiter is not None
            and direct is not None
            and not (last or self._ready)
            and isinstance(written, bytes)
            and direct.ready()
        ):
            if written:
                direct.write(written)
            return
        if written:
            self._ready.append(written)
            self._unread.add(self, _size(written))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(written: Written) -> int:
    """What is not made yet takes no room, but makes what comes after it wait."""
    return len(written) if isinstance(written, bytes) else 1


def _failure(output: RequestOutput) -> Exception | None:
    if output.error == BROKEN_LOGITS:
        return ApiError(500, output.error, code="broken_logits")
    if output.error:
        return RequestError(output.error) if output.impossible else EngineError(output.error)
    ends = {completion.finish_reason for completion in output.outputs}
    if ends & {"abort", "error"}:
        return EngineError("the engine ended the request early")
    return None
