"""`BodyReader`: reads request bodies. Their memory is limited, so that no body harms other clients.

    `_arrived` limits the received bytes of all bodies that are arriving
    `_decoded` limits the memory of all decoded bodies, until their prompts have been made

A body that is too slow gets 408, a body that is too large 413. Bytes count when they arrive, not
when Content-Length announces them, so a client that announces much and sends little takes no memory
from other clients.

A `ByteBudget` is memory that all bodies share. A body that needs more than is left waits. Meanwhile
the budget makes room for the waiting body:

    1. The slowest body that arrives at less than `slow_rate` loses its memory (408).
    2. Otherwise the key whose bodies hold the most memory is found. If they hold more than those of
       the waiting body's key would, the slowest of them loses its memory (429). Within the waiting
       body's key, addresses are compared in the same way.
    3. If all bodies that hold memory wait for more, the newest of them is refused (429).
    4. Otherwise a body that has waited for too long is refused (429).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple, TypeVar, cast

import msgspec

from twostroke.serve.error_responses import ApiError, as_decode_error, retry_after
from twostroke.serve.fields.body_fields import Body, decode_body
from twostroke.serve.http.http_request import HttpRequest, IgnoredParts
from twostroke.serve.settings import MIB, ServeSettings

T = TypeVar("T", bound=Body)

# The cost of decoding JSON, by character. A weight of 1 is about 0.1 µs and 10 bytes of memory.
# Characters inside strings count too, because finding the strings would take longer than decoding.
WEIGHTS = ((b",", 1), (b"[", 4), (b"{", 4), (b":", 8))
MIN_BODY_LIMIT_BYTES, BODY_BYTES_PER_TOKEN = 8 * MIB, 64
MIN_WEIGHT_LIMIT, WEIGHT_PER_TOKEN = 512 * 1024, 8
MEMORY_PER_BYTE = 5  # a str with an emoji has 4 bytes per character, and decoding needs 1 more
MEMORY_PER_WEIGHT = 32
FREE_BYTES = 8 * 1024  # bodies up to this size are not counted and never wait
RATE_WINDOW_S = 5.0


def json_weight(body: bytes) -> int:
    """Return the cost of decoding this JSON, in the unit of `--max-body-weight`."""
    return sum(body.count(mark) * each for mark, each in WEIGHTS)


class BodyReader:
    def __init__(self, settings: ServeSettings, max_model_len: int) -> None:
        self.max_bytes = settings.max_body_bytes or max(
            MIN_BODY_LIMIT_BYTES, BODY_BYTES_PER_TOKEN * max_model_len
        )
        self.max_weight = settings.max_body_weight or max(
            MIN_WEIGHT_LIMIT, WEIGHT_PER_TOKEN * max_model_len
        )
        self._timeout_s = settings.body_timeout_s
        self._min_rate = settings.min_body_bytes_per_s
        self._strict = settings.strict_fields
        # At a lower rate the largest allowed body would not arrive in time.
        slow_rate = self.max_bytes / self._timeout_s if self._timeout_s else 0.0
        self._arrived = ByteBudget(self.max_bytes * 3 // 2, slow_rate)
        self._decoded = ByteBudget(self.max_bytes * MEMORY_PER_BYTE)

    @asynccontextmanager
    async def read(self, http: HttpRequest, request_type: type[T]) -> AsyncIterator[tuple[T, int]]:
        """Yield the decoded body and its size in bytes. Its memory counts as used until the block
        ends, so end the block as soon as the prompt has been made."""
        _check_media(http, request_type.REQUIRES_JSON_CONTENT_TYPE)
        sender = Sender(http.key_number, http.address)
        arrived, decoded = Reservation(self._arrived, sender), Reservation(self._decoded, sender)
        try:
            body, weight = await self._receive(http, arrived)
            num_bytes = len(body)
            if num_bytes > FREE_BYTES:
                await decoded.grow(MEMORY_PER_BYTE * num_bytes + MEMORY_PER_WEIGHT * weight)
            try:
                request, unknown = decode_body(body, request_type, self._strict)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise as_decode_error(error) from None
            finally:
                del body
                arrived.give_back()
            if unknown:
                http.warn(IgnoredParts("unknown fields were ignored", unknown))
            yield cast(T, request), num_bytes
        finally:
            arrived.give_back()
            decoded.give_back()

    async def _receive(self, http: HttpRequest, memory: Reservation) -> tuple[bytearray, int]:
        """Return the body and the weight of its JSON. Refuse a body as soon as it is too large."""
        length = http.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            return body, await self._receive_into(body, http, memory)
        except BaseException:
            body.clear()  # the traceback refers to the body until the error response is sent
            raise

    async def _receive_into(self, body: bytearray, http: HttpRequest, memory: Reservation) -> int:
        """Append the received bytes to `body`. Return the weight of the body's JSON."""
        loop, weight = asyncio.get_running_loop(), 0
        until = loop.time() + self._timeout_s
        quota, window_end = 0.0, loop.time() + RATE_WINDOW_S
        while True:
            try:
                async with asyncio.timeout_at(min(until, window_end)) as memory.receiving:
                    chunk, more = await http.receive_body()
            except TimeoutError:
                raise memory.refused or self._too_slow(loop.time() >= until) from None
            finally:
                memory.receiving = None
            if memory.refused is not None:
                raise memory.refused
            if len(body) + len(chunk) > self.max_bytes:
                raise self._too_large()
            weight += json_weight(chunk)
            if weight > self.max_weight:
                raise self._too_heavy()
            if len(body) + len(chunk) > FREE_BYTES:
                began = loop.time()
                await memory.grow(len(body) + len(chunk))
                waited = loop.time() - began  # does not count against the sender
                until, window_end = until + waited, window_end + waited
            body += chunk
            if not more:
                return weight
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

    def _too_slow(self, out_of_time: bool) -> ApiError:
        why = f"arrives at less than {self._min_rate} bytes a second (--min-body-bytes-per-s)"
        if out_of_time:
            why = f"did not arrive within {self._timeout_s:g} s"
        return ApiError(408, f"the body {why}")


