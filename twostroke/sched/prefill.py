"""The prefill side of the schedule: waiting requests, admission, and the chunks of prompts."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence

from twostroke.kv.blocks import NULL_BLOCK
from twostroke.kv.cache import KVCache, table_length
from twostroke.observe.record import TierFetchRecord
from twostroke.sched.deadlines import DeadlineQueue, Rank
from twostroke.sched.decode import scheduling_order
from twostroke.sched.isolation import IsolatedRetries
from twostroke.sched.received import ReceivedQueue
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.slo import Pacer
from twostroke.sched.step import SchedulerConfig, StepBuilder

# A fetch from tiers fails when it takes longer than computing its tokens would, longer than
# MIN_FETCH_S and longer than SLOW_FETCH times its expected time.
MIN_FETCH_S = 0.25
SLOW_FETCH = 4.0
BLIND_FETCH_S = 5.0  # replaces the time of computing while that is unknown


class WaitingQueue:
    """Waiting requests by order. A request that finishes while it waits is skipped later."""

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
        """Count a waiting request that has finished. Sweep when most entries are finished."""
        self._num_finished += 1
        if self._num_finished > 64 and self._num_finished * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._heap)
            self._num_finished = 0


class PrefillQueue:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        rows: list[int],
        pacer: Pacer,
        received: ReceivedQueue,
    ) -> None:
        self.waiting: WaitingQueue | DeadlineQueue = WaitingQueue()
        if config.ttft_slo_s is not None:
            self.waiting = DeadlineQueue(config.ttft_slo_s, self._left_s)
        self.isolated = IsolatedRetries()
        self.requests: list[ScheduledRequest] = []  # being prefilled, sorted by order
        self._config = config
        self._kv = kv
        self._rows = rows  # free rows, shared with the scheduler
        self._pacer = pacer
        self._received = received

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.waiting) or self.isolated.active

    def remove_inactive(self) -> None:
        """Remove the requests that have left the phase."""
        self.requests = [r for r in self.requests if r.phase is Phase.PREFILL]

    def plan(
        self,
        step: StepBuilder,
        decoding: list[ScheduledRequest],
        preempt: Callable[[ScheduledRequest], None],
        to_decode: Callable[[ScheduledRequest], None],
    ) -> None:
        """Add chunks of the prompts under way, then of new prompts, while the budget lasts. With a
        goal for the first token, more urgent new prompts come first."""
        queue, now = self.waiting, step.now
        if isinstance(queue, DeadlineQueue):
            for rank, request in sorted((queue.rank(r, now), r) for r in self.requests):
                self._admit(step, decoding, before=rank)
                if request not in step.chunk_requests:  # else it was preempted and admitted again
                    self._continue(step, request, preempt)
        else:
            for request in list(self.requests):
                self._continue(step, request, preempt)
        self._admit(step, decoding)
        for request in step.last_chunks:
            request.set_phase(Phase.DECODE)
            request.plan_sample()
            to_decode(request)
        if self.requests:
            self.remove_inactive()

    def _continue(
        self,
        step: StepBuilder,
        request: ScheduledRequest,
        preempt: Callable[[ScheduledRequest], None],
    ) -> None:
        """Add the next chunk of a prompt, as long as budget, time and blocks allow.

        Requests that decode have their slots by now and keep them. If no block is free, the last of
        the prompts under way is preempted, so that the first can always continue.
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
                self._max_chunk(request, seq.num_computed),
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
        """Admit waiting requests; only those more urgent than `before`, if it is given."""
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
            if self._kv.tiers is not None and self._fetch(request, tables, step.now):
                self.waiting.pop()
                continue
            count = min(step.budget, uncached, self._max_chunk(request, num_cached))
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
        """Return the next request to admit. If requests must run alone, it is one of them."""
        isolated = self.isolated.next() if self.isolated.active else None
        if isolated is None:
            return self.waiting.peek(now)
        return isolated if isolated.phase is Phase.WAITING else None

    def _is_before(self, request: ScheduledRequest, rank: Rank, now: float) -> bool:
        queue = self.waiting
        return isinstance(queue, DeadlineQueue) and queue.rank(request, now) < rank

    def _left_s(self, request: ScheduledRequest) -> float:
        return self._pacer.prefill_s(request.kv.num_computed, request.num_to_prefill)

    def _fetch(self, request: ScheduledRequest, tables: list[list[int]], now: float) -> bool:
        """Begin to fetch a prefix from the tiers, if that is expected to be faster than computing
        it. Return whether the request now waits for the fetch."""
        if request in self.isolated or request.fetch_failed:
            return False
        tokens = self._reusable(request)
        found = self._kv.find_in_tiers(request.kv, tokens, tables)
        if found is None:
            return False
        start = table_length(tables) * self._kv.block_size
        count = found.end_block * self._kv.block_size - start
        compute_s = self._pacer.prefill_s(start, count)
        request.record.tier_fetch = TierFetchRecord(
            count, found.num_bytes, found.seconds, compute_s, tiers=found.tiers
        )
        if 0.0 < compute_s <= found.seconds:
            return False
        patience_s = max(MIN_FETCH_S, SLOW_FETCH * found.seconds, compute_s or BLIND_FETCH_S)
        return self._received.fetch_prefix(request, tables, found, now + patience_s)

    def start_fetched(self, step: StepBuilder, request: ScheduledRequest) -> None:
        """Continue a request behind the prefix that was fetched for it."""
        fetched = request.record.tier_fetch
        assert fetched is not None
        seq, record = request.kv, request.record
        if not record.scheduled_s:
            record.num_fetched = fetched.tokens
        self._begin_prefill(step, request, seq.num_computed)

    def _start(self, step: StepBuilder, request: ScheduledRequest, tables: list[list[int]]) -> None:
        request.row = self._rows.pop()
        self._begin_prefill(step, request, self._kv.open(request.kv, tables))

    def _begin_prefill(self, step: StepBuilder, request: ScheduledRequest, num_cached: int) -> None:
        """Begin to compute the prompt of a request with a row, from `num_cached` on."""
        request.set_phase(Phase.PREFILL)
        insort(self.requests, request, key=scheduling_order)
        step.add_row(request)
        step.add_blocks(request, table_length(request.kv.tables))
        record = request.record
        if not record.scheduled_s:
            record.scheduled_s = step.now
            record.num_cached = num_cached
        elif record.preempted:
            step.recomputed += max(0, record.preempted[-1][1] - num_cached)

    def _add_chunk(self, step: StepBuilder, request: ScheduledRequest, count: int) -> None:
        seq = request.kv
        grown = self._kv.reserve(seq, seq.num_computed + count)
        assert grown is not None, "a chunk is larger than the free blocks"
        step.add_blocks(request, grown)
        request.record.chunks.append((step.now, step.step, seq.num_computed, count))
        step.add_chunk(request, count)
        self._kv.advance(seq, count, step.step)
        self._kv.register(seq, request.tokens)

    def _match(self, request: ScheduledRequest) -> list[list[int]]:
        return self._kv.match(request.kv, self._reusable(request))

    def _reusable(self, request: ScheduledRequest) -> Sequence[int]:
        """Return the tokens at the start of a request whose cached blocks it may use."""
        wanted = request.engine_request.params.prompt_logprobs is not None
        if wanted and len(request.prompt_logprobs) < request.num_prompt - 1:
            return ()  # every prompt position must be computed
        if self._kv.eviction is not None:  # after its first eviction it computes other values
            return request.tokens[: self._kv.next_eviction(request.kv, request.num_prompt)]
        return request.tokens

    def _evict(self, step: StepBuilder, request: ScheduledRequest) -> None:
        """Repeat the evictions from before a preemption, so that the tokens that the request has
        written are recomputed from the same cache entries."""
        kv, seq = self._kv, request.kv
        if kv.eviction is None or seq.num_computed < request.num_prompt:
            return
        evicted = kv.excess(seq)
        if not evicted:
            return
        if seq.num_computed in request.evictions:
            evicted = request.evictions[seq.num_computed]
        else:  # the tokens were written by an engine that has died
            request.note_eviction(evicted)
        kv.evict(seq, evicted)
        step.add_evictions(request, evicted)

    def _max_chunk(self, request: ScheduledRequest, start: int) -> int:
        """Return the largest chunk from `start` on. A chunk ends at the next eviction. A chunk with
        log-probabilities of all positions has half of the budget: the output head runs for each of
        them, and the step must not take longer than other steps."""
        limit, kv = self._config.max_num_batched_tokens, self._kv
        if kv.eviction is not None:
            limit = min(limit, kv.next_eviction(request.kv, request.num_prompt) - start)
        params = request.engine_request.params
        if params.prompt_logprobs is None or not self._config.chunked_prefill:
            return limit
        return max(1, limit // 2)

    def has_room(
        self, request: ScheduledRequest, tables: list[list[int]], decoding: list[ScheduledRequest]
    ) -> bool:
        """Return whether the request can be admitted without soon preempting it or another one."""
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
        """Keep free: the rest of every admitted prompt and, for each request that will write,
        `lookahead` tokens of growth (fewer if it may write fewer). `table`: the cached prefix."""
        kv, lookahead, pool = self._kv, self._config.lookahead, self._kv.pools[group]
        hits = [block for block in table if block != NULL_BLOCK]
        # The pool counts cached blocks without an owner as available.
        available = pool.num_available - sum(pool.refs[block] == 0 for block in hits)
        length = len(request.tokens)
        if not decoding and not self.requests:
            # Alone it always fits: `Scheduler.check` has refused requests that cannot. Blocks of
            # steps in flight, of offers and of fetches under way are freed first.
            awaited = kv.awaits_blocks or kv.num_held or kv.num_receiving
            needed = kv.blocks_for(group, length, request.num_prompt)
            return needed - len(hits) <= available or not awaited
        growth = length + min(request.remaining, lookahead)
        need = kv.blocks_for(group, growth, request.num_prompt) - len(hits)
        for other in (*self.requests, *self._received.tier_fetches):
            growth = len(other.tokens) + min(other.remaining, lookahead)
            need += kv.blocks_missing(group, other.kv, growth, other.num_prompt)
        if need + len(decoding) * kv.blocks_for(group, lookahead + kv.block_size) <= available:
            return True  # enough for the largest growth of the requests that write
        for other in decoding:
            growth = other.kv.num_computed + min(other.remaining, lookahead)
            need += kv.blocks_missing(group, other.kv, growth, other.num_prompt, decodes=True)
        return need <= available
