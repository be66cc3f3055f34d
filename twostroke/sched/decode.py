"""`DecodeSet`: the requests in decode. Each gets one slot, for one token, in a step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from twostroke.kv.cache import KVCache, KVSequence
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.step import StepBuilder


def scheduling_order(request: ScheduledRequest) -> tuple[float, int]:
    return request.order


class DecodeSet:
    """The requests in the decode phase, sorted by their scheduling order."""

    def __init__(self, kv: KVCache) -> None:
        self.requests: list[ScheduledRequest] = []
        self._kv = kv

    def add(self, request: ScheduledRequest) -> None:
        insort(self.requests, request, key=scheduling_order)

    def remove_inactive(self) -> None:
        """Remove the requests that are not in the decode phase any more."""
        self.requests = [r for r in self.requests if r.phase is Phase.DECODE]

    def plan(
        self,
        step: StepBuilder,
        preempt_for: Callable[[ScheduledRequest], bool],
        held: frozenset[str] = frozenset(),
    ) -> list[KVSequence]:
        """Give a slot to every request that can compute a token in this step. Return the sequences
        of the slots.

        `held`: ids of requests that get no slot. `preempt_for(request)` preempts the last request
        in scheduling order to free blocks. It returns False if the last request is `request`
        itself. Otherwise the preempted request comes later, so it has no slot in this step yet.
        """
        kv, windowed = self._kv, any(self._kv.windows)
        uses_eviction = kv.eviction is not None
        chosen: list[ScheduledRequest] = []
        sequences = []
        index = 0
        while index < len(self.requests):
            request = self.requests[index]
            index += 1
            if request.remaining <= 0:  # its last token is in flight
                continue
            if held and request.request_id in held:
                continue
            seq = request.kv
            if windowed:
                step.add_drops(request, kv.drop_outside_windows(seq))
            if uses_eviction:
                self._evict(step, request)
            if seq.num_computed >= seq.capacity and not self._grow(step, request, preempt_for):
                continue
            # These two lines are `plan_sample`, inlined because they run for every token.
            request.pending += 1
            request.remaining -= 1
            chosen.append(request)
            sequences.append(seq)
        step.add_slots(chosen, sequences, uses_eviction)
        kv.advance_each(sequences, step.step)
        return sequences

    def add_drafts(
        self, step: StepBuilder, drafts: Sequence[Sequence[int]], sequences: Sequence[KVSequence]
    ) -> None:
        """Add drafted tokens to the slots of a step. A draft takes only free blocks, and preempts
        no request."""
        kv, taken = self._kv, []
        for request, seq, drafted in zip(step.sampled_requests, sequences, drafts, strict=True):
            if drafted:
                grown = kv.reserve(seq, seq.num_computed + len(drafted))
                if grown is None:
                    drafted = drafted[: seq.capacity - seq.num_computed]
                step.add_blocks(request, grown or 0)
                request.pending += len(drafted)
                request.remaining -= len(drafted)
                kv.advance(seq, len(drafted), step.step)
            taken.append(drafted)
        if any(taken):
            step.add_drafts(taken, sequences)

    def _evict(self, step: StepBuilder, request: ScheduledRequest) -> None:
        """Evict the blocks of a request that are above the budget of the eviction policy."""
        evicted = self._kv.excess(request.kv, request.scores)
        if evicted:
            request.note_eviction(evicted)
            self._kv.evict(request.kv, evicted)
            step.add_evictions(request, evicted)

    def _grow(
        self,
        step: StepBuilder,
        request: ScheduledRequest,
        preempt_for: Callable[[ScheduledRequest], bool],
    ) -> bool:
        """Allocate a block for the next token. Return False if there is none: the request waits for
        blocks that steps in flight will free, or it was preempted."""
        kv, seq = self._kv, request.kv
        grown = kv.reserve(seq, seq.num_computed + 1)
        while grown is None and not kv.awaits_blocks and preempt_for(request):
            grown = kv.reserve(seq, seq.num_computed + 1)
        if grown is None:
            return False
        step.add_blocks(request, grown)
        return True
