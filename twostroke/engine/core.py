"""`EngineCore`: the loop. Requests of token ids in, updates of token ids out.

    plan n+1 ─▶ forward ─▶ sample ─▶ wait for n ─▶ commit n

With an executor that runs one step at a time this is plan, run, commit. With one that takes
several, a step is planned and launched while the one before it still runs. What a grammar allows
next depends on the token before, so where a step has such a sample, its forward is launched as
ever, then n is waited for and committed, and only then is n+1 sampled, with the masks:

    plan n+1 ─▶ forward ─▶ wait for n ─▶ commit n ─▶ masks ─▶ sample
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any

from twostroke.errors import EngineError, RequestError
from twostroke.exec.executor import Executor, Pending
from twostroke.exec.grammar import End, Grammars
from twostroke.kv.cache import KVUsage
from twostroke.model.cost import CostModel
from twostroke.observe.blame import Ledger
from twostroke.observe.record import FirstToken, PhaseRecord, Records, StepRecord
from twostroke.plan import StepPlan, StepResult
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.scheduler import Scheduler, Update

COMPILE_POLL_S = 0.005  # how long a loop that only waits for a grammar is deaf to all else


@dataclass(slots=True)
class Flight:
    plan: StepPlan
    pending: Pending
    planned_s: float
    launched_s: float
    waiting: int
    running: int
    preempted: int
    kv: KVUsage  # with this step's blocks taken and filled
    recomputed: int
    predicted_s: float  # on the device


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor[Any],
        cost: CostModel,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.records = Records()
        self.ledger = Ledger(scheduler.pacer.times)
        self._executor = executor
        self._cost = cost
        self._grammars = grammars
        self._flights: deque[Flight] = deque()
        self._compiling: dict[str, EngineRequest] = {}  # by name; their grammars are not ready
        self._device_free_s = 0.0  # when the executor last had nothing left to do

    def warm(self) -> None:
        """Make ready what the first request of its kind would wait for."""
        if self._grammars is not None:
            self._grammars.warm()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or bool(self._flights) or bool(self._compiling)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._compiling)

    def add(self, given: EngineRequest) -> None:
        if given.params.structured_outputs is None:
            self.scheduler.add(given)
            return
        if self._grammars is None:
            raise RequestError("structured_outputs needs a tokenizer, and none is loaded")
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
        idle = not self.scheduler.has_requests and not self._flights
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

    def step(self) -> list[Update]:
        """Launch a step if there is one to launch; take in the oldest that must be waited for."""
        return [*self._take_compiled(), *self._step()]

    def _step(self) -> list[Update]:
        planned = monotonic()
        plan = self.scheduler.plan()
        updates: list[Update] = []
        try:
            if plan is not None:
                self._launch(plan, planned, updates)
            most = 0 if plan is None else self._executor.max_in_flight - 1
            if len(self._flights) > most:
                updates += self._land()
        except Exception as error:
            updates += self._fail(error)
        return updates

    def _launch(self, plan: StepPlan, planned: float, updates: list[Update]) -> None:
        """`updates`: gets those of steps that are waited for before this one can be sampled."""
        scheduler, grammars = self.scheduler, self._grammars
        launched = monotonic()
        counts = (
            scheduler.num_waiting,
            scheduler.num_running,
            scheduler.last_preempted,
            scheduler.kv.usage(),
            scheduler.last_recomputed,
            scheduler.last_predicted_s,
        )
        handle = self._executor.forward(plan)
        masks = None
        if grammars is not None and grammars.active:
            samples = grammars.samples(plan)
            while samples and self._flights:
                updates += self._land()
            masks = grammars.masks(samples)
        pending = self._executor.sample(handle, masks)
        self._flights.append(Flight(plan, pending, planned, launched, *counts))

    def _land(self) -> list[Update]:
        flight = self._flights.popleft()
        result = flight.pending.wait()
        now = monotonic()
        updates = self.scheduler.commit(result, now)
        self._record(flight, result, now)
        if self._grammars is not None and self._grammars.active:
            updates = self._follow(self._grammars, updates)
        self._note_ends(updates)
        return updates

    def _follow(self, grammars: Grammars, updates: list[Update]) -> list[Update]:
        """Grammars move on by the tokens committed. A request whose grammar has come to its end
        ends there, whatever min_tokens and ignore_eos say."""
        followed = []
        for update in updates:
            ended = update.finish_reason is not None
            end = None
            if update.tokens:
                end = grammars.advance(update.request_id, update.tokens, ended)
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
        return last._replace(finish_reason=reason, error=end.error, impossible=bool(end.error))

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
        if not self.scheduler.num_in_flight:
            raise EngineError(f"the engine failed with no step running ({reason})") from error
        self._flights.clear()
        updates = self.scheduler.fail(f"the engine failed while running a step ({reason})")
        self._executor.reset()
        self._note_ends(updates)
        return updates

    def _record(self, flight: Flight, result: StepResult, now: float) -> None:
        plan, cost = flight.plan, self._cost
        chunks, slots = plan.prefill, plan.decode
        samples = len(result.tokens) - len(slots)
        prefill, decode = plan.prefill_work, plan.decode_work
        prefill_bytes, decode_bytes = cost.kv_bytes(prefill), cost.kv_bytes(decode)
        weights = cost.weight_bytes(len(result.tokens))
        if slots:
            decode_bytes += weights
        else:
            prefill_bytes += weights
        started = max(flight.launched_s, self._device_free_s)
        gap = started - self._device_free_s if self._device_free_s else 0.0
        gap = gap if result.idle_s is None else result.idle_s
        self._device_free_s = now
        prefill_flops = cost.flops(prefill, samples)
        decode_flops = cost.flops(decode, len(slots))
        ledger = self.ledger
        since = ledger.add_step(
            plan.step,
            flight.planned_s,
            now,
            result.device_s,
            prefill,
            decode,
            decode_flops / (prefill_flops + decode_flops),
        )
        written = self.scheduler.last_written
        for record in written.first:
            ledger.open(record)
        self.records.add_step(
            StepRecord(
                plan.step,
                flight.planned_s,
                flight.launched_s,
                now,
                result.device_s,
                0.0,
                gap,
                PhaseRecord(
                    prefill.rows, prefill.tokens, prefill.kv_tokens, prefill_flops, prefill_bytes
                ),
                PhaseRecord(
                    decode.rows, decode.tokens, decode.kv_tokens, decode_flops, decode_bytes
                ),
                chunks,
                slots,
                flight.waiting,
                flight.running,
                flight.preempted,
                flight.kv,
                flight.recomputed,
                since,
                written.regular,
                tuple([ledger.late(*late) for late in written.late]),
                tuple([FirstToken(r.ttft_s, r.num_prompt, r.num_cached) for r in written.first]),
                flight.predicted_s or None,
            )
        )
