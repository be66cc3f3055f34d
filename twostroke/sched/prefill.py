"""The prefill side of the schedule: who waits, who is let in, and how prompts are cut in chunks."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable

from twostroke.kv.blocks import NULL_BLOCK
from twostroke.kv.cache import KVCache, table_length
from twostroke.sched.deadlines import DeadlineQueue, Rank
from twostroke.sched.decode import by_order
from twostroke.sched.isolation import IsolatedRetries
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.slo import Pacer
from twostroke.sched.step import SchedulerConfig, StepBuilder


class WaitingQueue:
    """Requests by order. A request that ends while it waits is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], ScheduledRequest]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, request: ScheduledRequest) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def peek(self, now: float) -> ScheduledRequest | None:
        while self._heap and self._heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
            self._num_finished -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> ScheduledRequest:
        return heapq.heappop(self._heap)[1]

    def note_finished(self) -> None:
        """A waiting request has finished. Sweep when most of the heap is of that kind."""
        self._num_finished += 1
        if self._num_finished > 64 and self._num_finished * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)
            self._num_finished = 0


class PrefillQueue:
    def __init__(self, config: SchedulerConfig, kv: KVCache, rows: list[int], pacer: Pacer) -> None:
        self.waiting: WaitingQueue | DeadlineQueue = WaitingQueue()
        if config.ttft_slo_s is not None:
            self.waiting = DeadlineQueue(config.ttft_slo_s, self._left_s)
        self.isolated = IsolatedRetries()
        self.requests: list[
            ScheduledRequest
        ] = []  # admitted, prompt not yet computed; sorted by order
        self._config = config
        self._kv = kv
        self._rows = rows  # free rows, shared with the scheduler
        self._pacer = pacer

    def remove_inactive(self) -> None:
        self.requests = [r for r in self.requests if r.phase is Phase.PREFILL]

    def plan(
        self,
        step: StepBuilder,
        decoding: list[ScheduledRequest],
        preempt: Callable[[ScheduledRequest], None],
        to_decode: Callable[[ScheduledRequest], None],
    ) -> None:
        """Chunks for the prompts under way, then new prompts, while the budget lasts. With a goal
        for the first token, whoever is more urgent comes before."""
        queue, now = self.waiting, step.now
        if isinstance(queue, DeadlineQueue):
            for rank, request in sorted((queue.rank(r, now), r) for r in self.requests):
                self._admit(step, decoding, before=rank)
                if request not in step.chunk_requests:  # else preempted and let in again
                    self._continue(step, request, preempt)
        else:
            for request in list(self.requests):
                self._continue(step, request, preempt)
        self._admit(step, decoding)
        for request in step.last_chunks:
            request.become(Phase.DECODE)
            request.plan_sample()
            to_decode(request)
        self.remove_inactive()

    def _continue(
        self,
        step: StepBuilder,
        request: ScheduledRequest,
        preempt: Callable[[ScheduledRequest], None],
    ) -> None:
        """The next chunk, as long as budget, time and blocks allow.

        Requests that decode have their slots by now and keep them. Without a single free block
        the last of the prompts under way gives way, so that the first can always go on.
        """
        if step.full or request.phase is not Phase.PREFILL:
            return
        kv, seq = self._kv, request.kv
        step.add_drops(request, kv.drop_outside_windows(seq))
        self._evict(step, request)
        while True:
            available = seq.capacity + self._kv.tokens_available - seq.num_computed
            count = min(
                step.budget,
                request.num_to_prefill,
                available,
                self._longest(request, seq.num_computed),
            )
            if count > 0:
                break
            last = self.requests[-1]
            if last is request or kv.awaits_blocks or last in step.chunk_requests:
                return
            preempt(last)
            self.requests.pop()
        count = step.fit(request, seq.num_computed, count)
        if count:
            self._add_chunk(step, request, count)

    def _admit(
        self, step: StepBuilder, decoding: list[ScheduledRequest], before: Rank | None = None
    ) -> None:
        """Let in who waits; only those more urgent than `before`, if engine_request."""
        while not step.full and self._rows:
            request = self._next(step.now)
            if request is None or request.pending:  # tokens of it are still in flight
                return
            if before is not None and not self._is_before(request, before, step.now):
                return
            tables = self._match(request)
            num_cached = table_length(tables) * self._kv.block_size
            uncached = len(request.tokens) - num_cached
            if not self._config.chunked_prefill and uncached > step.budget:
                return
            if not self.has_room(request, tables, decoding):
                return
            count = min(step.budget, uncached, self._longest(request, num_cached))
            count = step.fit(request, num_cached, count)
            if not count:
                return
            if request not in self.isolated:
                self.waiting.pop()
            self._start(step, request, tables)
            count = min(count, self._kv.tokens_available)
            if count <= 0:
                return
            self._add_chunk(step, request, count)

    def _next(self, now: float) -> ScheduledRequest | None:
        """Who is to be let in next. While somebody is to run alone, nobody else is."""
        alone = self.isolated.next()
        if alone is None:
            return self.waiting.peek(now)
        return alone if alone.phase is Phase.WAITING else None

    def _is_before(self, request: ScheduledRequest, rank: Rank, now: float) -> bool:
        queue = self.waiting
        return isinstance(queue, DeadlineQueue) and queue.rank(request, now) < rank

    def _left_s(self, request: ScheduledRequest) -> float:
        return self._pacer.prefill_s(request.kv.num_computed, request.num_to_prefill)

    def _start(self, step: StepBuilder, request: ScheduledRequest, tables: list[list[int]]) -> None:
        request.become(Phase.PREFILL)
        request.row = self._rows.pop()
        num_cached = self._kv.open(request.kv, tables)
        insort(self.requests, request, key=by_order)
        step.add_row(request)
        step.add_blocks(request, table_length(tables))
        record = request.record
        if not record.scheduled_s:
            record.scheduled_s = step.now
            record.num_cached = num_cached
        elif record.preempted:
            step.recomputed += max(0, record.preempted[-1][1] - num_cached)

    def _add_chunk(self, step: StepBuilder, request: ScheduledRequest, count: int) -> None:
        seq = request.kv
        grown = self._kv.reserve(seq, seq.num_computed + count)
        assert grown is not None, "a chunk was cut to the blocks there are"
        step.add_blocks(request, grown)
        request.record.chunks.append((step.now, step.step, seq.num_computed, count))
        step.add_chunk(request, count)
        self._kv.advance(seq, count, step.step)
        self._kv.register(seq, request.tokens)

    def _match(self, request: ScheduledRequest) -> list[list[int]]:
        asked = request.engine_request.params.prompt_logprobs is not None
        if asked and len(request.prompt_logprobs) < request.num_prompt - 1:
            return [[] for _ in self._kv.windows]  # every prompt position must be computed
        tokens = request.tokens
        if self._kv.eviction is not None:  # what others computed in full sight is not ours there
            tokens = tokens[: self._kv.next_eviction(request.kv, request.num_prompt)]
        return self._kv.match(request.kv, tokens)

    def _evict(self, step: StepBuilder, request: ScheduledRequest) -> None:
        """Tokens that a preempted request had written are computed once more as they were: without
        what had been evicted by then."""
        kv, seq = self._kv, request.kv
        if kv.eviction is None or seq.num_computed < request.num_prompt:
            return
        gone = kv.excess(seq)
        if not gone:
            return
        if seq.num_computed in request.evictions:
            gone = request.evictions[seq.num_computed]
        else:  # it was written by an engine that is no more
            request.note_eviction(gone)
        kv.evict(seq, gone)
        step.add_evictions(request, gone)

    def _longest(self, request: ScheduledRequest, start: int) -> int:
        """A chunk's longest, from `start` on: half a step's budget where the log-probabilities of
        all its positions are asked for, so that with the head for each of them the step is no
        longer than others; and no further than to the next eviction."""
        most, kv = self._config.max_num_batched_tokens, self._kv
        if kv.eviction is not None:
            most = min(most, kv.next_eviction(request.kv, request.num_prompt) - start)
        if (
            request.engine_request.params.prompt_logprobs is None
            or not self._config.chunked_prefill
        ):
            return most
        return max(1, most // 2)

    def has_room(
        self, request: ScheduledRequest, tables: list[list[int]], decoding: list[ScheduledRequest]
    ) -> bool:
        """Whether the request can be let in without soon preempting it or another."""
        return all(
            self._group_has_room(group, request, table, decoding)
            for group, table in enumerate(tables)
        )

    def _group_has_room(
        self,
        group: int,
        request: ScheduledRequest,
        table: list[int],
        decoding: list[ScheduledRequest],
    ) -> bool:
        """Kept free are the rest of every admitted prompt and, for each request that will write,
        `lookahead` tokens of growth (less if it may write less). `table`: its cached prefix."""
        kv, lookahead, pool = self._kv, self._config.lookahead, self._kv.pools[group]
        hits = [block for block in table if block != NULL_BLOCK]
        # Of the hits, those without an owner are still counted as available.
        available = pool.num_available - sum(pool.refs[block] == 0 for block in hits)
        length = len(request.tokens)
        if not decoding and not self.requests:
            # Alone it always fits: `Scheduler.add` has refused what cannot. Blocks still owned
            # by steps in flight, by offers and by what is on its way here are freed first.
            awaited = kv.awaits_blocks or kv.num_held or kv.num_receiving
            needed = kv.blocks_for(group, length, request.num_prompt)
            return needed - len(hits) <= available or not awaited
        growth = length + min(request.remaining, lookahead)
        need = kv.blocks_for(group, growth, request.num_prompt) - len(hits)
        for other in self.requests:
            growth = len(other.tokens) + min(other.remaining, lookahead)
            need += kv.blocks_missing(group, other.kv, growth, other.num_prompt)
        if need + len(decoding) * kv.blocks_for(group, lookahead + kv.block_size) <= available:
            return True  # whatever those that write may need, there is enough
        for other in decoding:
            growth = other.kv.num_computed + min(other.remaining, lookahead)
            need += kv.blocks_missing(group, other.kv, growth, other.num_prompt, decodes=True)
        return need <= available
