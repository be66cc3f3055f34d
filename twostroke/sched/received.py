"""`ReceivedQueue`: requests that wait for KV blocks to be fetched. Other requests run meanwhile.

Blocks of a request that another engine has prefilled are fetched when there is room, and the
request goes straight to decode. Blocks of a prefix in a tier (`kv/tiers/`) are fetched if that is
faster than computing them; the request has a row, and is prefilled from the end of the prefix on.

Blocks of a long prompt are fetched ahead, while the other engine computes the rest of the prompt.
They are kept as a cached prefix, which the request finds later. If a fetch ahead fails, no request
is affected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NamedTuple, Protocol

from twostroke.kv.cache import KVCache, table_length
from twostroke.kv.tiers.tiers import Found
from twostroke.kv.transfer import KVTransfer, ReceiverFullError, StalledError, TransferError
from twostroke.sched.decode import DecodeSet
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.step import StepBuilder

# Bytes copied in a step while streams decode: 2 ms of their gap, if the memory has been touched.
FETCH_BYTES: Final = 12 << 20
MAX_FETCHING: Final = 8  # at one time, so that a slow sender does not hold up the others

HasRoom = Callable[[ScheduledRequest, list[list[int]]], bool]
ToPrefill = Callable[[ScheduledRequest], None]
StartPrefill = Callable[[StepBuilder, ScheduledRequest], None]


class FetchResult(NamedTuple):
    """The result of a fetch that has ended. Its offer is not needed any more."""

    request_id: str
    num_bytes: int
    seconds: float  # from the first request for a block to the last block
    problem: str  # why the blocks must be recomputed; "": they have been fetched
    waited_s: float = 0.0  # for room, before the fetch
    transport: str = ""  # memory, device, nixl or sockets
    ahead: bool = False  # for a part of a prompt that is still being computed


class BlockFetch(Protocol):
    """A fetch from another engine (`kv/transfer.py`) or from tiers (`kv/tiers/tiers.py`)."""

    began_s: float
    transport: str

    @property
    def num_bytes(self) -> int: ...

    @property
    def own_bytes(self) -> int: ...

    def advance(self, max_bytes: int | None = None) -> bool: ...

    def abandon(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Fetching:
    """A request whose blocks are being copied into blocks that it owns."""

    request: ScheduledRequest
    fetch: BlockFetch
    num_cached: int
    waited_s: float
    ahead: bool = False
    is_here: bool = False
    deadline_s: float | None = None  # only of a fetch from tiers, whose request has a row


class Destinations(NamedTuple):
    """The queues that get the requests whose fetch has ended."""

    decode: DecodeSet  # requests that another engine has prefilled
    to_prefill: ToPrefill  # requests whose fetch failed
    start_prefill: StartPrefill  # requests whose prefix came from tiers


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free rows, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[ScheduledRequest] = deque()  # requests whose fetch has not begun
        self._ahead: deque[ScheduledRequest] = deque()  # parts of prompts, not begun
        self._fetching: list[_Fetching] = []
        # When the first request of the queue began to wait for room; 0: it does not wait.
        self._no_room_s = 0.0
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
        """Return the results of the fetches that have ended since the last call."""
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
                self._drop(fetching)
                return True
        if request not in self._queue:
            return False
        if request is self._queue[0]:
            self._no_room_s = 0.0
        self._queue.remove(request)
        return True

    @property
    def tier_fetches(self) -> list[ScheduledRequest]:
        """The requests whose prefixes are being fetched from tiers."""
        return [one.request for one in self._fetching if one.deadline_s is not None]

    def fetch_prefix(
        self, request: ScheduledRequest, tables: list[list[int]], found: Found, deadline_s: float
    ) -> bool:
        """Fetch a prefix from the tiers for a waiting request, which gets a row. `tables`: cached
        blocks of the prefix. Return False, without any change, if there is no room."""
        kv, tiers = self._kv, self._kv.tiers
        assert tiers is not None
        num_cached = kv.open(request.kv, tables)
        try:
            wanted = kv.receive(request.kv, found.end_block * kv.block_size)
        except ReceiverFullError:
            kv.close(request.kv)
            return False
        pairs = _pairs(wanted, request.kv.tables)
        fetch = tiers.fetch(found, pairs)
        request.row = self._rows.pop()
        one = _Fetching(request, fetch, num_cached, 0.0, deadline_s=deadline_s)
        self._fetching.append(one)
        return True

    def drop_prefixes(self, to_prefill: ToPrefill) -> None:
        """Give up every fetch from tiers. The requests wait to be prefilled."""
        for one in [one for one in self._fetching if one.deadline_s is not None]:
            self._drop(one)
            to_prefill(one.request)

    def plan(self, step: StepBuilder, has_room: HasRoom, to: Destinations) -> None:
        """Fetch the blocks that there is room for, in order. Called before the step's slots are
        planned, so that requests whose blocks have arrived decode in this step. While streams
        decode, at most `FETCH_BYTES` are copied. A request whose fetch fails is prefilled."""
        left = FETCH_BYTES if to.decode.requests else None
        while True:
            left = self._advance(step, left, to)
            if not self._begin_next(has_room, to.to_prefill) or (left is not None and left <= 0):
                return

    def _begin_next(self, has_room: HasRoom, to_prefill: ToPrefill) -> bool:
        """Begin the next fetch; return False if no request waits, or if there is no room."""
        from_engines = sum(one.deadline_s is None for one in self._fetching)
        if from_engines >= MAX_FETCHING:
            return False
        if not self._queue:
            return self._begin_ahead(has_room)
        request = self._queue[0]
        tables = self._kv.match(request.kv, request.tokens)
        fetching = sum(one.deadline_s is None and not one.ahead for one in self._fetching)
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
                return False  # the fetches under way have taken the room and will free it
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
        fetch = self._transfer.fetch(offer, _pairs(wanted, request.kv.tables))
        return _Fetching(request, fetch, num_cached, waited_s, ahead)

    def _advance(self, step: StepBuilder, left: int | None, to: Destinations) -> int | None:
        """Copy at most `left` bytes, and start the requests whose blocks are here. Return the bytes
        that are left; None: unlimited."""
        for one in sorted(self._fetching, key=lambda one: one.ahead):  # waiting requests first
            fetch, before = one.fetch, one.fetch.own_bytes
            if left is not None and left <= 0:
                break
            try:
                one.is_here = one.is_here or fetch.advance(left)
                if not one.is_here and one.deadline_s is not None and step.now > one.deadline_s:
                    raise StalledError("computing the tokens takes no longer")
            except TransferError as error:
                self._fail(one, error)
                if not one.ahead:
                    to.to_prefill(one.request)
            if left is not None:
                left -= fetch.own_bytes - before
            if one.is_here and (one.ahead or one.deadline_s is not None or self._rows):
                self._arrived(step, one, to)
        return left

    def _arrived(self, step: StepBuilder, one: _Fetching, to: Destinations) -> None:
        """Continue a request whose blocks are here."""
        request = one.request
        self._fetching.remove(one)
        self._report(request, None, one)
        self._kv.received(request.kv)
        self._kv.register(request.kv, request.tokens)
        if one.ahead:
            self._kv.close(request.kv)
        elif one.deadline_s is not None:
            to.start_prefill(step, request)
        else:
            self._start(step, request, one.num_cached)
            to.decode.add(request)

    def _fail(self, one: _Fetching, error: TransferError) -> None:
        one.request.fetch_failed = one.deadline_s is not None
        self._drop(one)
        self._report(one.request, error, one)

    def _drop(self, one: _Fetching) -> None:
        """Give up a fetch and its blocks."""
        self._fetching.remove(one)
        one.fetch.abandon()
        self._kv.close(one.request.kv)
        if one.deadline_s is not None:
            self._rows.append(one.request.row)
            one.request.row = -1

    def _report(
        self,
        request: ScheduledRequest,
        error: TransferError | None,
        one: _Fetching | None = None,
        waited_s: float = 0.0,
        ahead: bool = False,
    ) -> None:
        """Append a `FetchResult`, or note the end of a fetch from tiers in the record. `one`: None
        if the fetch had not begun."""
        problem = f"{type(error).__name__}: {error}" if error else ""
        if one is not None and one.deadline_s is not None:
            assert request.record.tier_fetch is not None
            seconds = monotonic() - one.fetch.began_s
            request.record.tier_fetch = request.record.tier_fetch._replace(
                outcome="failed" if error else "fetched", seconds=seconds, problem=problem
            )
            return
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


def _pairs(wanted: list[list[int]], tables: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return pairs of an index in the table and its block, for the indices in `wanted`."""
    return [
        [(entry, table[entry]) for entry in entries]
        for entries, table in zip(wanted, tables, strict=True)
    ]
