"""`BodyReader`: reads requests' bodies so that none of them costs the others time or memory.

    arriving ──▶ `_arrived`: bytes received, of all bodies          too slow: 408, too large: 413
    decoding ──▶ `_decoded`: the objects made of them, until they are prompts     wait, then 429

Bytes count once they have arrived, not when they are announced: a client that announces much and
sends little takes no memory from the others. `byte_budget.py` says which body loses its memory if
there is too little for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import msgspec

from twostroke.serve.error_responses import ApiError, as_refusal
from twostroke.serve.fields.body_fields import decode_body
from twostroke.serve.fields.protocol import Body
from twostroke.serve.http.byte_budget import ByteBudget, Reservation, Sender
from twostroke.serve.http.http_request import HttpRequest, IgnoredParts
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
        self._strict = settings.strict_fields
        # At this rate the largest body would take longer than it may.
        slow_rate = self.max_bytes / self._timeout_s if self._timeout_s else 0.0
        self._arrived = ByteBudget(self.max_bytes * 3 // 2, slow_rate)
        self._decoded = ByteBudget(self.max_bytes * MEMORY_PER_BYTE)

    @asynccontextmanager
    async def read(self, http: HttpRequest, kind: type[T]) -> AsyncIterator[tuple[T, int]]:
        """The body as the type it has to be, and its size. Leave once a prompt is made of it."""
        _check_media(http, kind.DECLARED)
        sender = Sender(http.key_number, http.address)
        arrived, decoded = Reservation(self._arrived, sender), Reservation(self._decoded, sender)
        try:
            body, weight = await self._receive(http, arrived)
            num_bytes = len(body)
            if num_bytes > FREE_BYTES:
                await decoded.grow(MEMORY_PER_BYTE * num_bytes + MEMORY_PER_WEIGHT * weight)
            try:
                request, unknown = decode_body(body, kind, self._strict)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise as_refusal(error) from None
            finally:
                del body
                arrived.give_back()
            if unknown:
                http.warn(IgnoredParts("unknown fields were ignored", unknown))
            yield cast(T, request), num_bytes
        finally:
            arrived.give_back()
            decoded.give_back()

    async def _receive(self, http: HttpRequest, held: Reservation) -> tuple[bytearray, int]:
        """Refused as soon as it is known to be too much, before the rest has arrived."""
        length = http.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            return body, await self._receive_into(body, http, held)
        except BaseException:
            body.clear()  # which the error's traceback would keep while the client is answered
            raise

    async def _receive_into(self, body: bytearray, http: HttpRequest, held: Reservation) -> int:
        """Return the weight of the body's JSON."""
        loop, weight = asyncio.get_running_loop(), 0
        until = loop.time() + self._timeout_s
        quota, window_end = 0.0, loop.time() + RATE_WINDOW_S
        while True:
            try:
                async with asyncio.timeout_at(min(until, window_end)) as held.receiving:
                    chunk, more = await http.receive_body()
            except TimeoutError:
                raise held.refused or self._too_slow(loop.time() >= until) from None
            finally:
                held.receiving = None
            if held.refused is not None:
                raise held.refused
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

    def _too_slow(self, late: bool) -> ApiError:
        why = f"did not arrive within {self._timeout_s:g} s"
        if not late:
            why = f"arrives at less than {self._min_rate} bytes a second (--min-body-bytes-per-s)"
        return ApiError(408, f"the body {why}")


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
