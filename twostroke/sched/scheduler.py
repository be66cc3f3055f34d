"""`Scheduler`: composes the two phases into steps. Deterministic, over plain data, no tensors.

    add, abort ──▶ plan() ──▶ StepInFlight ──▶ (an executor) ──▶ StepResult ──▶ commit() ──▶ updates

`plan` may run ahead of `commit`: what it planned counts as done, tokens still unknown are
`pending`, and blocks that a planned step touches stay owned until that step commits.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from twostroke.errors import RequestError
from twostroke.kv.cache import KVCache, KVSequence
from twostroke.kv.prefix import seed_digest
from twostroke.kv.transfer import KVTransfer, Offer
from twostroke.observe.record import RequestRecord
from twostroke.plan import BROKEN_LOGITS, BlockEvict, StepResult, TokenLogprobs
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.decode import DecodeSet
from twostroke.sched.prefill import PrefillQueue
from twostroke.sched.received import Fetched, ReceivedQueue
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.slo import Pacer
from twostroke.sched.step import SchedulerConfig, StepBuilder, StepInFlight
from twostroke.sched.work import AttentionWork

PRIORITY_AGE_S = 10.0  # waited so long, a request goes before one of the next better priority
# Blocks of a prompt are offered before all of it is computed when there are so many tokens more,
# and this share more: whoever fetches them is sent the prompt up to there each time.
AHEAD_TOKENS, AHEAD_SHARE = 256, 8


class Update(NamedTuple):
    """What became known of a request: new tokens, or its end, or both."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token
    record: RequestRecord | None = None  # with the end
    error: str = ""
    progress: int = 0  # prompt tokens computed so far, while it is prefilled
    impossible: bool = False  # the error is the request's own: it asks what cannot be
    # With the end of a request that another engine goes on with; without one: of what is computed
    # so far of its prompt.
    offer: Offer | None = None


