"""`ResponseStore`: the stored responses of `/v1/responses`. A client can continue the conversation
of a stored response, read the response again, or read a response that is generated in the
background. The store is in the HTTP process and outlives the engine.

    running request ──holds──▶ StoredResponse ◀──holds── the index: by API key and response id,
                                 │ previous                         oldest response first
                                 └──holds──▶ StoredResponse ──▶ …   the earlier conversation

A response without holders is freed. The store counts the memory of all held responses, including
memory that running requests reserve for their answers. If there is no room for a new response, the
store removes the oldest responses of the API key whose responses take the most room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from time import monotonic
from typing import Final

from twostroke.serve.http.bodies import json_weight

OVERHEAD_BYTES: Final = 1024  # the memory that a response takes in addition to its JSON
EVENT_OVERHEAD_BYTES: Final = 64  # the memory that an event takes in addition to its JSON
RUNNING: Final = ("queued", "in_progress")  # values of `status`


@dataclass(slots=True, eq=False)
class StoredResponse:
    owner: int | None  # the number of the API key of the request; None: the server has no API key
    id: str
    previous: StoredResponse | None
    input_items: bytes  # JSON: a list
    # False: the response is never in the index. It is freed when its request ends, and it does not
    # count in `max_stored_responses`.
    keep: bool
    background: bool = False
    status: str = "queued"
    response: bytes = b""  # JSON, current state
    events: list[bytes] | None = None  # of a background stream, in order
    num_bytes: int = 0  # counted memory: JSON, events, overhead, and the reserve for the answer
    json_weight: int = 0  # the cost of decoding its JSON (see `json_weight` in `bodies.py`)
    stored_s: float = 0.0  # time of insertion into the index, by the store's clock
    num_holders: int = 0

    @property
    def ended(self) -> bool:
        return self.status not in RUNNING

    def chain(self) -> Iterator[StoredResponse]:
        """Yield this response and its predecessors, newest first."""
        response: StoredResponse | None = self
        while response is not None:
            yield response
            response = response.previous


@dataclass(slots=True, eq=False)
class OwnerUsage:
    """The stored responses of one API key, and the room that they take."""

    by_id: dict[str, StoredResponse] = field(default_factory=dict)  # oldest first
    num_kept: int = 0  # held responses with `keep`
    num_bytes: int = 0  # memory of all held responses

    def oldest_ended(self) -> StoredResponse | None:
        return next((response for response in self.by_id.values() if response.ended), None)


class ResponseStore:
    """The index of stored responses, and the memory of all held responses."""

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
        self._usages: dict[int | None, OwnerUsage] = {}
        self.num_kept = 0  # as in `OwnerUsage`, of all API keys
        self.num_bytes = 0

    def reserve(self, response: StoredResponse, num_bytes: int) -> bool:
        """Hold the response of a new request, and reserve `num_bytes` for its JSON. If there is no
        room, hold nothing and return False."""
        response.num_bytes = OVERHEAD_BYTES + num_bytes
        self.hold(response)
        if response.num_bytes <= self.max_bytes and self._make_room(response.owner):
            return True
        self.release(response)
        return False

    def put(self, response: StoredResponse) -> None:
        """Add a response to the index. A response with the same id and API key is replaced."""
        by_id = self._usage_of(response.owner).by_id
        if (replaced := by_id.get(response.id)) is not None:
            self.remove(replaced)
        response.stored_s = self._clock()
        by_id[response.id] = response
        self.hold(response)

    def get(self, owner: int | None, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        return self._usage_of(owner).by_id.get(response_id)

    def remove(self, response: StoredResponse) -> None:
        """Remove a response from the index."""
        by_id = self._usage_of(response.owner).by_id
        if by_id.get(response.id) is response:
            del by_id[response.id]
            self.release(response)

    def write(self, response: StoredResponse, status: str, content: bytes) -> bool:
        """Set the status and the JSON of a response. If there is no room, change nothing and return
        False."""
        ended = status not in RUNNING
        num_bytes = OVERHEAD_BYTES + len(response.input_items) + len(content)
        num_bytes += sum(len(event) + EVENT_OVERHEAD_BYTES for event in response.events or ())
        # Memory reserved for the answer stays counted until the answer is complete.
        if not self._resize(response, num_bytes if ended else max(num_bytes, response.num_bytes)):
            return False
        response.status, response.response = status, content
        if ended:
            response.json_weight = json_weight(response.input_items) + json_weight(content)
        return True

    def add_event(self, response: StoredResponse, event: bytes) -> bool:
        """Append an event. If there is no room, change nothing and return False."""
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
        """Hold responses while they are read: they stay counted even if they are removed."""
        for response in responses:
            self.hold(response)
        try:
            yield
        finally:
            for response in responses:
                self.release(response)

    def hold(self, response: StoredResponse) -> None:
        """Add a holder. A response with its first holder in turn holds its predecessor."""
        for held in response.chain():
            held.num_holders += 1
            if held.num_holders > 1:
                return
            self._add_usage(held.owner, int(held.keep), held.num_bytes)

    def release(self, response: StoredResponse) -> None:
        """Remove a holder. A response without holders releases its predecessor."""
        for held in response.chain():
            held.num_holders -= 1
            if held.num_holders:
                return
            self._add_usage(held.owner, -int(held.keep), -held.num_bytes)

    def _add_usage(self, owner: int | None, num_kept: int, num_bytes: int) -> None:
        """Add to the totals of an API key and of the store. The numbers may be negative."""
        usage = self._usage_of(owner)
        usage.num_kept += num_kept
        usage.num_bytes += num_bytes
        self.num_kept += num_kept
        self.num_bytes += num_bytes

    def _resize(self, response: StoredResponse, num_bytes: int) -> bool:
        """Change the counted memory of a response. If there is no room, change nothing and return
        False."""
        before, response.num_bytes = response.num_bytes, num_bytes
        self._add_usage(response.owner, 0, num_bytes - before)
        # A response may always shrink, but not grow beyond the size of the whole store.
        if num_bytes <= max(before, self.max_bytes) and self._make_room(response.owner):
            return True
        response.num_bytes = before
        self._add_usage(response.owner, 0, before - num_bytes)
        return False

    # ── the limits ──────────────────────────────────────────────────────────────────────────

    def _make_room(self, owner: int | None) -> bool:
        """Remove old responses until the store is within its limits; return False if that is
        impossible. Each time, remove the oldest ended response of the API key that takes the most
        room, but none of an API key that takes less room than the API key `owner`."""
        if self._fits():  # the fast path: called for every event of a stream
            return True
        self._drop_expired()
        own = self._usage_of(owner)
        while not self._fits():
            too_many = self.num_kept > self.max_responses

            def room(usage: OwnerUsage, too_many: bool = too_many) -> int:
                """Return the exceeded quantity: the number of responses, or bytes."""
                return usage.num_kept if too_many else usage.num_bytes

            candidates = [usage for usage in self._usages.values() if room(usage) >= room(own)]
            candidates.sort(key=room, reverse=True)
            ended = (usage.oldest_ended() for usage in candidates)
            oldest = next((response for response in ended if response is not None), None)
            if oldest is None:
                return False
            self.remove(oldest)
        return True

    def _fits(self) -> bool:
        return self.num_kept <= self.max_responses and self.num_bytes <= self.max_bytes

    def _drop_expired(self) -> None:
        newest_expired_s = self._clock() - self._ttl_s
        for usage in self._usages.values():
            responses = usage.by_id.values()  # oldest first
            expired = list(takewhile(lambda old: old.stored_s <= newest_expired_s, responses))
            for response in expired:
                if response.ended:
                    self.remove(response)

    def _usage_of(self, owner: int | None) -> OwnerUsage:
        return self._usages.setdefault(owner, OwnerUsage())
