"""`ReceivedQueue`: requests that another engine has prefilled. Their blocks are fetched when there
is room for them, and they go straight on to decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NamedTuple

from twostroke.kv.cache import KVCache, table_length
from twostroke.kv.transfer import KVTransfer, Offer, TransferError
from twostroke.sched.decode import DecodeSet
from twostroke.sched.request import Phase, Request
from twostroke.sched.step import StepBuilder

# With one step, while others write: some milliseconds of their gap.
FETCH_BYTES: Final = 8 << 20


class Fetched(NamedTuple):
    """An offer that is needed no more."""

    request_id: str
    num_bytes: int
    seconds: float
    problem: str  # "": the blocks are here; else why they are computed again


@dataclass(slots=True)
class _Fetching:
    """The request at the head of the queue, while its blocks are copied, some with each step."""

    offer: Offer
    places: list[list[tuple[int, int]]]  # that are still to be copied, of each group
    num_cached: int
    num_bytes: int = 0
    seconds: float = 0.0


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free ones, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[Request] = deque()
        self._fetching: _Fetching | None = None
        self.fetched: list[Fetched] = []  # since somebody last took them

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it did not wait here."""
        if request not in self._queue:
            return False
        if request is self._queue[0]:
            self._fetching = None
            self._kv.close(request.kv)
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
        while self._queue and self._rows:
            request, problem = self._queue[0], ""
            try:
                if self._fetching is None:
                    tables = self._kv.match(request.kv, request.tokens)
                    if not has_room(request, tables):
                        return
                    self._begin(request, tables)
                left = self._copy(left)
            except TransferError as error:
                problem = f"{type(error).__name__}: {error}"
            fetching = self._fetching
            if not problem and fetching is not None and any(fetching.places):
                return  # the rest with the next steps
            self._queue.popleft()
            self._fetching = None
            copied, took_s = (
                (0, 0.0) if fetching is None else (fetching.num_bytes, fetching.seconds)
            )
            self.fetched.append(Fetched(request.request_id, copied, took_s, problem))
            if problem or fetching is None:
                self._kv.close(request.kv)
                to_prefill(request)
            else:
                self._start(step, request, fetching.num_cached)
                decode.add(request)

    def _begin(self, request: Request, tables: list[list[int]]) -> None:
        """Take the blocks that are to be filled."""
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
        self._fetching = _Fetching(offer, places, num_cached)

    def _copy(self, left: int | None) -> int | None:
        """Copy at most `left` bytes, and a block at the least; what is left of them then."""
        fetching = self._fetching
        assert fetching is not None
        assert self._transfer is not None
        now: list[list[tuple[int, int]]] = []
        later: list[list[tuple[int, int]]] = []
        room = left
        for wanted, size in zip(fetching.places, fetching.offer.block_bytes, strict=True):
            count = len(wanted)
            if room is not None:
                count = min(count, max(0, -(-room // size)))
                room -= count * size
            now.append(wanted[:count])
            later.append(wanted[count:])
        began = monotonic()
        fetching.num_bytes += self._transfer.fetch(fetching.offer, now)
        fetching.seconds += monotonic() - began
        fetching.places = later
        return room

    def _start(self, step: StepBuilder, request: Request, num_cached: int) -> None:
        self._kv.register(request.kv, request.tokens)
        request.become(Phase.DECODE)
        request.row = self._rows.pop()
        step.add_row(request)
        step.add_blocks(request, table_length(request.kv.tables))
        request.record.scheduled_s = step.now
        request.record.num_cached = num_cached
