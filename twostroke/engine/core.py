"""`EngineCore`: the loop. Requests of token ids in, updates of token ids out.

    plan n+1 ─▶ forward ─▶ sample ─▶ wait for n ─▶ commit n

With an executor that runs one step at a time this is plan, run, commit. With one that takes
several, a step is planned and launched while the one before it still runs. What a grammar allows
next depends on the token before, so where a step has such a sample, its forward is launched as
ever, then n is waited for and committed, and only then is n+1 sampled, with the masks:

    plan n+1 ─▶ forward ─▶ wait for n ─▶ commit n ─▶ masks ─▶ sample
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from twostroke.engine.profiler import Profiler
from twostroke.errors import EngineError, RequestError
from twostroke.exec.executor import ChunkLogits, Executor
from twostroke.exec.grammar import End, Grammars
from twostroke.exec.profile import Profile
from twostroke.model.describe.cost import CostModel
from twostroke.observe.blame import Ledger
from twostroke.observe.record import Causes, FirstToken, PhaseRecord, Records, StepRecord
from twostroke.plan import StepResult
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.scheduler import Committed, Scheduler, Update
from twostroke.sched.step import StepInFlight

COMPILE_POLL_S = 0.005  # how long a loop that only waits for a grammar is deaf to all else


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor[Any],
        cost: CostModel,
        grammars: Grammars | None = None,
        begin_profile: Callable[[], Profile] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.records = Records()
        self.profiler = Profiler(begin_profile, self.records)
        self.ledger = Ledger(scheduler.pacer.times)
        self._executor = executor
        self.cost = cost
        self._grammars = grammars
        self._compiling: dict[str, EngineRequest] = {}  # by name; their grammars are not ready
        self._idle_step = False  # the last step had nothing to launch
        self._device_free_s = 0.0  # when the executor last had nothing left to do

    def warm(self) -> None:
        """Make ready what the first request of its kind would wait for."""
        if self._grammars is not None:
            self._grammars.warm()

    def hear_chunk_logits(self, hear: ChunkLogits | None) -> None:
        """Give `hear` the logits of all positions that are prefilled from now on."""
        self._executor.on_chunk_logits = hear

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return scheduler.has_requests or bool(scheduler.in_flight) or bool(self._compiling)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._compiling)

    def add(self, given: EngineRequest) -> None:
        if given.params.structured_outputs is None and given.thinking is None:
            self.scheduler.add(given)
            return
        if self._grammars is None:
            raise RequestError(
                "structured_outputs and thinking_token_budget need a tokenizer, and none is loaded"
            )
        self.scheduler.check(given)
        if given.request_id in self._compiling:
            raise RequestError(f"a request with the id {given.request_id!r} is already running")
        if self._grammars.add(given):
            self.scheduler.add(given)
        else:
            self._compiling[given.request_id] = given

    def _take_compiled(self) -> list[Update]:
        """Requests whose grammar is ready enter the schedule. Those whose grammar failed end."""
        if self._grammars is None or not self._compiling:
            return []
        idle = not self.scheduler.has_requests and not self.scheduler.in_flight
        ends = []
        for name, error in self._grammars.take_compiled(COMPILE_POLL_S if idle else 0.0):
            given = self._compiling.pop(name, None)
            if given is None:  # aborted meanwhile
                self._grammars.drop(name)
                continue
            self.scheduler.add(given)
            if error:
                ends.append(self._end(name, End(error)))
        self._note_ends(ends)
        return ends

    def abort(self, request_id: str) -> Update | None:
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:  # it enters the schedule to leave it, with a record
            self.scheduler.add(compiling)
        update = self.scheduler.abort(request_id)
        if update is not None:
            self._note_ends([update])
        return update

    @property
    def is_stalled(self) -> bool:
        """All that is left waits for blocks that other engines have not fetched yet."""
        scheduler = self.scheduler
        return self._idle_step and scheduler.kv.num_held > 0 and not scheduler.in_flight

    @property
    def awaits_fetch(self) -> bool:
        """All that is left waits for blocks that are on their way here."""
        scheduler = self.scheduler
        return self._idle_step and scheduler.kv.num_receiving > 0 and not scheduler.in_flight

    def fetch_ahead(self, given: EngineRequest) -> None:
        """See `Scheduler.fetch_ahead`."""
        self.scheduler.fetch_ahead(given)

    def release_offers(self, numbers: list[int]) -> None:
        """Other engines have fetched these blocks, or will not. Numbers that are not known, of an
        engine that was here before this one, are ignored."""
        for number in numbers:
            self.scheduler.release_offer(number)

    def tidy(self) -> None:
        """Let go what engines shared with this one that have ended."""
        self.scheduler.tidy()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep their blocks."""
        self.scheduler.reset_prefixes()

    def step(self) -> list[Update]:
        """Launch a step if there is one to launch; take in the oldest that must be waited for."""
        return [*self._take_compiled(), *self._step()]

    def _step(self) -> list[Update]:
        step = self.scheduler.plan(self._held())
        self._idle_step = step is None
        updates: list[Update] = []
        try:
            if step is not None:
                self._launch(step, updates)
            most = 0 if step is None else self._executor.max_in_flight - 1
            if len(self.scheduler.in_flight) > most:
                updates += self._land()
        except Exception as error:
            updates += self._fail(error)
        return updates

    def _held(self) -> frozenset[str]:
        """Return the requests that wait a step for the masks of others."""
        grammars = self._grammars
        return grammars.held() if grammars is not None and grammars.active else frozenset()

    def _launch(self, step: StepInFlight, updates: list[Update]) -> None:
        """`updates`: gets those of steps that are waited for before this one can be sampled."""
        grammars, in_flight = self._grammars, self.scheduler.in_flight
        step.launched_s = monotonic()
        handle = self._executor.forward(step.plan)
        masks = None
        if grammars is not None and grammars.active:
            samples = grammars.samples(step.plan)
            while samples and in_flight[0] is not step:
                updates += self._land()
            masks = grammars.masks(samples)
        step.pending = self._executor.sample(handle, masks)

    def _land(self) -> list[Update]:
        step = self.scheduler.in_flight[0]
        assert step.pending is not None
        result = step.pending.wait()
        now = monotonic()
        committed = self.scheduler.commit(result, now)
        self._record(step, result, committed, now)
        updates = committed.updates
        if self._grammars is not None and self._grammars.active:
            updates = self._follow(self._grammars, updates)
        self._note_ends(updates)
        return updates

    def _follow(self, grammars: Grammars, updates: list[Update]) -> list[Update]:
        """Grammars move on by the tokens committed. A request whose grammar has come to its end
        ends there, whatever min_tokens and ignore_eos say."""
        followed = []
        for update in updates:
            ended = update.finish_reason not in (None, FinishReason.PREFILLED)
            end = None
            if update.tokens:
                end = grammars.advance(update.request_id, update.tokens, ended)
            if end is not None and update.offer is not None:  # nobody need go on with it
                self.scheduler.release_offer(update.offer.number)
                followed.append(self._end(update.request_id, end, update))
                continue
            if end is None or not ended:
                followed.append(update)
            if end is not None:
                followed.append(self._end(update.request_id, end, update if ended else None))
        return followed

    def _end(self, request_id: str, end: End, last: Update | None = None) -> Update:
        """`last`: the update that ended it already, if one did."""
        last = last or self.scheduler.abort(request_id)
        assert last is not None
        assert last.record is not None
        reason = FinishReason.ERROR if end.error else FinishReason.STOP
        last.record.finish_reason = reason
        bad = bool(end.error)
        return last._replace(finish_reason=reason, error=end.error, impossible=bad, offer=None)

    def _note_ends(self, updates: list[Update]) -> None:
        for update in updates:
            if update.record is not None:
                self.ledger.close(update.record)
                self.records.requests.append(update.record)
                if self._grammars is not None:
                    self._grammars.drop(update.request_id)

    def _fail(self, error: Exception) -> list[Update]:
        """A step could not run. Whose fault it was is found out, and the engine goes on."""
        reason = f"{type(error).__name__}: {error}"
        if not self.scheduler.in_flight:
            raise EngineError(f"the engine failed with no step running ({reason})") from error
        updates = self.scheduler.fail(f"the engine failed while running a step ({reason})")
        self._executor.reset()
        self._note_ends(updates)
        return updates

    def _record(
        self, step: StepInFlight, result: StepResult, committed: Committed, now: float
    ) -> None:
        plan, cost = step.plan, self.cost
        chunks, slots = plan.prefill, plan.decode
        samples = len(step.sampled) - len(slots)
        prefill, decode = plan.prefill_work, plan.decode_work
        prefill_bytes, decode_bytes = cost.kv_bytes(prefill), cost.kv_bytes(decode)
        tokens = prefill.tokens + decode.tokens
        weights = cost.of_step(prefill.tokens).weight_bytes(len(result.tokens), tokens)
        if slots:
            decode_bytes += weights
        else:
            prefill_bytes += weights
        started = max(step.launched_s, self._device_free_s)
        gap = started - self._device_free_s if self._device_free_s else 0.0
        gap = gap if result.idle_s is None else result.idle_s
        self._device_free_s = now
        prefill_flops = cost.prefill_flops(prefill, samples)
        decode_flops = cost.decode_flops(decode)
        ledger = self.ledger
        since = ledger.add_step(
            plan.step,
            step.planned_s,
            now,
            result.device_s,
            prefill,
            decode,
            decode_flops / (prefill_flops + decode_flops),
            result.comm_s,
        )
        for record in committed.first:
            ledger.open(record)
        late = [ledger.late(*one) for one in committed.late]
        for record, since_s in committed.resumed:
            ledger.open(record)
            late.append(Causes(preemption=now - since_s))
        block_size = self.scheduler.config.block_size
        self.records.add_step(
            StepRecord(
                plan.step,
                step.planned_s,
                step.launched_s,
                now,
                result.device_s,
                gap,
                PhaseRecord(
                    prefill.rows, prefill.tokens, prefill.kv_tokens, prefill_flops, prefill_bytes
                ),
                PhaseRecord(
                    decode.rows, decode.tokens, decode.kv_tokens, decode_flops, decode_bytes
                ),
                chunks,
                slots,
                step.waiting,
                step.running,
                step.preempted,
                step.kv,
                step.recomputed,
                since,
                committed.regular,
                tuple(late),
                tuple([FirstToken(r.ttft_s, r.num_prompt, r.num_cached) for r in committed.first]),
                step.predicted_s or None,
                committed.drafted,
                result.comm_s,
                result.comm_bytes,
                sum(one.stop - one.start for one in plan.evicted) * block_size,
            )
        )
