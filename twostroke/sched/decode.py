"""The decode side of the schedule: the requests that write, one slot each a step, oldest first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from twostroke.kv.cache import KVCache
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.step import StepBuilder


def by_order(request: ScheduledRequest) -> tuple[float, int]:
    return request.order


class DecodeSet:
    def __init__(self, kv: KVCache) -> None:
        self.requests: list[ScheduledRequest] = []  # sorted by order
        self._kv = kv

    def add(self, request: ScheduledRequest) -> None:
        insort(self.requests, request, key=by_order)

    def remove_inactive(self) -> None:
        """Forget the requests that have left the phase."""
        self.requests = [r for r in self.requests if r.phase is Phase.DECODE]

    def plan(
        self,
        step: StepBuilder,
        preempt_for: Callable[[ScheduledRequest], bool],
        held: frozenset[str] = frozenset(),
    ) -> None:
        """A slot for every request that can use one and is not `held`.

        `preempt_for` frees blocks by preempting the last request in order; it says False when
        that is the very request that asked. Preempted requests come later in the list than the
        one that asks, so no slot already engine_request is lost.
        """
        kv, windowed = self._kv, any(self._kv.windows)
        evicts = kv.eviction is not None
        chosen: list[ScheduledRequest] = []
        index = 0
        while index < len(self.requests):
            request = self.requests[index]
            index += 1
            if request.remaining <= 0:  # its last token is in flight
                continue
            if held and request.engine_request.request_id in held:
                continue
            seq = request.kv
            if windowed:
                step.add_drops(request, kv.drop_outside_windows(seq))
            if evicts:
                self._evict(step, request)
            if seq.num_computed >= seq.capacity and not self._grow(step, request, preempt_for):
                continue
            request.plan_sample()
            chosen.append(request)
        step.add_slots(chosen, evicts)
        kv.advance_each([request.kv for request in chosen], step.step)

    def _evict(self, step: StepBuilder, request: ScheduledRequest) -> None:
        gone = self._kv.excess(request.kv, request.scores)
        if gone:
            request.note_eviction(gone)
            self._kv.evict(request.kv, gone)
            step.add_evictions(request, gone)

    def _grow(
        self,
        step: StepBuilder,
        request: ScheduledRequest,
        preempt_for: Callable[[ScheduledRequest], bool],
    ) -> bool:
        """One more block. False if it waits for blocks in flight, or was itself preempted."""
        kv, seq = self._kv, request.kv
        grown = kv.reserve(seq, seq.num_computed + 1)
        while grown is None and not kv.awaits_blocks and preempt_for(request):
            grown = kv.reserve(seq, seq.num_computed + 1)
        if grown is None:
            return False
        step.add_blocks(request, grown)
        return True
