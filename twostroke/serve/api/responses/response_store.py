"""`StoredResponses`: the responses that `/v1/responses` stores, to continue a conversation, to read
it again, or to write it in the background. The store is in the HTTP process and outlives the
engine.

    running request ──holds──▶ StoredResponse ◀──holds── the index: by key and id, oldest first
                                 │ previous
                                 └──holds──▶ StoredResponse ──▶ …      the earlier conversation

A response without holders is freed. All held memory is counted, including memory that a running
request reserves for its answer. A new response makes room by removing old ones of the API key that
uses most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from time import monotonic
from typing import Final

from twostroke.serve.http.bodies import weight_of

OVERHEAD_BYTES: Final = 1024  # of a response, in addition to its JSON
EVENT_OVERHEAD_BYTES: Final = 64
RUNNING: Final = ("queued", "in_progress")


@dataclass(slots=True, eq=False)
class StoredResponse:
    owner: int | None  # the number of the API key of the request
    id: str
    previous: StoredResponse | None
    input_items: bytes  # JSON: a list
    keep: bool  # counts in `max_stored_responses`; False: freed with its request
    background: bool = False
    status: str = "queued"
    response: bytes = b""  # JSON, current state
    events: list[bytes] | None = None  # of a background stream, in order
    num_bytes: int = 0
    weight: int = 0  # the cost of decoding (`bodies.py`)
    stored_s: float = 0.0  # time of insertion into the index, by the store's clock
    holders: int = 0

    @property
    def ended(self) -> bool:
        return self.status not in RUNNING

    def chain(self) -> Iterator[StoredResponse]:
        """Yield this response and its predecessors, newest first."""
        one: StoredResponse | None = self
        while one is not None:
            yield one
            one = one.previous


@dataclass(slots=True, eq=False)
class OwnerUsage:
    """The stored responses of one API key."""

    by_id: dict[str, StoredResponse] = field(default_factory=dict)  # oldest first
    num_kept: int = 0
    num_bytes: int = 0

    def oldest_ended(self) -> StoredResponse | None:
        return next((one for one in self.by_id.values() if one.ended), None)


class StoredResponses:
    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._shares: dict[int | None, OwnerUsage] = {}
        self.num_kept = 0
        self.num_bytes = 0

    def open(self, response: StoredResponse, num_bytes: int) -> bool:
        """Count and hold the response of a new request; False if there is no room for
        `num_bytes`."""
        response.num_bytes = OVERHEAD_BYTES + num_bytes
        self.hold(response)
        if response.num_bytes <= self.max_bytes and self._make_room(response.owner):
            return True
        self.release(response)
        return False

    def put(self, response: StoredResponse) -> None:
        """Add a response to the index. A response with the same id and key is replaced."""
        share = self._share(response.owner)
        if (previous := share.by_id.get(response.id)) is not None:
            self.remove(previous)
        response.stored_s = self._clock()
        share.by_id[response.id] = response
        self.hold(response)

    def get(self, owner: int | None, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        return self._share(owner).by_id.get(response_id)

    def remove(self, response: StoredResponse) -> None:
        """Remove a response from the index."""
        by_id = self._share(response.owner).by_id
        if by_id.get(response.id) is response:
            del by_id[response.id]
            self.release(response)

    def write(self, response: StoredResponse, status: str, content: bytes) -> bool:
        """Set status and JSON. If there is no room, change nothing and return False."""
        ended = status not in RUNNING
        num_bytes = OVERHEAD_BYTES + len(response.input_items) + len(content)
        num_bytes += sum(len(event) + EVENT_OVERHEAD_BYTES for event in response.events or ())
        # Memory reserved for the answer stays counted until the answer is complete.
        if not self._resize(response, num_bytes if ended else max(num_bytes, response.num_bytes)):
            return False
        response.status, response.response = status, content
        if ended:
            response.weight = weight_of(response.input_items) + weight_of(content)
        return True

    def add_event(self, response: StoredResponse, event: bytes) -> bool:
        """Append an event; False if there is no room."""
        assert response.events is not None
        if not self._resize(response, response.num_bytes + len(event) + EVENT_OVERHEAD_BYTES):
            return False
        response.events.append(event)
        return True

    def drop_events(self, response: StoredResponse) -> None:
        events, response.events = response.events or (), None
        freed = sum(len(event) + EVENT_OVERHEAD_BYTES for event in events)
        self._resize(response, response.num_bytes - freed)

    # ── holders ─────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def holding(self, *responses: StoredResponse) -> Iterator[None]:
        """Keep responses counted while they are read, even if they are removed meanwhile."""
        for one in responses:
            self.hold(one)
        try:
            yield
        finally:
            for one in responses:
                self.release(one)

    def hold(self, response: StoredResponse) -> None:
        for one in response.chain():
            one.holders += 1
            if one.holders > 1:
                return
            self._count(one, one.keep, one.num_bytes)

    def release(self, response: StoredResponse) -> None:
        for one in response.chain():
            one.holders -= 1
            if one.holders:
                return
            self._count(one, -one.keep, -one.num_bytes)

    def _count(self, response: StoredResponse, count: int, num_bytes: int) -> None:
        share = self._share(response.owner)
        share.num_kept += count
        share.num_bytes += num_bytes
        self.num_kept += count
        self.num_bytes += num_bytes

    def _resize(self, response: StoredResponse, num_bytes: int) -> bool:
        before, response.num_bytes = response.num_bytes, num_bytes
        self._count(response, 0, num_bytes - before)
        if num_bytes <= max(before, self.max_bytes) and self._make_room(response.owner):
            return True
        response.num_bytes = before
        self._count(response, 0, before - num_bytes)
        return False

    # ── the limits ──────────────────────────────────────────────────────────────────────────

    def _make_room(self, owner: int | None) -> bool:
        """Remove old responses until the limits hold; return False if that is impossible. Removes
        the oldest ended responses of the key that uses most, but never of a key that uses less than
        `owner`."""
        if self._fits():  # the fast path: called for every event of a stream
            return True
        self._drop_expired()
        own = self._share(owner)
        while not self._fits():
            too_many = self.num_kept > self.max_responses

            def size(share: OwnerUsage, too_many: bool = too_many) -> int:
                return share.num_kept if too_many else share.num_bytes

            larger = [share for share in self._shares.values() if size(share) >= size(own)]
            larger.sort(key=size, reverse=True)
            oldest = next((one for share in larger if (one := share.oldest_ended())), None)
            if oldest is None:
                return False
            self.remove(oldest)
        return True

    def _fits(self) -> bool:
        return self.num_kept <= self.max_responses and self.num_bytes <= self.max_bytes

    def _drop_expired(self) -> None:
        until_s = self._clock() - self._ttl_s
        for share in self._shares.values():
            old = list(takewhile(lambda one: one.stored_s <= until_s, share.by_id.values()))
            for one in old:
                if one.ended:
                    self.remove(one)

    def _share(self, owner: int | None) -> OwnerUsage:
        return self._shares.setdefault(owner, OwnerUsage())
