"""`StoredResponses`: what `/v1/responses` keeps, so that a conversation can be gone on with, looked
at again, or written while nobody waits. It lives in the HTTP process and outlives the engine.

    running request ──holds──▶ StoredResponse ◀──holds── the index: by key and id, oldest first
                                 │ previous
                                 └──holds──▶ StoredResponse ──▶ …      the conversation so far

One that nobody holds is gone. All that is held is counted, also what a running request keeps for
its answer's sake; what is new makes room for itself, at the cost of the key that keeps most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from time import monotonic
from typing import Final

from twostroke.serve.http.bodies import weight_of

OVERHEAD_BYTES: Final = 1024  # of one, besides its JSON
EVENT_OVERHEAD_BYTES: Final = 64
RUNNING: Final = ("queued", "in_progress")


@dataclass(slots=True, eq=False)
class StoredResponse:
    owner: int | None  # the number of the API key it was asked for with
    id: str
    previous: StoredResponse | None
    input_items: bytes  # JSON: a list
    keep: bool  # counts as one of `max_stored_responses`; if not, it ends with its request
    background: bool = False
    status: str = "queued"
    response: bytes = b""  # JSON, as of now
    events: list[bytes] | None = None  # of a background stream, in the order of their numbers
    num_bytes: int = 0
    weight: int = 0  # what decoding it costs (`bodies.py`)
    stored_s: float = 0.0  # when it was put into the index, by the store's clock
    holders: int = 0

    @property
    def ended(self) -> bool:
        return self.status not in RUNNING

    def chain(self) -> Iterator[StoredResponse]:
        """It and those before it, newest first."""
        one: StoredResponse | None = self
        while one is not None:
            yield one
            one = one.previous


@dataclass(slots=True, eq=False)
class OwnersShare:
    """What one key has kept."""

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
        self._shares: dict[int | None, OwnersShare] = {}
        self.num_kept = 0
        self.num_bytes = 0

    def open(self, response: StoredResponse, num_bytes: int) -> bool:
        """Count a request that begins as `num_bytes` and hold it; False if there is no room."""
        response.num_bytes = OVERHEAD_BYTES + num_bytes
        self.hold(response)
        if response.num_bytes <= self.max_bytes and self._make_room(response.owner):
            return True
        self.release(response)
        return False

    def put(self, response: StoredResponse) -> None:
        """Let it be found by its id. One of the same id and key goes."""
        share = self._share(response.owner)
        if (before := share.by_id.get(response.id)) is not None:
            self.remove(before)
        response.stored_s = self._clock()
        share.by_id[response.id] = response
        self.hold(response)

    def get(self, owner: int | None, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        return self._share(owner).by_id.get(response_id)

    def remove(self, response: StoredResponse) -> None:
        """Take it out of the index, if it is there."""
        by_id = self._share(response.owner).by_id
        if by_id.get(response.id) is response:
            del by_id[response.id]
            self.release(response)

    def write(self, response: StoredResponse, status: str, content: bytes) -> bool:
        """Its JSON as of now; False if there is no room for it, and then nothing has changed."""
        ended = status not in RUNNING
        num_bytes = OVERHEAD_BYTES + len(response.input_items) + len(content)
        num_bytes += sum(len(event) + EVENT_OVERHEAD_BYTES for event in response.events or ())
        # What was counted for the answer's sake stays so until the answer is there.
        if not self._resize(response, num_bytes if ended else max(num_bytes, response.num_bytes)):
            return False
        response.status, response.response = status, content
        if ended:
            response.weight = weight_of(response.input_items) + weight_of(content)
        return True

    def add_event(self, response: StoredResponse, event: bytes) -> bool:
        """False if there is no room for it."""
        assert response.events is not None
        if not self._resize(response, response.num_bytes + len(event) + EVENT_OVERHEAD_BYTES):
            return False
        response.events.append(event)
        return True

    def drop_events(self, response: StoredResponse) -> None:
        events, response.events = response.events or (), None
        freed = sum(len(event) + EVENT_OVERHEAD_BYTES for event in events)
        self._resize(response, response.num_bytes - freed)

    # ── what is held ────────────────────────────────────────────────────────────────────────

    @contextmanager
    def holding(self, *responses: StoredResponse) -> Iterator[None]:
        """While they are being read they are counted, also if they are removed meanwhile."""
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
        """Whether what is counted by now, the owner's latest among it, is within the limits. The
        oldest that have ended go for it, of the key that keeps most, and of none that keeps less
        than the owner."""
        if self._fits():  # for every event of a stream, so quickly
            return True
        self._drop_expired()
        own = self._share(owner)
        while not self._fits():
            too_many = self.num_kept > self.max_responses

            def size(share: OwnersShare, too_many: bool = too_many) -> int:
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

    def _share(self, owner: int | None) -> OwnersShare:
        return self._shares.setdefault(owner, OwnersShare())
