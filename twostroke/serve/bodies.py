"""`BodyReader`: reads requests' bodies so that none of them costs the others time or memory.

    arriving ──▶ `_arrived`: bytes received, of all bodies          too slow: 408, too large: 413
    decoding ──▶ `_decoded`: the objects made of them, until they are prompts     wait, then 429

Bytes count once they are there, not when they are announced, so that whoever announces much and
sends little takes nothing from anybody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

import msgspec

from twostroke.serve.errors import ApiError, as_refusal, retry_after
from twostroke.serve.http import HttpRequest
from twostroke.serve.protocol import Body
from twostroke.serve.settings import MIB, ServeSettings

T = TypeVar("T", bound=Body)

# What decoding costs, in tenths of a microsecond and in about as many tens of bytes. Characters
# inside texts are counted too: telling them apart would take longer than decoding.
WEIGHTS = ((b",", 1), (b"[", 4), (b"{", 4), (b":", 8))
LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN = 8 * MIB, 64
LEAST_WEIGHT, WEIGHT_PER_TOKEN = 512 * 1024, 8
MEMORY_PER_BYTE = 5  # a text with one emoji has four bytes a character, after one while it is read
MEMORY_PER_WEIGHT = 32
FREE_BYTES = 8 * 1024  # bodies up to this are not counted, and wait for nobody
RATE_WINDOW_S = 5.0
MAX_WAIT_S = 5.0  # for memory that others hold, since some of it was last given back
MOST_WAITS = 6  # how many times that it may be in all
MAX_WAITING = 32


def weight_of(body: bytes) -> int:
    return sum(body.count(mark) * each for mark, each in WEIGHTS)


class BodyReader:
    def __init__(self, settings: ServeSettings, max_model_len: int) -> None:
        self.max_bytes = settings.max_body_bytes or max(
            LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len
        )
        self.max_weight = settings.max_body_weight or max(
            LEAST_WEIGHT, WEIGHT_PER_TOKEN * max_model_len
        )
        self._timeout_s = settings.body_timeout_s
        self._min_rate = settings.min_body_bytes_per_s
        self._arrived = ByteBudget(self.max_bytes * 3 // 2)
        self._decoded = ByteBudget(self.max_bytes * MEMORY_PER_BYTE)

    @asynccontextmanager
    async def read(self, http: HttpRequest, kind: type[T]) -> AsyncIterator[tuple[T, int]]:
        """The body as the type it has to be, and its size. Leave once a prompt is made of it."""
        _check_media(http, kind.DECLARED)
        arrived, decoded = Reservation(self._arrived), Reservation(self._decoded)
        try:
            body, weight = await self._receive(http, arrived)
            num_bytes = len(body)
            if num_bytes > FREE_BYTES:
                await decoded.grow(MEMORY_PER_BYTE * num_bytes + MEMORY_PER_WEIGHT * weight)
            try:
                request = kind.decode(body)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise as_refusal(error, kind.__struct_fields__) from None
            finally:
                del body
                arrived.give_back()
            yield request, num_bytes
        finally:
            arrived.give_back()
            decoded.give_back()

    async def _receive(self, http: HttpRequest, held: Reservation) -> tuple[bytearray, int]:
        """Refused as soon as it is known to be too much, before the rest has arrived."""
        length = http.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        body, weight = bytearray(), 0
        until = loop.time() + self._timeout_s
        quota, window_end = 0.0, loop.time() + RATE_WINDOW_S
        while True:
            try:
                async with asyncio.timeout_at(min(until, window_end)):
                    chunk, more = await http.receive_body()
            except TimeoutError:
                raise self._too_slow(loop.time() >= until) from None
            if len(body) + len(chunk) > self.max_bytes:
                raise self._too_large()
            weight += weight_of(chunk)
            if weight > self.max_weight:
                raise self._too_heavy()
            if len(body) + len(chunk) > FREE_BYTES:
                waited = loop.time()
                await held.grow(len(body) + len(chunk))
                waited = loop.time() - waited  # not the sender's fault
                until, window_end = until + waited, window_end + waited
            body += chunk
            if not more:
                return body, weight
            if len(body) >= quota:
                quota = len(body) + self._min_rate * RATE_WINDOW_S
                window_end = loop.time() + RATE_WINDOW_S

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self.max_bytes} bytes; send less, or raise"
        return ApiError(413, f"{message} --max-body-bytes", code="body_too_large")

    def _too_heavy(self) -> ApiError:
        return ApiError(
            413,
            f"the body's JSON weighs more than {self.max_weight} (a comma 1, a bracket 4, a colon "
            "8, within texts too); send fewer values, or raise --max-body-weight",
            code="body_too_large",
        )

    def _too_slow(self, late: bool) -> ApiError:
        why = f"did not arrive within {self._timeout_s:g} s"
        if not late:
            why = f"arrives at less than {self._min_rate} bytes a second (--min-body-bytes-per-s)"
        return ApiError(408, f"the body {why}")


class ByteBudget:
    """Memory that all bodies share. One that finds too little left waits in turn, for a while.

    Bodies that have arrived in part hold some and wait for more, so that all of them may wait for
    each other. Who has waited too long is refused; the others go on waiting for what it gave back.
    """

    def __init__(self, total: int) -> None:
        self.total = self.left = total
        self._given_back_s = 0.0  # when that was, the last time
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, amount: int) -> None:
        if amount <= self.left and not self._waiting:
            self.left -= amount
            return
        if len(self._waiting) >= MAX_WAITING:
            raise _no_memory()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        started = monotonic()
        try:
            while not turn.done():
                since = min(max(started, self._given_back_s), started + MOST_WAITS * MAX_WAIT_S)
                left = since + MAX_WAIT_S - monotonic()
                if left <= 0:
                    raise _no_memory()
                await asyncio.wait({turn}, timeout=left)
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came at the last moment
                self.give_back(amount)
            turn.cancel()
            self._grant()
            raise

    def give_back(self, amount: int) -> None:
        if amount:
            self.left += amount
            self._given_back_s = monotonic()
        self._grant()

    def _grant(self) -> None:
        self._waiting = deque(one for one in self._waiting if not one[1].done())
        while self._waiting and self._waiting[0][0] <= self.left:
            amount, turn = self._waiting.popleft()
            self.left -= amount
            turn.set_result(None)


class Reservation:
    """What one body has taken of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    async def grow(self, to: int) -> None:
        more = min(to, self._budget.total) - self._held
        await self._budget.take(more)
        self._held += more

    def give_back(self) -> None:
        self._budget.give_back(self._held)
        self._held = 0


def _no_memory() -> ApiError:
    message = "too many large requests are being read; try again in a moment"
    return ApiError(429, message, code="too_many_bytes", headers=retry_after(1))


def is_json(http: HttpRequest) -> bool:
    """Return whether the Content-Type header says that the body is JSON."""
    media = (http.header(b"content-type") or b"").split(b";")[0].strip().lower()
    return media == b"application/json"


def _check_media(http: HttpRequest, declared: bool) -> None:
    """`declared`: it has to say that it is JSON. A browser lets the pages of any site send a body
    that does not; it names the site then."""
    from_page = http.header(b"origin") is not None
    if not is_json(http) and (declared or from_page):
        raise ApiError(415, "send JSON, with the header 'Content-Type: application/json'")
    if (http.header(b"content-encoding") or b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not read; send plain JSON")