def is_json(http: HttpRequest) -> bool:
    """Return whether the Content-Type header says that the body is JSON."""
    media = (http.header(b"content-type") or b"").split(b";")[0].strip().lower()
    return media == b"application/json"


def _check_media(http: HttpRequest, required: bool) -> None:
    """Check Content-Type and Content-Encoding. `required`: the type must be application/json.

    A browser lets pages of every site send bodies of other types. So a request from a page, which
    has an Origin header, must always have this type."""
    from_page = http.header(b"origin") is not None
    if not is_json(http) and (required or from_page):
        raise ApiError(415, "send JSON, with the header 'Content-Type: application/json'")
    if (http.header(b"content-encoding") or b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not read; send plain JSON")


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


MAX_WAIT_S = 5.0  # how long a body waits for memory after memory was last given back
MAX_WAITS = 6  # a body waits at most this many times `MAX_WAIT_S` in total
MAX_WAITING = 32  # bodies
TICK_S = 0.5  # between two checks for slow bodies
SLOW_AFTER_S = 2.0  # the rate of a younger body is not known


class Sender(NamedTuple):
    key: int | None = None  # the number of its API key
    address: str = ""

    @property
    def shares(self) -> tuple[tuple[int | None, str | None], ...]:
        """The groups in which the sender's bodies are counted: its key, then its address."""
        return (self.key, None), (self.key, self.address)


class ByteBudget:
    def __init__(self, total: int, slow_rate: float = 0.0) -> None:
        """`slow_rate`, in bytes per second: slower bodies lose their memory to waiting bodies."""
        self.total = self.left = total
        self._slow_rate = slow_rate
        self._given_back_s = 0.0  # when memory was last given back
        self._holding: dict[Reservation, None] = {}  # oldest first
        self._held: Counter[tuple[int | None, str | None]] = Counter()  # bytes by key and address
        self._waiting: dict[Reservation, Turn] = {}  # oldest first

    def add(self, holder: Reservation, amount: int) -> None:
        """Count `amount` bytes, which may be negative."""
        self.left -= amount
        holder.num_bytes += amount
        for share in holder.sender.shares:
            self._held[share] += amount
            if not self._held[share]:
                del self._held[share]
        if holder.num_bytes:
            self._holding[holder] = None
        else:
            self._holding.pop(holder, None)

    async def take(self, holder: Reservation, amount: int) -> None:
        """Take `amount` bytes, if necessary after a wait. Raise `ApiError` if there are none."""
        if amount <= self.left and not self._waiting:
            self.add(holder, amount)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._displace(holder)
        self._waiting[holder] = turn = Turn(amount, asyncio.get_running_loop().create_future())
        started = monotonic()
        try:
            self._grant_waiting()
            while not turn.granted.done():
                since = min(max(started, self._given_back_s), started + MAX_WAITS * MAX_WAIT_S)
                left = since + MAX_WAIT_S - monotonic()
                if left <= 0:
                    raise no_memory()
                await asyncio.wait({turn.granted}, timeout=min(left, TICK_S))
                self._grant_waiting()
            if (refusal := turn.granted.result()) is not None:
                raise refusal
        finally:
            self._waiting.pop(holder, None)
            self._grant_waiting()

    def give_back(self, holder: Reservation) -> None:
        if holder.num_bytes:
            self.add(holder, -holder.num_bytes)
            self._given_back_s = monotonic()
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Give memory to waiting bodies, first to the key and address that hold the least. If too
        little is left for a body, make room for it."""
        while self._waiting:
            holder = min(self._waiting, key=self._order)
            amount, granted = self._waiting[holder]
            if amount > self.left:
                self._make_room(holder, amount)
                return
            del self._waiting[holder]
            self.add(holder, amount)
            granted.set_result(None)

    def _order(self, holder: Reservation) -> tuple[int, ...]:
        return tuple(self._held[share] for share in holder.sender.shares)

    def _make_room(self, asking: Reservation, amount: int) -> None:
        """Refuse bodies until enough memory for the `asking` body will be given back."""
        returning = sum(holder.num_bytes for holder in self._holding if holder.refused)
        while self.left + returning < amount and (loser := self._loser(asking, amount)):
            returning += loser.num_bytes
            if (turn := self._waiting.pop(loser, None)) is not None:
                turn.granted.set_result(loser.refused)

    def _loser(self, asking: Reservation, amount: int) -> Reservation | None:
        """Refuse the body that loses its memory to the `asking` body, and return it."""
        others = [
            other
            for other in self._holding
            if other is not asking and other.can_lose(self._waiting)
        ]
        slowest = min(others, key=Reservation.rate, default=None)
        if slowest is not None and slowest.rate() < self._slow_rate:
            slowest.refuse(too_slow())
            return slowest
        for level, own in enumerate(asking.sender.shares):
            share_of = {other: other.sender.shares[level] for other in others}
            largest = max(share_of.values(), key=self._held.__getitem__, default=own)
            if self._held[largest] > self._held[own] + amount:
                of_largest = (other for other, share in share_of.items() if share == largest)
                slowest = min(of_largest, key=Reservation.rate)
                slowest.refuse(no_memory())
                return slowest
            others = [other for other, share in share_of.items() if share == own]
        return self._newest_of_a_deadlock(asking)

    def _newest_of_a_deadlock(self, asking: Reservation) -> Reservation | None:
        """Refuse the newest waiting body if every body that holds memory waits for more."""
        if any(body not in self._waiting and body.refused is None for body in self._holding):
            return None
        losers = [body for body in self._waiting if body in self._holding and body is not asking]
        if not losers:
            return None
        losers[-1].refuse(no_memory())
        return losers[-1]

    def _displace(self, asking: Reservation) -> None:
        """Refuse the newest body of the key or address with the most waiting bodies; raise an error
        if this is the sender of the `asking` body."""
        for level, own in enumerate(asking.sender.shares):
            counts = Counter(holder.sender.shares[level] for holder in self._waiting)
            (share, count), *_ = counts.most_common(1)
            if count > counts[own] + 1:
                loser = [body for body in self._waiting if body.sender.shares[level] == share][-1]
                self._waiting.pop(loser).granted.set_result(no_memory())
                return
        raise no_memory()


class Turn(NamedTuple):
    amount: int
    granted: asyncio.Future[ApiError | None]  # None, or the reason of a refusal


class Reservation:
    """The bytes that one body has taken from a budget."""

    def __init__(self, budget: ByteBudget, sender: Sender | None = None) -> None:
        self.sender = sender or Sender()
        self.num_bytes = 0
        self.refused: ApiError | None = None  # set when the body loses its memory
        self.receiving: asyncio.Timeout | None = None  # the timeout of a wait for more bytes
        self._budget = budget
        self._since_s = monotonic()  # the start, moved later by the time of waits for memory
        self._waits_since_s: float | None = None

    async def grow(self, to: int) -> None:
        amount = min(to, self._budget.total) - self.num_bytes
        self._waits_since_s = began = monotonic()
        try:
            await self._budget.take(self, amount)
        finally:
            self._waits_since_s = None
            self._since_s += monotonic() - began

    def give_back(self) -> None:
        self._budget.give_back(self)

    def rate(self) -> float:
        """Return bytes per second; infinity for a body younger than `SLOW_AFTER_S`."""
        now = monotonic() if self._waits_since_s is None else self._waits_since_s
        age_s = now - self._since_s
        return self.num_bytes / age_s if age_s > SLOW_AFTER_S else float("inf")

    def can_lose(self, waiting: dict[Reservation, Turn]) -> bool:
        """Return whether the body can be refused now: it waits for bytes or for memory."""
        receiving = self.receiving is not None and not self.receiving.expired()
        return self.refused is None and (receiving or self in waiting)

    def refuse(self, error: ApiError) -> None:
        self.refused = error
        if self.receiving is not None:
            self.receiving.reschedule(asyncio.get_running_loop().time())


def no_memory() -> ApiError:
    message = "too many large requests are being read; try again in a moment"
    return ApiError(429, message, code="too_many_bytes", headers=retry_after(1))


def too_slow() -> ApiError:
    return ApiError(
        408,
        "the body arrives too slowly, and other requests need its memory; send it faster",
    )
