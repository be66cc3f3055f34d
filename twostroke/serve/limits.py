"""Limits over all requests: how many sequences may be open (`Admission`), and how much of what was
written may be unread (`UnreadBytes`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from twostroke.engine.api import EngineClient
from twostroke.serve.errors import ApiError, retry_after, unavailable

MAX_CHOICES, CHOICES_PER_CORE = 128, 8
MOST_UNREAD = 8  # streams with all that one may have: so much may be unread in total


class Admission:
    """Counts the sequences this server has open, so that they cannot pile up without bound."""

    def __init__(self, client: EngineClient, max_queue: int, max_choices: int | None) -> None:
        self._client = client
        self._max_queue = max_queue
        # They run side by side, so every step of every stream takes longer by all of them.
        on_gpu = client.info.device.startswith("cuda")
        most = MAX_CHOICES if on_gpu else min(MAX_CHOICES, CHOICES_PER_CORE * (os.cpu_count() or 1))
        self._max_choices = max_choices or most
        self.num_open = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Raises `ApiError` if `count` more sequences cannot be taken; also called early, before a
        prompt is read."""
        if self.draining:
            raise unavailable("the server is shutting down; ask another one")
        if not self._client.healthy:
            raise unavailable("the engine is not running; try again in a moment")
        # The engine's own word may be a moment old, and memory may hold fewer than
        # max_num_seqs: so both counts are looked at.
        limit = self._client.info.max_num_seqs + self._max_queue
        most = min(limit, self._max_choices)
        if count > most:
            raise ApiError(
                400,
                f"n: {count} texts are asked for at once (prompts times n), and at most {most} may "
                "be; send several requests, or raise --max-choices",
                param="n",
            )
        waiting = self._client.load().waiting
        if self.num_open + count > limit or (waiting and waiting + count > self._max_queue):
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and at most {self._max_queue} may; try again "
                "in a moment",
                code="queue_full",
                headers=retry_after(1),
            )

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Count them as open meanwhile."""
        self.check(count)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count


class OpenStream(Protocol):
    """A response being streamed (`ResponseStream`)."""

    def fail(self, error: Exception) -> None: ...

    def cancel(self, error: Exception) -> None: ...


class UnreadBytes:
    """Bytes that streams have written and their clients have not read: limited for each stream, and
    in total."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_total_bytes = MOST_UNREAD * max_bytes
        self._bytes: dict[OpenStream, int] = {}
        self.num_bytes = 0

    def add(self, stream: OpenStream, count: int) -> None:
        """One output may have any size, but then nothing more may wait behind it."""
        before = self._bytes.get(stream, 0)
        self._bytes[stream] = before + count
        self.num_bytes += count
        if before and before + count > self._max_bytes:
            self._end(stream)
        elif self.num_bytes > self.max_total_bytes and len(self._bytes) > 1:
            self._end(max(self._bytes, key=lambda one: self._bytes[one]))

    def remove(self, stream: OpenStream, count: int | None = None) -> None:
        """`count` bytes have been read, or were dropped; None: all of them."""
        held = self._bytes.pop(stream, 0)
        left = 0 if count is None else max(0, held - count)
        self.num_bytes -= held - left
        if left:
            self._bytes[stream] = left

    def _end(self, stream: OpenStream) -> None:
        count = self._bytes[stream]
        stream.cancel(
            ApiError(
                408,
                f"the stream was not read: {count} bytes of it were waiting, and at most "
                f"{self._max_bytes} may (--max-unread-bytes); read faster, or ask for less",
                code="slow_reader",
            )
        )
