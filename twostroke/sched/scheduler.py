"""`Scheduler`: plans steps of prefill and decode. Deterministic, over plain data, no tensors.

    add, abort ──▶ plan() ──▶ StepInFlight ──▶ (an executor) ──▶ StepResult ──▶ commit() ──▶ updates

`plan` may run ahead of `commit`. Planned work counts as done, tokens that are not known yet are
`pending`, and blocks that a planned step uses stay owned until that step commits.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from twostroke.draft.interface import DraftModel
from twostroke.draft.speculator import DraftRules, Row, Speculator, StepDrafts
from twostroke.errors import RequestError
from twostroke.kv.cache import KVCache, KVSequence
from twostroke.kv.tiers.tiers import Tiers
from twostroke.kv.transfer import KVTransfer
from twostroke.observe.record import RequestRecord
from twostroke.plan import BROKEN_LOGITS, StepResult, TokenLogprobs
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.decode import DecodeSet
from twostroke.sched.offers import OfferedBlocks
from twostroke.sched.prefill import PrefillQueue
from twostroke.sched.received import Destinations, ReceivedQueue
from twostroke.sched.scheduled_request import Phase, ScheduledRequest
from twostroke.sched.slo import Pacer
from twostroke.sched.step import (
    RowChanges,
    SchedulerConfig,
    StepBuilder,
    StepInFlight,
    prefix_seed,
)
from twostroke.sched.updates import CommitResult, Update, join_drafted
from twostroke.sched.work import AttentionWork

PRIORITY_AGE_S = 10.0  # waiting time that is worth one level of priority


class Scheduler:
    """Plans steps and commits their results. `offers`: blocks that other engines may fetch.
    `received`: requests whose blocks are fetched from other engines or from tiers."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = monotonic,
        transfer: KVTransfer | None = None,
        tiers: Tiers | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`transfer`: fetches blocks from other engines and offers blocks to them. `tiers`: hold
        prefixes that the KV cache has evicted. `draft_model`: named by `config.speculation`."""
        self.config = config
        self.in_flight: deque[StepInFlight] = deque()  # planned and not committed, oldest first
        self.kv = KVCache(
            config.groups,
            config.block_size,
            keep_cached=config.prefix_caching,
            max_chunk=config.max_num_batched_tokens,
            eviction=config.eviction,
            tiers=tiers if config.prefix_caching else None,
        )
        self.offers = OfferedBlocks(config, self.kv, transfer)
        self._work = AttentionWork(config.groups)
        self.pacer = Pacer(config, self._work)
        self._clock = clock
        self._requests: dict[str, ScheduledRequest] = {}
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))  # free rows
        self._retired: list[int] = []  # rows released since the newest step was planned
        self._changes = RowChanges()  # since the newest step was planned
        self.received = ReceivedQueue(self.kv, self._rows, transfer)
        self._prefill = PrefillQueue(config, self.kv, self._rows, self.pacer, self.received)
        self._decode = DecodeSet(self.kv)
        self._step = 0
        self._arrivals = 0
        self._preempted = 0  # requests, since the newest step was planned
        self._committed_step = -1  # the newest step that has committed
        self.speculator: Speculator | None = None
        if config.speculation is not None:
            self.speculator = Speculator(config.speculation, draft_model)

    # ── state ───────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        isolated = self._prefill.isolated
        count = len(self._prefill.waiting) + len(self.received)
        return count + len(isolated) if isolated.active else count

    @property
    def num_running(self) -> int:
        return len(self._prefill.requests) + len(self._decode.requests)

    @property
    def has_requests(self) -> bool:
        """Return whether there are requests, or blocks to fetch for a later request."""
        return bool(self._requests) or self.received.has_work

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # ── adding and aborting requests ────────────────────────────────────────────────────────

    def check(self, engine_request: EngineRequest) -> int:
        """Return how many tokens the request may write; raise `RequestError` if it can never run.

        Every request passes this length check. `InputProcessor.check_length` refuses long prompts
        earlier, before they are tokenised.
        """
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
                f"{config.max_model_len} and the answer needs at least one; shorten the prompt or "
                "raise max_model_len"
            )
        if engine_request.hand_over and not self.offers.enabled:
            raise RequestError("this engine cannot hand requests over: its KV cache is not shared")
        params = engine_request.params
        if config.eviction is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs need every token of the sequence, and this engine evicts tokens "
                "(kv_eviction); leave prompt_logprobs out, or run an engine without kv_eviction"
            )
        room = config.max_model_len - len(prompt)
        max_outputs = room if params.max_tokens is None else min(params.max_tokens, room)
        for index, group in enumerate(config.groups):
            blocks = self.kv.blocks_for(index, len(prompt) + max_outputs - 1, len(prompt))
            if blocks > group.num_blocks:
                layers = ""
                if len(config.groups) > 1:
                    layers = f" for layers of {_window_name(group.window)}"
                raise RequestError(
                    f"{len(prompt)} prompt tokens and up to {max_outputs} output tokens need "
                    f"{blocks} KV blocks of {config.block_size} tokens{layers}, but the cache has "
                    f"{group.num_blocks}; lower max_tokens, shorten the prompt, or enlarge the "
                    "cache (kv_cache_memory_bytes)"
                )
        return max_outputs

    def add(self, engine_request: EngineRequest, max_outputs: int | None = None) -> None:
        """Queue a request. `max_outputs`: the result of `check`, if the caller has called it."""
        if max_outputs is None:
            max_outputs = self.check(engine_request)
        request = self._new_request(engine_request, max_outputs)
        self._requests[engine_request.request_id] = request
        if self.speculator is not None:
            self.speculator.begin(request.request_id, request)
        if engine_request.resumed is not None and engine_request.resumed.offer is not None:
            self.received.push(request)
        else:
            self._prefill.waiting.push(request)

    def fetch_ahead(self, engine_request: EngineRequest) -> None:
        """Fetch the blocks of the part of a prompt that another engine has computed so far. The
        request arrives later and finds them as a cached prefix. `engine_request`: that part as a
        prompt, with one written token."""
        self.received.push_ahead(self._new_request(engine_request, max_outputs=1))

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
        # A waiting request gains a level every PRIORITY_AGE_S, so no request starves. The order of
        # two requests depends on their priorities and arrivals alone, so it never changes.
        aged = engine_request.priority + now / PRIORITY_AGE_S if config.policy == "priority" else 0
        resumed = engine_request.resumed
        request = ScheduledRequest(
            engine_request,
            order=(aged, self._arrivals),
            max_outputs=max_outputs,
            tokens=[*prompt, *(() if resumed is None else resumed.tokens)],
            kv=KVSequence(prefix_seed(config, engine_request)),
            record=record,
        )
        self._arrivals += 1
        return request

    def abort(self, request_id: str) -> Update | None:
        """End a request in any phase. Return None if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        waited = request.phase is Phase.WAITING
        self._finish(request, FinishReason.ABORT)
        if not waited:
            self._remove_inactive()
        return self._update(request)

    def reset_prefixes(self) -> None:
        """Drop every cached prefix, in the tiers too; running requests keep their blocks."""
        self._drop_prefixes()
        if self.kv.tiers is not None:
            self.kv.tiers.reset()

    def _drop_prefixes(self) -> None:
        """Drop every cached prefix of the device, and the fetches and copies of prefixes."""
        self.kv.reset_prefixes()
        self.received.drop_ahead("the prefix cache was reset")
        if self.speculator is not None:
            self.speculator.reset_prefixes()
        self.received.drop_prefixes(self._prefill.waiting.push)
        if self.kv.tiers is not None:
            self.kv.tiers.cancel_stores()

    # ── planning ────────────────────────────────────────────────────────────────────────────

    def plan(
        self, held: frozenset[str] = frozenset(), rules: DraftRules | None = None
    ) -> StepInFlight | None:
        """Return the next step; None if nothing can run before a step in flight commits. `held`:
        ids of requests that get no slot in this step. `rules`: limits on the drafts of requests."""
        budget = self.config.max_num_batched_tokens
        builder = StepBuilder(self._step, budget, self._work, self._clock(), self._changes)

        def preempt(victim: ScheduledRequest) -> None:
            self._preempted += 1
            self._preempt(victim, builder.now)

        def preempt_for(request: ScheduledRequest) -> bool:
            victim = self._last_in_order()
            preempt(victim)
            (self._decode if victim in self._decode.requests[-1:] else self._prefill).requests.pop()
            return victim is not request

        if self.kv.tiers is not None:
            self.kv.tiers.take_finished()
        if self.received.has_work:
            self._plan_received(builder)
        sequences = self._decode.plan(builder, preempt_for, held)
        drafts = None
        if self.speculator is not None and builder.slots and not self.in_flight:
            drafts = self._plan_drafts(self.speculator, builder, sequences, rules)
        prompts = self._prefill.has_work
        builder.allowance = self.pacer.allowance(builder, self.in_flight, prompts)
        if prompts:
            self._prefill.plan(builder, self._decode.requests, preempt, self._decode.add)
        if builder.empty:
            return None
        plan = builder.build(tuple(self._retired))
        self._retired.clear()
        self._changes.clear()
        step = StepInFlight(
            plan=plan,
            sampled_requests=builder.sampled_requests,
            chunk_requests=builder.chunk_requests,
            planned_s=builder.now,
            predicted_device_s=self.pacer.expected_s(plan),
            preempted=self._preempted,
            recomputed=builder.recomputed,
            waiting=self.num_waiting,
            running=self.num_running,
            kv=self.kv.usage(),
            drafts=drafts,
        )
        self._step += 1
        self._preempted = 0
        self.in_flight.append(step)
        return step

    def _plan_drafts(
        self,
        speculator: Speculator,
        builder: StepBuilder,
        sequences: list[KVSequence],
        rules: DraftRules | None,
    ) -> StepDrafts | None:
        """Add drafts to the slots of a step. All tokens before the step are known. A request that
        runs alone after a failed step has no drafts."""
        rows = [
            Row(request.request_id, request.remaining)
            for request in builder.sampled_requests
            if request.remaining > 0
        ]
        if self._prefill.isolated.active or not rows:
            return None
        seconds = self.pacer.seconds_with_drafts(builder.decode_work)
        room = max(0, builder.budget)
        chosen = speculator.drafts(rows, len(builder.slots), seconds, room, rules)
        if chosen.by_request:
            drafts = [
                found.tokens if (found := chosen.by_request.get(request.request_id)) else ()
                for request in builder.sampled_requests
            ]
            self._decode.add_drafts(builder, drafts, sequences)
        builder.model_s = chosen.model_s
        return chosen if chosen.offers or chosen.model_s else None

    def _plan_received(self, builder: StepBuilder) -> None:
        if self._prefill.isolated.active:  # an isolated request runs alone
            return
        decode = self._decode

        def has_room(request: ScheduledRequest, tables: list[list[int]]) -> bool:
            return self._prefill.has_room(request, tables, decode.requests)

        queue = self._prefill
        self.received.plan(
            builder, has_room, Destinations(decode, queue.waiting.push, queue.start_fetched)
        )

    def _last_in_order(self) -> ScheduledRequest:
        ends = [queue.requests[-1] for queue in (self._prefill, self._decode) if queue.requests]
        return max(ends, key=lambda request: request.order)

    def _preempt(self, request: ScheduledRequest, now: float) -> None:
        """Free the blocks and queue the request again with its tokens. Its blocks that stay in the
        prefix cache are not recomputed."""
        self._requeue(request, now)
        self._prefill.waiting.push(request)

    def _requeue(self, request: ScheduledRequest, now: float) -> None:
        request.record.preempted.append((now, request.kv.num_computed))
        request.fetch_failed = False
        self._release(request)
        request.set_phase(Phase.WAITING)
        if self.speculator is not None:
            self.speculator.pause(request.request_id)

    # ── committing ──────────────────────────────────────────────────────────────────────────

    def commit(self, result: StepResult, now: float | None = None) -> CommitResult:
        """Commit the oldest step in flight: append its tokens and end the requests that are done.
        `now`: when the tokens were known."""
        step = self.in_flight.popleft()
        now = self._clock() if now is None else now
        self.pacer.commit(step, result.device_s, now)
        if result.shares:
            for request, shares in zip(step.sampled_requests, result.shares, strict=False):
                request.add_shares(shares)
        sampled, num_slots = step.sampled_requests, len(step.plan.decode)
        if result.counts is not None:
            sampled, num_slots = self._take_back_drafts(step, result.counts)
        committed = CommitResult()
        if step.chunk_requests:
            self._commit_chunks(step, result, committed.updates)
        any_finished = self._append_tokens(committed, sampled, num_slots, result, step, now)
        isolated = self._prefill.isolated
        if isolated.active:
            for request in sampled:
                if isolated.passed(request) and request.phase is Phase.DECODE:
                    self._preempt(request, now)
                    any_finished = True
        if any_finished:
            self._remove_inactive()
        self.kv.commit(step.plan.step)
        self._committed_step = step.plan.step
        if result.counts is not None:
            committed.updates = join_drafted(committed.updates)
        return committed

    def _append_tokens(
        self,
        committed: CommitResult,
        sampled: list[ScheduledRequest],
        num_slots: int,
        result: StepResult,
        in_flight: StepInFlight,
        now: float,
    ) -> bool:
        """Append each token to its request; return whether any request has ended.

        This is the host's hottest loop: it runs once for every token that is written. Python takes
        long to look up a member of an enum and to call a tuple's class, so the loop does neither.
        """
        step, before = in_flight.plan.step, self._committed_step
        skipped, any_finished = 0, False
        updates, logprobs, register = committed.updates, result.logprobs, self.kv.register
        finished, decodes, defaults = Phase.FINISHED, Phase.DECODE, Update("", ())[2:]
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
            if not steps or steps[-1] != before or index >= num_slots:
                committed.add_irregular(request, step, index < num_slots)
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
                fields = (request.request_id, (token,)) + defaults  # noqa: RUF005 - faster
                updates.append(new_tuple(Update, fields))
        committed.regular = len(sampled) - skipped - committed.num_irregular
        return any_finished

    def _take_back_drafts(
        self, step: StepInFlight, counts: list[int]
    ) -> tuple[list[ScheduledRequest], int]:
        """Undo the planning of rejected drafts. Return the request of each token, and how many of
        the tokens belong to decode slots."""
        for slot, request, count in zip(
            step.plan.decode, step.sampled_requests, counts, strict=False
        ):
            rejected = 1 + slot.drafts - count
            if slot.drafts and step.drafts is not None:
                step.drafts.note(request.record, slot.drafts, count - 1)
            request.pending -= rejected
            request.remaining += rejected
            if request.phase is Phase.DECODE:  # else it has lost its blocks
                self.kv.rewind(request.kv, rejected)
        each = zip(step.sampled_requests, counts, strict=True)
        sampled = [request for request, count in each for _ in range(count)]
        return sampled, sum(counts[: len(step.plan.decode)])

    def _commit_chunks(self, step: StepInFlight, result: StepResult, updates: list[Update]) -> None:
        """Keep the log-probabilities of prompts; append the updates of requests that asked for
        their progress, and offers of the blocks computed so far to the decode engine."""
        for request, chunk in zip(step.chunk_requests, step.plan.prefill, strict=True):
            engine_request, num_computed = request.engine_request, chunk.start + chunk.size
            if chunk.row in result.prompt_logprobs:
                # Entry 0 belongs to position 1. After a preemption, entries are computed again.
                entries = result.prompt_logprobs[chunk.row]
                kept = request.prompt_logprobs
                kept.extend(entries[len(kept) - chunk.start :])
            if chunk.last:
                continue
            if engine_request.progress and request.phase is not Phase.FINISHED:
                updates.append(Update(request.request_id, (), progress=num_computed))
            if engine_request.hand_over and request.phase is Phase.PREFILL:
                offer = self.offers.offer_part(request, num_computed)
                if offer is not None:
                    updates.append(Update(request.request_id, (), offer=offer))

    def _check_stop(self, request: ScheduledRequest, token: int) -> bool:
        params = request.engine_request.params
        if token in request.stop_ids and request.num_outputs >= params.min_tokens:
            by_user = params.stop_token_ids is not None and token in params.stop_token_ids
            request.stop_reason = token if by_user else None
            self._finish(request, FinishReason.STOP)
        elif len(request.tokens) >= request.max_length:
            continues = request.num_outputs < request.max_outputs
            handed_over = request.engine_request.hand_over and continues
            reason = FinishReason.PREFILLED if handed_over else FinishReason.LENGTH
            self._finish(request, reason)
        return request.phase is Phase.FINISHED

    def fail(self, error: str) -> list[Update]:
        """Undo the steps in flight, one of which has failed. If the failed steps had one request,
        it ends with the error; if they had several, each of them is run again alone
        (`isolation.py`). All other running requests wait again.

        Afterwards all rows are free, and the caller must reset the executor (`Executor.reset`).
        Every cached prefix is dropped, because the failure may have damaged it.
        """
        involved: dict[ScheduledRequest, None] = {}
        for step in self.in_flight:
            involved |= dict.fromkeys([*step.sampled_requests, *step.chunk_requests])
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
        self._drop_prefixes()
        self._retired.clear()
        self._changes.clear()
        if len(involved) > 1:
            return []
        for request in involved:
            self._finish(request, FinishReason.ERROR)
        return [self._update(request)._replace(error=error) for request in involved]

    # ── finishing requests ──────────────────────────────────────────────────────────────────

    def _finish(self, request: ScheduledRequest, reason: FinishReason) -> None:
        waited = request.phase is Phase.WAITING
        if reason is FinishReason.PREFILLED:
            request.offer = self.offers.offer_all(request)
        if not waited:
            self._release(request)
        request.set_phase(Phase.FINISHED)
        queued = waited and not self.received.discard(request)
        if queued and request not in self._prefill.isolated:
            self._prefill.waiting.note_finished()
        request.finish_reason = reason
        request.record.finish_reason = reason
        request.record.finished_s = self._clock()
        del self._requests[request.request_id]
        if self.speculator is not None:
            self.speculator.end(request.request_id)

    def _release(self, request: ScheduledRequest) -> None:
        self.kv.close(request.kv)
        self._rows.append(request.row)
        if not self._changes.forget(request.row):
            self._retired.append(request.row)
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
        wanted = first and request.engine_request.params.prompt_logprobs is not None
        return Update(
            request.request_id,
            tokens,
            logprobs=tuple(logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            prompt_logprobs=tuple(request.prompt_logprobs) if wanted else None,
            record=request.record if request.finish_reason is not None else None,
            offer=request.offer,
        )

    # ── audit ───────────────────────────────────────────────────────────────────────────────

    def audit(self) -> None:
        """Assert that every block and row has the owners that the queues say, and none leaked."""
        self.kv.audit()
        if self.speculator is not None:
            self.speculator.audit()
        prefill, decode = self._prefill.requests, self._decode.requests
        running = prefill + decode
        rows = [r.row for r in (*running, *self.received.tier_fetches)]
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
        in_flight = 0
        for step in self.in_flight:
            drafts = [slot.drafts for slot in step.plan.decode]
            drafts += [0] * (len(step.sampled_requests) - len(drafts))
            for request, more in zip(step.sampled_requests, drafts, strict=True):
                in_flight += 1 + more if request.phase is not Phase.FINISHED else 0
        assert pending == in_flight, f"{pending} tokens are pending and {in_flight} are in flight"
        if self.kv.tiers is not None:
            assert self.kv.tiers.is_fetching == bool(self.received.tier_fetches), "a fetch was lost"
        if not self.has_requests and not self.in_flight:
            assert self.kv.is_idle(), "blocks are owned by no request"


def _window_name(window: int | None) -> str:
    return "all positions" if window is None else f"window {window}"
