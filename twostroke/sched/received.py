"""`ReceivedQueue`: requests that another engine has prefilled. Their blocks are fetched when there
is room for them, and they go straight on to decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NamedTuple

from twostroke.kv.cache import KVCache, table_length
from twostroke.kv.transfer import Fetch, KVTransfer, ReceiverFullError, TransferError
from twostroke.sched.decode import DecodeSet
from twostroke.sched.request import Phase, Request
from twostroke.sched.step import StepBuilder

# With one step, while others write: two milliseconds of their gap, where the memory is ready.
FETCH_BYTES: Final = 12 << 20
MAX_FETCHING: Final = 8  # at one time: one whose sender is slow does not hold up the others


class Fetched(NamedTuple):
    """An offer that is needed no more."""

    request_id: str
    num_bytes: int
    seconds: float  # from the first block asked for to the last one here
    problem: str  # "": the blocks are here; else why they are computed again
    waited_s: float = 0.0  # for room, before that
    way: str = ""  # that they came


@dataclass(slots=True, eq=False)
class _Fetching:
    """A request whose blocks are on their way to places that it owns already."""

    request: Request
    fetch: Fetch
    num_cached: int
    waited_s: float
    is_here: bool = False


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free ones, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[Request] = deque()  # there was no room for them yet
        self._fetching: list[_Fetching] = []
        self._no_room_s = 0.0  # since when there is none for the first of the queue; 0: there is
        self.fetched: list[Fetched] = []  # since somebody last took them

    def __len__(self) -> int:
        return len(self._queue) + len(self._fetching)

    @property
    def num_fetching(self) -> int:
        return len(self._fetching)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it did not wait here."""
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
        self,
        step: StepBuilder,
        has_room: Callable[[Request, list[list[int]]], bool],
        decode: DecodeSet,
        to_prefill: Callable[[Request], None],
    ) -> None:
        """Fetch what there is room for, in order: before the step's slots are given, so that what
        has arrived decodes in it. While others write, no more than `FETCH_BYTES` are copied, so
        that they do not wait for a long prompt's blocks. What cannot be fetched is prefilled like
        any other."""
        left = FETCH_BYTES if decode.requests else None
        while True:
            left = self._advance(step, left, decode, to_prefill)
            if not self._begin_next(has_room, to_prefill) or (left is not None and left <= 0):
                return

    def _begin_next(
        self,
        has_room: Callable[[Request, list[list[int]]], bool],
        to_prefill: Callable[[Request], None],
    ) -> bool:
        """Take the blocks that are to be filled for the next request; False if there is none, or
        no room for it."""
        if not self._queue or len(self._fetching) >= MAX_FETCHING:
            return False
        request = self._queue[0]
        tables = self._kv.match(request.kv, request.tokens)
        if len(self._fetching) >= len(self._rows) or not has_room(request, tables):
            self._no_room_s = self._no_room_s or monotonic()
            return False
        waited_s = monotonic() - self._no_room_s if self._no_room_s else 0.0
        try:
            self._fetching.append(self._begin(request, tables, waited_s))
        except TransferError as error:
            self._kv.close(request.kv)
            if isinstance(error, ReceiverFullError) and self._fetching:
                self._no_room_s = self._no_room_s or monotonic()
                return False  # those have taken it meanwhile, and will give it back
            self._give_up(request, error, 0, 0.0, waited_s, to_prefill)
        self._queue.popleft()
        self._no_room_s = 0.0
        return True

    def _begin(self, request: Request, tables: list[list[int]], waited_s: float) -> _Fetching:
        assert request.given.resumed is not None
        offer = request.given.resumed.offer
        assert offer is not None
        if self._transfer is None:
            raise TransferError("this engine has no memory that blocks could be fetched to")
        if offer.num_tokens != len(request.tokens) - 1:
            raise TransferError(
                f"{offer.num_tokens} tokens were offered of a sequence of {len(request.tokens)}"
            )
        num_cached = self._kv.open(request.kv, tables)
        wanted = self._kv.receive(request.kv, offer.num_tokens)
        places = [
            [(entry, table[entry]) for entry in entries]
            for entries, table in zip(wanted, request.kv.tables, strict=True)
        ]
        fetch = self._transfer.fetch(offer, places)
        return _Fetching(request, fetch, num_cached, waited_s)

    def _advance(
        self,
        step: StepBuilder,
        left: int | None,
        decode: DecodeSet,
        to_prefill: Callable[[Request], None],
    ) -> int | None:
        """Copy at most `left` bytes, and let those decode that are here; what is left then."""
        for one in list(self._fetching):
            request, fetch, before = one.request, one.fetch, one.fetch.own_bytes
            if left is not None and left <= 0:
                break
            try:
                one.is_here = one.is_here or fetch.advance(left)
            except TransferError as error:
                self._fetching.remove(one)
                fetch.abandon()
                self._kv.close(request.kv)
                took_s = monotonic() - fetch.began_s
                self._give_up(request, error, fetch.num_bytes, took_s, one.waited_s, to_prefill)
            if left is not None:
                left -= fetch.own_bytes - before
            if one.is_here and self._rows:
                self._fetching.remove(one)
                took_s = monotonic() - fetch.began_s
                self.fetched.append(
                    Fetched(
                        request.request_id, fetch.num_bytes, took_s, "", one.waited_s, fetch.way
                    )
                )
                self._start(step, request, one.num_cached)
                decode.add(request)
        return left

    def _give_up(
        self,
        request: Request,
        error: TransferError,
        num_bytes: int,
        seconds: float,
        waited_s: float,
        to_prefill: Callable[[Request], None],
    ) -> None:
        problem = f"{type(error).__name__}: {error}"
        self.fetched.append(Fetched(request.request_id, num_bytes, seconds, problem, waited_s))
        to_prefill(request)

    def _start(self, step: StepBuilder, request: Request, num_cached: int) -> None:
        self._kv.received(request.kv)
        self._kv.register(request.kv, request.tokens)
        request.become(Phase.DECODE)
        request.row = self._rows.pop()
        step.add_row(request)
        step.add_blocks(request, table_length(request.kv.tables))
        request.record.scheduled_s = step.now
        request.record.num_cached = num_cached
