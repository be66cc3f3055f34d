"""`ReceivedQueue`: requests that another engine has prefilled. Their blocks are fetched when there
is room for them, and they go straight on to decode.

Of a long prompt blocks are fetched ahead, while the rest of it is still computed there: they are
kept as a cached prefix, which its request then finds. Whatever becomes of them, nobody waits for
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
    ahead: bool = False  # of a prompt that is still being computed


@dataclass(slots=True, eq=False)
class _Fetching:
    """A request whose blocks are on their way to places that it owns already."""

    request: Request
    fetch: Fetch
    num_cached: int
    waited_s: float
    ahead: bool = False
    is_here: bool = False


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free ones, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[Request] = deque()  # there was no room for them yet
        self._ahead: deque[Request] = deque()  # as far as they are computed elsewhere; not begun
        self._fetching: list[_Fetching] = []
        self._no_room_s = 0.0  # since when there is none for the first of the queue; 0: there is
        self.fetched: list[Fetched] = []  # since somebody last took them

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._queue) + sum(not one.ahead for one in self._fetching)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._fetching or self._ahead)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def push_ahead(self, request: Request) -> None:
        """Of its last token on, nothing is computed yet."""
        self._ahead.append(request)

    def drop_ahead(self, why: str) -> None:
        """What was to be a cached prefix is not wanted."""
        error = TransferError(why)
        while self._ahead:
            self._tell(self._ahead.popleft(), error, ahead=True)
        for one in [one for one in self._fetching if one.ahead]:
            self._fail(one, error)

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
                return False  # those have taken it meanwhile, and will give it back
            self._tell(request, error, waited_s=waited_s)
            to_prefill(request)
        self._queue.popleft()
        self._no_room_s = 0.0
        return True

    def _begin_ahead(self, has_room: Callable[[Request, list[list[int]]], bool]) -> bool:
        if not self._ahead:
            return False
        request = self._ahead.popleft()
        tables = self._kv.match(request.kv, request.tokens)
        try:
            if not has_room(request, tables):
                raise ReceiverFullError("those who write will need the blocks")
            self._fetching.append(self._begin(request, tables, 0.0, ahead=True))
        except TransferError as error:
            self._kv.close(request.kv)
            self._tell(request, error, ahead=True)
        return True

    def _begin(
        self, request: Request, tables: list[list[int]], waited_s: float, ahead: bool = False
    ) -> _Fetching:
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
        return _Fetching(request, fetch, num_cached, waited_s, ahead)

    def _advance(
        self,
        step: StepBuilder,
        left: int | None,
        decode: DecodeSet,
        to_prefill: Callable[[Request], None],
    ) -> int | None:
        """Copy at most `left` bytes, and let those decode that are here; what is left then."""
        for one in sorted(self._fetching, key=lambda one: one.ahead):  # who waits comes first
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
                self._tell(one.request, None, one)
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
        self._tell(one.request, error, one)

    def _tell(
        self,
        request: Request,
        error: TransferError | None,
        one: _Fetching | None = None,
        waited_s: float = 0.0,
        ahead: bool = False,
    ) -> None:
        """What was offered to it is needed no more. `one`: if it had been begun."""
        problem = f"{type(error).__name__}: {error}" if error else ""
        if one is None:
            told = Fetched(request.request_id, 0, 0.0, problem, waited_s, ahead=ahead)
        else:
            came = one.fetch.num_bytes, monotonic() - one.fetch.began_s, problem, one.waited_s
            told = Fetched(
                request.request_id, *came, "" if error else one.fetch.transport, one.ahead
            )
        self.fetched.append(told)

    def _start(self, step: StepBuilder, request: Request, num_cached: int) -> None:
        request.become(Phase.DECODE)
        request.row = self._rows.pop()
        step.add_row(request)
        step.add_blocks(request, table_length(request.kv.tables))
        request.record.scheduled_s = step.now
        request.record.num_cached = num_cached
