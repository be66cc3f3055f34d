"""`ReceivedQueue`: requests that another engine has prefilled. Their blocks are fetched when there
is room, and the requests go straight to decode.

Blocks of a long prompt are fetched ahead, while the other engine computes the rest of it. They are
kept as a cached prefix, which the request finds later. A fetch ahead may fail: no request waits for
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NamedTuple

from twostroke.kv.cache import KVCache, table_length
from twostroke.kv.transfer import Fetch, KVTransfer, ReceiverFullError, TransferError
from twostroke.sched.decode import DecodeSet
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.step import StepBuilder

# Copied with one step while streams write: 2 ms of their gap, if the memory has been touched.
FETCH_BYTES: Final = 12 << 20
MAX_FETCHING: Final = 8  # at one time, so that a slow sender does not hold up the others

HasRoom = Callable[[ScheduledRequest, list[list[int]]], bool]
ToPrefill = Callable[[ScheduledRequest], None]


class FetchResult(NamedTuple):
    """The end of a fetch: its offer is not needed any more."""

    request_id: str
    num_bytes: int
    seconds: float  # from the first request for a block to the last block
    problem: str  # why the blocks must be recomputed; "": they have been fetched
    waited_s: float = 0.0  # for room, before the fetch
    transport: str = ""  # memory, device, nixl or sockets
    ahead: bool = False  # part of a prompt that is still being computed


@dataclass(slots=True, eq=False)
class _Fetching:
    """A request whose blocks are being copied into blocks that it owns."""

    request: ScheduledRequest
    fetch: Fetch
    num_cached: int
    waited_s: float
    ahead: bool = False
    is_here: bool = False


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free rows, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[ScheduledRequest] = deque()  # there was no room for them yet
        self._ahead: deque[ScheduledRequest] = deque()  # parts of prompts, not begun
        self._fetching: list[_Fetching] = []
        self._no_room_s = 0.0  # since when the first of the queue waits for room; 0: it does not
        self._results: list[FetchResult] = []

    def __len__(self) -> int:
        """The number of requests that wait here."""
        if not self._fetching:
            return len(self._queue)
        return len(self._queue) + sum(not one.ahead for one in self._fetching)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._fetching or self._ahead)

    def take_fetched(self) -> list[FetchResult]:
        """Return the fetches that have ended since the last call."""
        results, self._results = self._results, []
        return results

    def push(self, request: ScheduledRequest) -> None:
        self._queue.append(request)

    def push_ahead(self, request: ScheduledRequest) -> None:
        """Queue a part of a prompt. Its last token marks the end and has not been computed."""
        self._ahead.append(request)

    def drop_ahead(self, why: str) -> None:
        """Give up every fetch ahead."""
        error = TransferError(why)
        while self._ahead:
            self._report(self._ahead.popleft(), error, ahead=True)
        for one in [one for one in self._fetching if one.ahead]:
            self._fail(one, error)

    def discard(self, request: ScheduledRequest) -> bool:
        """Remove a request that has ended; False if it did not wait here."""
        for fetching in self._fetching:
            if fetching.request is request:
                self._fetching.remove(fetching)
                fetching.fetch.abandon()
                self._kv.close(request.kv)
                return True
        if request not in self._queue:
            return False
        if request is self._queue[0]:
            self._no_room_s = 0.0
        self._queue.remove(request)
        return True

    def plan(
        self, step: StepBuilder, has_room: HasRoom, decode: DecodeSet, to_prefill: ToPrefill
    ) -> None:
        """Fetch the blocks that there is room for, in order. Called before the step's slots are
        given, so that requests whose blocks have arrived decode in this step. While streams write,
        at most `FETCH_BYTES` are copied. A request whose fetch fails is prefilled."""
        left = FETCH_BYTES if decode.requests else None
        while True:
            left = self._advance(step, left, decode, to_prefill)
            if not self._begin_next(has_room, to_prefill) or (left is not None and left <= 0):
                return

    def _begin_next(self, has_room: HasRoom, to_prefill: ToPrefill) -> bool:
        """Take blocks for the next request and begin its fetch; False if no request waits, or if
        there is no room."""
        if len(self._fetching) >= MAX_FETCHING:
            return False
        if not self._queue:
            return self._begin_ahead(has_room)
        request = self._queue[0]
        tables = self._kv.match(request.kv, request.tokens)
        fetching = len(self) - len(self._queue)
        if fetching >= len(self._rows) or not has_room(request, tables):
            self._no_room_s = self._no_room_s or monotonic()
            self.drop_ahead("a request waits for room")
            return False
        waited_s = monotonic() - self._no_room_s if self._no_room_s else 0.0
        try:
            self._fetching.append(self._begin(request, tables, waited_s))
        except TransferError as error:
            self._kv.close(request.kv)
            if isinstance(error, ReceiverFullError) and self._fetching:
                self._no_room_s = self._no_room_s or monotonic()
                return False  # the fetches under way took the room and will give it back
            self._report(request, error, waited_s=waited_s)
            to_prefill(request)
        self._queue.popleft()
        self._no_room_s = 0.0
        return True

    def _begin_ahead(self, has_room: HasRoom) -> bool:
        if not self._ahead:
            return False
        request = self._ahead.popleft()
        tables = self._kv.match(request.kv, request.tokens)
        try:
            if not has_room(request, tables):
                raise ReceiverFullError("running requests will need the blocks")
            self._fetching.append(self._begin(request, tables, 0.0, ahead=True))
        except TransferError as error:
            self._kv.close(request.kv)
            self._report(request, error, ahead=True)
        return True

    def _begin(
        self,
        request: ScheduledRequest,
        tables: list[list[int]],
        waited_s: float,
        ahead: bool = False,
    ) -> _Fetching:
        assert request.engine_request.resumed is not None
        offer = request.engine_request.resumed.offer
        assert offer is not None
        if self._transfer is None:
            raise TransferError("this engine has no memory that blocks could be fetched to")
        if offer.num_tokens != len(request.tokens) - 1:
            raise TransferError(
                f"{offer.num_tokens} tokens were offered of a sequence of {len(request.tokens)}"
            )
        num_cached = self._kv.open(request.kv, tables)
        wanted = self._kv.receive(request.kv, offer.num_tokens)
        pairs = [
            [(entry, table[entry]) for entry in entries]
            for entries, table in zip(wanted, request.kv.tables, strict=True)
        ]
        fetch = self._transfer.fetch(offer, pairs)
        return _Fetching(request, fetch, num_cached, waited_s, ahead)

    def _advance(
        self, step: StepBuilder, left: int | None, decode: DecodeSet, to_prefill: ToPrefill
    ) -> int | None:
        """Copy at most `left` bytes, and start the requests whose blocks are here. Return the bytes
        that are left; None: unlimited."""
        for one in sorted(self._fetching, key=lambda one: one.ahead):  # waiting requests first
            fetch, before = one.fetch, one.fetch.own_bytes
            if left is not None and left <= 0:
                break
            try:
                one.is_here = one.is_here or fetch.advance(left)
            except TransferError as error:
                self._fail(one, error)
                if not one.ahead:
                    to_prefill(one.request)
            if left is not None:
                left -= fetch.own_bytes - before
            if one.is_here and (one.ahead or self._rows):
                self._fetching.remove(one)
                self._report(one.request, None, one)
                self._kv.received(one.request.kv)
                self._kv.register(one.request.kv, one.request.tokens)
                if one.ahead:
                    self._kv.close(one.request.kv)
                else:
                    self._start(step, one.request, one.num_cached)
                    decode.add(one.request)
        return left

    def _fail(self, one: _Fetching, error: TransferError) -> None:
        self._fetching.remove(one)
        one.fetch.abandon()
        self._kv.close(one.request.kv)
        self._report(one.request, error, one)

    def _report(
        self,
        request: ScheduledRequest,
        error: TransferError | None,
        one: _Fetching | None = None,
        waited_s: float = 0.0,
        ahead: bool = False,
    ) -> None:
        """Append a `FetchResult`. `one`: None if the fetch had not begun."""
        problem = f"{type(error).__name__}: {error}" if error else ""
        if one is None:
            result = FetchResult(request.request_id, 0, 0.0, problem, waited_s, ahead=ahead)
        else:
            result = FetchResult(
                request.request_id,
                num_bytes=one.fetch.num_bytes,
                seconds=monotonic() - one.fetch.began_s,
                problem=problem,
                waited_s=one.waited_s,
                transport="" if error else one.fetch.transport,
                ahead=one.ahead,
            )
        self._results.append(result)

    def _start(self, step: StepBuilder, request: ScheduledRequest, num_cached: int) -> None:
        request.set_phase(Phase.DECODE)
        request.row = self._rows.pop()
        step.add_row(request)
        step.add_blocks(request, table_length(request.kv.tables))
        request.record.scheduled_s = step.now
        request.record.num_cached = num_cached