class CommitResult(NamedTuple):
    """What a commit brought, and whose tokens, by what came before them."""

    updates: list[Update]
    regular: int  # streams that the commit before brought a token, too
    late: list[tuple[RequestRecord, bool]]  # others that go on; whether they had a slot
    first: list[RequestRecord]
    drafted: int  # tokens beyond the first of their stream in this step
    # First tokens of streams that began elsewhere, and since when those wait.
    resumed: list[tuple[RequestRecord, float]]


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = monotonic,
        transfer: KVTransfer | None = None,
    ) -> None:
        """`transfer`: where blocks can be fetched from other engines, or offered to them."""
        self.config = config
        self._transfer = transfer
        self.in_flight: deque[StepInFlight] = deque()  # planned and not committed, oldest first
        self.kv = KVCache(
            config.groups,
            config.block_size,
            keep_cached=config.prefix_caching,
            max_chunk=config.max_num_batched_tokens,
            eviction=config.eviction,
        )
        self._work = AttentionWork(config.groups)
        self.pacer = Pacer(config, self._work)
        self._clock = clock
        self._requests: dict[str, ScheduledRequest] = {}
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._retired: list[int] = []
        self._evicted: list[BlockEvict] = []  # since the newest step was planned
        self._prefill = PrefillQueue(config, self.kv, self._rows, self.pacer)
        self._decode = DecodeSet(self.kv)
        self._received = ReceivedQueue(self.kv, self._rows, transfer)
        self._ahead: dict[int, ScheduledRequest] = {}  # by the offer of what is computed so far
        self._step = 0
        self._arrivals = 0
        self._preempted = 0  # requests, since the newest step was planned
        self._committed = -1  # the newest step that has

    # ── what is there ───────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return len(self._prefill.waiting) + len(self._prefill.isolated) + len(self._received)

    @property
    def num_running(self) -> int:
        return len(self._prefill.requests) + len(self._decode.requests)

    @property
    def has_requests(self) -> bool:
        """Or blocks to fetch that a request will need."""
        return bool(self._requests) or self._received.has_work

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def kv_layout(self) -> str:
        """What a KV block holds: the same in all engines between which blocks travel."""
        return "" if self._transfer is None else self._transfer.layout

    # ── requests come and go ────────────────────────────────────────────────────────────────

    def check(self, engine_request: EngineRequest) -> int:
        """Raises `RequestError` if `add` would; how many tokens the request may write."""
        config, prompt = self.config, engine_request.prompt_token_ids
        if engine_request.request_id in self._requests:
            raise RequestError(
                f"a request with the id {engine_request.request_id!r} is already running"
            )
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) >= config.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but max_model_len is "
                f"{config.max_model_len} and one must be left to write; shorten the prompt or "
                "raise max_model_len"
            )
        if engine_request.hand_over and (self._transfer is None or not self._transfer.offers):
            raise RequestError("this engine cannot hand requests over: its KV cache is not shared")
        if config.eviction is not None and engine_request.params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs are of a sequence that is kept whole, and this engine evicts "
                "(kv_eviction); leave them out, or run an engine without kv_eviction"
            )
        room = config.max_model_len - len(prompt)
        max_outputs = (
            room
            if engine_request.params.max_tokens is None
            else min(engine_request.params.max_tokens, room)
        )
        for index, group in enumerate(config.groups):
            blocks = self.kv.blocks_for(index, len(prompt) + max_outputs - 1, len(prompt))
            if blocks > group.num_blocks:
                which = "" if len(config.groups) == 1 else f" for layers of {_window(group.window)}"
                raise RequestError(
                    f"{len(prompt)} prompt tokens and up to {max_outputs} output tokens need "
                    f"{blocks} KV blocks of {config.block_size} tokens{which}, but the cache has "
                    f"{group.num_blocks}; lower max_tokens, shorten the prompt, or enlarge the "
                    "cache (kv_cache_memory_bytes)"
                )
        return max_outputs

    def add(self, engine_request: EngineRequest) -> None:
        request = self._requests[engine_request.request_id] = self._new_request(
            engine_request, self.check(engine_request)
        )
        if engine_request.resumed is not None and engine_request.resumed.offer is not None:
            self._received.push(request)
        else:
            self._prefill.waiting.push(request)

    def fetch_ahead(self, engine_request: EngineRequest) -> None:
        """Fetch what another engine has computed so far of a prompt, which its request is to find
        as a cached prefix when it comes. The request
        ends where that does, with one token written."""
        self._received.push_ahead(self._new_request(engine_request, max_outputs=1))

    def _new_request(self, engine_request: EngineRequest, max_outputs: int) -> ScheduledRequest:
        config, prompt, now = self.config, engine_request.prompt_token_ids, self._clock()
        record = RequestRecord(
            engine_request.request_id,
            len(prompt),
            engine_request.received_s or now,
            queued_s=now,
            max_tokens=engine_request.params.max_tokens or 0,
            n=engine_request.params.n,
            family=engine_request.family,
            gap_causes=array("f") if engine_request.gap_causes else None,
        )
        # Who waits gains a level every PRIORITY_AGE_S, so nobody starves. Whom a request then
        # overtakes depends on when both came, not on the moment of asking: the order is fixed.
        aged = engine_request.priority + now / PRIORITY_AGE_S if config.policy == "priority" else 0
        request = ScheduledRequest(
            engine_request,
            order=(aged, self._arrivals),
            max_outputs=max_outputs,
            tokens=[
                *prompt,
                *(() if engine_request.resumed is None else engine_request.resumed.tokens),
            ],
            kv=KVSequence(self._seed(engine_request)),
            record=record,
        )
        self._arrivals += 1
        return request

    def _seed(self, engine_request: EngineRequest) -> bytes | None:
        """Where the request's digest chain starts: by salt; without prefix caching only the
        siblings of one `n > 1` request share, and nothing outlives them."""
        if self.config.prefix_caching:
            return seed_digest("salt", engine_request.salt)
        return seed_digest("family", engine_request.family) if engine_request.family else None

    def abort(self, request_id: str) -> Update | None:
        """End a request at any moment. None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        waited = request.phase is Phase.WAITING
        self._finish(request, FinishReason.ABORT)
        if not waited:
            self._remove_inactive()
        return self._update(request)

    def release_offer(self, number: int) -> None:
        """Blocks that were offered are needed no more."""
        assert self._transfer is not None
        self._transfer.release(number)
        self.kv.release_held(number)
        if number in self._ahead:
            self._ahead.pop(number).offered_ahead = False

    def reset_prefixes(self) -> None:
        """Forget every cached prefix; running requests keep their blocks."""
        self.kv.reset_prefixes()
        self._received.drop_ahead("all cached prefixes are forgotten")

    def tidy(self) -> None:
        """Let go what engines shared with this one that have ended."""
        if self._transfer is not None:
            self._transfer.tidy()

    def make_ready(self) -> bool:
        """Do some of what blocks that come here would wait for; whether there is more."""
        return self._transfer is not None and self._transfer.make_ready()

    def take_fetched(self) -> list[Fetched]:
        """Offers of other engines that have been fetched, or given up, since the last time."""
        fetched, self._received.fetched = self._received.fetched, []
        return fetched

    # ── planning ────────────────────────────────────────────────────────────────────────────

    def plan(self, held: frozenset[str] = frozenset()) -> StepInFlight | None:
        """The next step, or None if nothing can run before a step in flight commits. `held`:
        requests that write nothing in it."""
        budget = self.config.max_num_batched_tokens
        builder = StepBuilder(self._step, budget, self._work, self._clock(), self._evicted)

        def preempt(victim: ScheduledRequest) -> None:
            self._preempted += 1
            self._preempt(victim, builder.now)

        def preempt_for(request: ScheduledRequest) -> bool:
            victim = self._last_in_order()
            preempt(victim)
            (self._decode if victim in self._decode.requests[-1:] else self._prefill).requests.pop()
            return victim is not request

        if self._received.has_work:
            self._plan_received(builder)
        self._decode.plan(builder, preempt_for, held)
        builder.allowance = self.pacer.allowance(builder, self.in_flight)
        self._prefill.plan(builder, self._decode.requests, preempt, self._decode.add)
        if builder.empty:
            return None
        plan = builder.build(tuple(self._retired))
        self._retired.clear()
        self._evicted.clear()
        step = StepInFlight(
            plan,
            builder.sampled,
            builder.chunk_requests,
            builder.now,
            self.pacer.expected_s(plan),
            self._preempted,
            builder.recomputed,
            self.num_waiting,
            self.num_running,
            self.kv.usage(),
        )
        self._step += 1
        self._preempted = 0
        self.in_flight.append(step)
        return step

    def _plan_received(self, builder: StepBuilder) -> None:
        if self._prefill.isolated.active:  # whoever runs alone does
            return
        decode = self._decode

        def has_room(request: ScheduledRequest, tables: list[list[int]]) -> bool:
            return self._prefill.has_room(request, tables, decode.requests)

        self._received.plan(builder, has_room, decode, self._prefill.waiting.push)

    def _last_in_order(self) -> ScheduledRequest:
        ends = [queue.requests[-1] for queue in (self._prefill, self._decode) if queue.requests]
        return max(ends, key=lambda request: request.order)

    def _preempt(self, request: ScheduledRequest, now: float) -> None:
        """Finish and re-add with the tokens kept. What the prefix cache still has is not lost."""
        self._requeue(request, now)
        self._prefill.waiting.push(request)

    def _requeue(self, request: ScheduledRequest, now: float) -> None:
        request.record.preempted.append((now, request.kv.num_computed))
        self._release(request)
        request.become(Phase.WAITING)

    # ── committing ──────────────────────────────────────────────────────────────────────────

    def commit(self, result: StepResult, now: float | None = None) -> CommitResult:
        """The oldest step in flight has run: append its tokens, end what has ended. `now`: when
        the tokens were known."""
        in_flight = self.in_flight.popleft()
        plan, sampled = in_flight.plan, in_flight.sampled
        now, step = self._clock() if now is None else now, plan.step
        self.pacer.commit(in_flight, result.device_s, now)
        for request, shares in zip(sampled, result.shares, strict=False):
            request.add_shares(shares)
        before, num_slots = self._committed, len(plan.decode)
        if result.counts is not None:
            sampled, num_slots = self._take_back_drafts(in_flight, result.counts)
        skipped = drafted = 0
        first: list[RequestRecord] = []
        resumed: list[tuple[RequestRecord, float]] = []
        late: list[tuple[RequestRecord, bool]] = []
        updates, any_finished = self._commit_chunks(in_flight, result), False
        logprobs, register = result.logprobs, self.kv.register
        # The host's hottest loop: once for every token that is written. Python takes long to look
        # up a member of an enum and to call a tuple's class, so neither is done in it.
        finished, decodes, no_more = Phase.FINISHED, Phase.DECODE, Update("", ())[2:]
        new_tuple: Callable[..., Update] = tuple.__new__
        for index, (request, token) in enumerate(zip(sampled, result.tokens, strict=True)):
            phase = request.phase
            if phase is finished:  # aborted, or stopped by an earlier token
                skipped += 1
                continue
            tokens, seq, record = request.tokens, request.kv, request.record
            request.pending -= 1
            if token < 0:
                skipped, any_finished = skipped + 1, True
                self._finish(request, FinishReason.ERROR)
                updates.append(self._update(request)._replace(error=BROKEN_LOGITS))
                continue
            tokens.append(token)
            steps = record.token_step
            if not steps and request.engine_request.resumed is not None:
                resumed.append((record, request.engine_request.resumed.last_s))
            elif not steps:
                first.append(record)
            elif steps[-1] != before or index >= num_slots:
                if steps[-1] == step:
                    drafted += 1
                else:
                    late.append((record, index < num_slots))
            steps.append(step)
            record.token_s.append(now)
            if seq.num_computed >= seq.register_at and phase is decodes:
                register(seq, tokens)
            length = len(tokens)
            ends = token in request.stop_ids or length >= request.max_length
            any_finished |= ends and self._check_stop(request, token)
            if ends or logprobs or length == request.num_prompt + 1:
                record.first_token_s = record.token_s[0]
                entry = logprobs.get(index)
                updates.append(self._update(request, (token,), (entry,) if entry else ()))
            else:
                whole = (request.request_id, (token,)) + no_more  # noqa: RUF005 - the faster way
                updates.append(new_tuple(Update, whole))
        for request in sampled if self._prefill.isolated.active else ():
            if self._prefill.isolated.passed(request) and request.phase is Phase.DECODE:
                self._preempt(request, now)
                any_finished = True
        if any_finished:
            self._remove_inactive()
        self.kv.commit(step)
        self._committed = step
        regular = len(sampled) - skipped - len(first) - len(late) - len(resumed) - drafted
        if result.counts is not None:
            updates = _joined(updates)
        return CommitResult(updates, regular, late, first, drafted, resumed)

    def _take_back_drafts(
        self, step: StepInFlight, counts: list[int]
    ) -> tuple[list[ScheduledRequest], int]:
        """Forget what was planned for drafts that were rejected. Returns the request of each token,
        and how many tokens are of slots."""
        for slot, request, count in zip(step.plan.decode, step.sampled, counts, strict=False):
            rejected = 1 + slot.drafts - count
            request.pending -= rejected
            request.remaining += rejected
            if request.phase is Phase.DECODE:  # else it has lost its blocks
                self.kv.rewind(request.kv, rejected)
        each = zip(step.sampled, counts, strict=True)
        sampled = [request for request, count in each for _ in range(count)]
        return sampled, sum(counts[: len(step.plan.decode)])

    def _commit_chunks(self, step: StepInFlight, result: StepResult) -> list[Update]:
        """Keep the prompts' log-probabilities; tell who asked how far its prompt is, and offer as
        much of it to the engine that will go on with it."""
        updates = []
        for request, chunk in zip(step.chunked, step.plan.prefill, strict=True):
            if chunk.row in result.prompt_logprobs:
                # Entry 0 is position 1. After a preemption positions come a second time.
                entries = result.prompt_logprobs[chunk.row]
                kept = request.prompt_logprobs
                kept.extend(entries[len(kept) - chunk.start :])
            if (
                request.engine_request.progress
                and not chunk.last
                and request.phase is not Phase.FINISHED
            ):
                done = chunk.start + chunk.size
                updates.append(Update(request.request_id, (), progress=done))
            if (
                request.engine_request.hand_over
                and not chunk.last
                and request.phase is Phase.PREFILL
            ):
                offer = self._offer_ahead(request, chunk.start + chunk.size)
                if offer is not None:
                    updates.append(Update(request.request_id, (), offer=offer))
        return updates

    def _offer_ahead(self, request: ScheduledRequest, num_tokens: int) -> Offer | None:
        """Offer the blocks that are computed, if they are enough more than the last time and those
        have been fetched."""
        whole = num_tokens // self.config.block_size * self.config.block_size
        more = max(AHEAD_TOKENS, request.num_ahead // AHEAD_SHARE)
        if request.offered_ahead or whole < request.num_ahead + more:
            return None
        # One that was preempted has other blocks than the step had that has just run.
        if not self.config.prefix_caching or request.record.preempted:
            return None
        tables = self.kv.part(request.kv, whole)
        if tables is None:
            return None
        assert self._transfer is not None
        offer = self._transfer.offer(tables, whole)
        self.kv.hold_part(tables, offer.number)
        self._ahead[offer.number] = request
        request.num_ahead, request.offered_ahead = whole, True
        return offer

    def _check_stop(self, request: ScheduledRequest, token: int) -> bool:
        params = request.engine_request.params
        if token in request.stop_ids and request.num_outputs >= params.min_tokens:
            by_user = params.stop_token_ids is not None and token in params.stop_token_ids
            request.stop_reason = token if by_user else None
            self._finish(request, FinishReason.STOP)
        elif len(request.tokens) >= request.max_length:
            handed_over = (
                request.engine_request.hand_over and request.num_outputs < request.max_outputs
            )
            reason = FinishReason.PREFILLED if handed_over else FinishReason.LENGTH
            self._finish(request, reason)
        return request.phase is Phase.FINISHED

    def fail(self, error: str) -> list[Update]:
        """A step could not run. If one request was in it, that one ends with the error; if more
        were, they are run one by one (`isolation.py`). Whatever else ran waits again.

        No row is taken afterwards, and the executor is to start from none (`Executor.reset`). No
        prefix is trusted any more.
        """
        involved: dict[ScheduledRequest, None] = {}
        for step in self.in_flight:
            involved |= dict.fromkeys([*step.sampled, *step.chunked])
        involved = {r: None for r in involved if r.phase is not Phase.FINISHED}
        queue, isolated, now = self._prefill.waiting, self._prefill.isolated, self._clock()
        for request in (*self._prefill.requests, *self._decode.requests):
            runs_alone = request in isolated
            self._requeue(request, now)
            if request in involved and not runs_alone:
                isolated.add(request)
            elif not runs_alone:
                queue.push(request)
        for request in involved:
            request.remaining += request.pending
            request.pending = 0
        self._remove_inactive()
        if self.in_flight:
            self.kv.commit(self.in_flight[-1].plan.step)
            self.in_flight.clear()
        self.reset_prefixes()
        self._retired.clear()
        if len(involved) > 1:
            return []
        for request in involved:
            self._finish(request, FinishReason.ERROR)
        return [self._update(request)._replace(error=error) for request in involved]

    # ── ends ────────────────────────────────────────────────────────────────────────────────

    def _finish(self, request: ScheduledRequest, reason: FinishReason) -> None:
        waited = request.phase is Phase.WAITING
        if reason is FinishReason.PREFILLED:
            assert self._transfer is not None
            request.offer = self._transfer.offer(request.kv.tables, request.kv.num_computed)
            self.kv.hold(request.kv, request.offer.number)
        if not waited:
            self._release(request)
        request.become(Phase.FINISHED)
        queued = waited and not self._received.discard(request)
        if queued and request not in self._prefill.isolated:
            self._prefill.waiting.note_finished()
        request.finish_reason = reason
        request.record.finish_reason = reason
        request.record.finished_s = self._clock()
        del self._requests[request.request_id]

    def _release(self, request: ScheduledRequest) -> None:
        self.kv.close(request.kv)
        self._rows.append(request.row)
        self._retired.append(request.row)
        if self._evicted:  # of a table that nobody reads again
            self._evicted[:] = [one for one in self._evicted if one.row != request.row]
        request.row = -1

    def _remove_inactive(self) -> None:
        self._prefill.remove_inactive()
        self._decode.remove_inactive()

    def _update(
        self,
        request: ScheduledRequest,
        tokens: tuple[int, ...] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Update:
        first = request.num_outputs == len(tokens) and bool(tokens)
        asked = request.engine_request.params.prompt_logprobs is not None
        return Update(
            request.request_id,
            tokens,
            tuple(logprobs),
            request.finish_reason,
            request.stop_reason,
            tuple(request.prompt_logprobs) if first and asked else None,
            request.record if request.finish_reason is not None else None,
            offer=request.offer,
        )

    # ── proving ─────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        """Blocks, rows and phases are where they claim to be."""
        self.kv.audit()
        prefill, decode = self._prefill.requests, self._decode.requests
        running = prefill + decode
        rows = [r.row for r in running]
        assert sorted(rows + self._rows) == list(range(self.config.max_num_seqs)), "a row leaked"
        assert all(r.phase is Phase.PREFILL for r in prefill), "a request is in the wrong phase"
        assert all(r.phase is Phase.DECODE for r in decode), "a request is in the wrong phase"
        for queue in (prefill, decode):
            orders = [r.order for r in queue]
            assert orders == sorted(orders), "a queue is out of order"
        waiting = [r for r in self._requests.values() if r.phase is Phase.WAITING]
        assert len(waiting) == self.num_waiting, "a waiting request was lost"
        assert len(running) + len(waiting) == len(self._requests), "a request was lost"
        pending = sum(r.pending for r in self._requests.values())
        alive = 0
        for step in self.in_flight:
            drafts = [slot.drafts for slot in step.plan.decode]
            drafts += [0] * (len(step.sampled) - len(drafts))
            for request, more in zip(step.sampled, drafts, strict=True):
                alive += 1 + more if request.phase is not Phase.FINISHED else 0
        assert pending == alive, f"{pending} tokens are pending and {alive} are in flight"
        if not self.has_requests and not self.in_flight:
            assert self.kv.is_idle(), "blocks are owned by nobody"


def _window(window: int | None) -> str:
    return "all positions" if window is None else f"window {window}"


def _joined(updates: list[Update]) -> list[Update]:
    """Several tokens of one request in one update."""
    joined: list[Update] = []
    for update in updates:
        last = joined[-1] if joined else None
        if last is None or last.request_id != update.request_id:
            joined.append(update)
        else:
            joined[-1] = update._replace(
                tokens=last.tokens + update.tokens,
                logprobs=last.logprobs + update.logprobs,
                prompt_logprobs=last.prompt_logprobs,
            )
    return joined
