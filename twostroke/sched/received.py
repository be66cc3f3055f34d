"""`ReceivedQueue`: requests that another engine has prefilled. Their blocks are fetched when there
is room for them, and they go straight on to decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from twostroke.kv.cache import KVCache, table_length
from twostroke.kv.transfer import KVTransfer, Offer, TransferError
from twostroke.sched.request import Phase, Request
from twostroke.sched.step import StepBuilder


class Fetched(NamedTuple):
    """An offer that is needed no more."""

    request_id: str
    num_bytes: int
    seconds: float
    problem: str  # "": the blocks are here; else why they are computed again


class ReceivedQueue:
    def __init__(self, kv: KVCache, rows: list[int], transfer: KVTransfer | None) -> None:
        """`rows`: free ones, shared with the scheduler."""
        self._kv, self._rows, self._transfer = kv, rows, transfer
        self._queue: deque[Request] = deque()
        self.fetched: list[Fetched] = []  # since somebody last took them

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def discard(self, request: Request) -> bool:
        """Forget a request that has ended; False if it did not wait here."""
        if request not in self._queue:
            return False
        self._queue.remove(request)
        return True

    def plan(
        self,
        step: StepBuilder,
        has_room: Callable[[Request, list[list[int]]], bool],
        to_decode: Callable[[Request], None],
        to_prefill: Callable[[Request], None],
    ) -> None:
        """Fetch what there is room for, in order: before the step's slots are given, so that each
        decodes in it. What cannot be fetched is prefilled like any other."""
        kv = self._kv
        while self._queue and self._rows:
            request = self._queue[0]
            tables = kv.match(request.kv, request.tokens)
            if not has_room(request, tables):
                return
            self._queue.popleft()
            assert request.given.resumed is not None
            offer = request.given.resumed.offer
            assert offer is not None
            num_cached = kv.open(request.kv, tables)
            began = monotonic()
            try:
                num_bytes, problem = self._fetch(request, offer), ""
            except TransferError as error:
                num_bytes, problem = 0, f"{type(error).__name__}: {error}"
            seconds = monotonic() - began
            self.fetched.append(Fetched(request.request_id, num_bytes, seconds, problem))
            if problem:
                kv.close(request.kv)
                to_prefill(request)
                continue
            kv.register(request.kv, request.tokens)
            request.become(Phase.DECODE)
            request.row = self._rows.pop()
            step.add_row(request)
            step.add_blocks(request, table_length(request.kv.tables))
            request.record.scheduled_s = step.now
            request.record.num_cached = num_cached
            to_decode(request)

    def _fetch(self, request: Request, offer: Offer) -> int:
        """Bytes copied."""
        if self._transfer is None:
            raise TransferError("this engine has no memory that blocks could be fetched to")
        seq, kv = request.kv, self._kv
        if offer.num_tokens != len(request.tokens) - 1:
            raise TransferError(
                f"{offer.num_tokens} tokens were offered of a sequence of {len(request.tokens)}"
            )
        wanted = kv.receive(seq, offer.num_tokens)
        places = [
            [(entry, table[entry]) for entry in entries]
            for entries, table in zip(wanted, seq.tables, strict=True)
        ]
        return self._transfer.fetch(offer, places)
