"""`EngineCore`: the engine's loop. It takes requests of token ids and returns updates of token ids.

    plan n+1 ─▶ forward ─▶ sample ─▶ wait for n ─▶ commit n

With an executor that runs one step at a time, the loop is: plan, run, commit. With an executor that
accepts several steps, step n+1 is planned and launched while step n still runs. The mask of a
grammar depends on the previous token. So if step n+1 samples with a grammar, its forward is
launched as usual, but it is sampled after step n has been committed:

    plan n+1 ─▶ forward ─▶ wait for n ─▶ commit n ─▶ masks ─▶ sample
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from twostroke.engine.profiler import Profiler
from twostroke.engine.step_recorder import StepRecorder
from twostroke.errors import EngineError, RequestError
from twostroke.exec.executor import ChunkLogits, Executor
from twostroke.exec.grammar import End, Grammars
from twostroke.exec.stage_profile import Profile
from twostroke.model.describe.cost import CostModel
from twostroke.observe.blame import GapLedger
from twostroke.observe.record import Records
from twostroke.request import EngineRequest, FinishReason
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import StepInFlight
from twostroke.sched.updates import Update

NO_REQUESTS: frozenset[str] = frozenset()
CLOSE_S = 5.0  # time limit of `close` for copies to tiers
# How long a call of `step` waits if no request can run:
TIER_POLL_S = 0.002  # for blocks that a tier is fetching
COMPILE_POLL_S = 0.005  # for a grammar that is being compiled


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
        self.ledger = GapLedger(scheduler.pacer.times)
        self.recorder = StepRecorder(cost, self.ledger, self.records, scheduler.config.block_size)
        self._executor = executor
        self.cost = cost
        self._grammars = grammars
        # By id: requests whose grammars are not ready, and the maximum number of their tokens.
        self._compiling: dict[str, tuple[EngineRequest, int]] = {}
        self._idle_step = False  # the last call of `step` launched nothing

    def warm(self) -> None:
        """Prepare grammars, so that the first request with a grammar does not wait."""
        if self._grammars is not None:
            self._grammars.warm()

    def on_chunk_logits(self, listener: ChunkLogits | None) -> None:
        """Give `listener` the logits of every position that is prefilled from now on."""
        self._executor.on_chunk_logits = listener

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return scheduler.has_requests or bool(scheduler.in_flight) or bool(self._compiling)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._compiling)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raise `RequestError` if it can never run (`Scheduler.check`)."""
        max_outputs = self.scheduler.check(request)
        if request.request_id in self._compiling:
            raise RequestError(f"a request with the id {request.request_id!r} is already running")
        if request.params.structured_outputs is None and request.thinking is None:
            self.scheduler.add(request, max_outputs)
            return
        if self._grammars is None:
            raise RequestError(
                "structured_outputs and thinking_token_budget need a tokenizer, and none is loaded"
            )
        if self._grammars.add(request):
            self.scheduler.add(request, max_outputs)
        else:
            self._compiling[request.request_id] = request, max_outputs

    def _take_compiled(self) -> list[Update]:
        """Schedule the requests whose grammar is ready; end those whose grammar failed."""
        grammars = self._grammars
        assert grammars is not None
        idle = not self.scheduler.has_requests and not self.scheduler.in_flight
        ends = []
        for name, error in grammars.take_compiled(COMPILE_POLL_S if idle else 0.0):
            if name not in self._compiling:  # aborted meanwhile
                grammars.drop(name)
                continue
            self.scheduler.add(*self._compiling.pop(name))
            if error:
                ends.append(self._end(name, End(error)))
        self._note_ends(ends)
        return ends

    def abort(self, request_id: str) -> Update | None:
        if request_id in self._compiling:  # scheduled first, so that the abort makes a record
            self.scheduler.add(*self._compiling.pop(request_id))
        update = self.scheduler.abort(request_id)
        if update is not None:
            self._note_ends([update])
        return update

    @property
    def is_stalled(self) -> bool:
        """Return whether all requests wait for blocks that other engines have not fetched yet."""
        scheduler = self.scheduler
        return self._idle_step and scheduler.kv.num_held > 0 and not scheduler.in_flight

    @property
    def awaits_fetch(self) -> bool:
        """Return whether all requests wait for blocks that are being fetched."""
        scheduler = self.scheduler
        return self._idle_step and scheduler.kv.num_receiving > 0 and not scheduler.in_flight

    def fetch_ahead(self, request: EngineRequest) -> None:
        """See `Scheduler.fetch_ahead`."""
        self.scheduler.fetch_ahead(request)

    def release_offers(self, numbers: list[int]) -> None:
        """Free blocks that other engines have fetched or do not need."""
        for number in numbers:
            self.scheduler.offers.release(number)

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix; running requests keep their blocks."""
        self.scheduler.reset_prefixes()

    def take_finished_copies(self) -> None:
        """Register finished copies to tiers. Every step does this, too."""
        if self.scheduler.kv.tiers is not None:
            self.scheduler.kv.tiers.take_finished()

    def close(self) -> None:
        """Wait up to `CLOSE_S` for copies to tiers."""
        if self.scheduler.kv.tiers is not None:
            self.scheduler.kv.tiers.close(CLOSE_S)

    def step(self) -> list[Update]:
        """Launch a step if there is work. Collect the oldest step in flight if no step was launched
        or if the executor accepts no further step."""
        updates = self._take_compiled() if self._compiling else []
        grammars = self._grammars
        active = grammars if grammars is not None and grammars.active else None
        # Requests that skip this step, because the masks of all requests would take too long.
        held = NO_REQUESTS if active is None else active.held()
        step = self.scheduler.plan(held, active)
        self._idle_step = step is None
        tiers = self.scheduler.kv.tiers
        if tiers is not None and tiers.is_fetching and self.awaits_fetch:
            tiers.wait(TIER_POLL_S)
        try:
            if step is not None:
                self._launch(step, updates)
            max_in_flight = 0 if step is None else self._executor.max_in_flight - 1
            if len(self.scheduler.in_flight) > max_in_flight:
                updates += self.collect_step()
        except Exception as error:
            updates += self._fail(error)
        return updates

    def _launch(self, step: StepInFlight, updates: list[Update]) -> None:
        """Launch a step. If it samples with a grammar, collect the earlier steps before sampling,
        and append their updates to `updates`."""
        grammars, in_flight = self._grammars, self.scheduler.in_flight
        step.launched_s = monotonic()
        handle = self._executor.forward(step.plan)
        masks = None
        if grammars is not None and grammars.active:
            samples = grammars.samples(step.plan)
            while samples and in_flight[0] is not step:
                updates += self.collect_step()
            masks = grammars.masks(samples, step.plan)
        step.pending = self._executor.sample(handle, masks)

    def collect_step(self) -> list[Update]:
        """Wait for the oldest step in flight, commit it and record it."""
        step = self.scheduler.in_flight[0]
        assert step.pending is not None
        result = step.pending.wait()
        now = monotonic()
        committed = self.scheduler.commit(result, now)
        self.recorder.add(step, result, committed, now)
        updates = committed.updates
        if self._grammars is not None and self._grammars.active:
            updates = self._advance_grammars(self._grammars, updates)
        self._note_ends(updates)
        return updates

    def _advance_grammars(self, grammars: Grammars, updates: list[Update]) -> list[Update]:
        """Advance grammars by the committed tokens. Return the updates with the ends of requests
        whose grammars are complete. Such a request ends regardless of min_tokens and ignore_eos."""
        with_ends = []
        for update in updates:
            ended = update.finish_reason not in (None, FinishReason.PREFILLED)
            end = None
            if update.tokens:
                end = grammars.advance(update.request_id, update.tokens, ended)
            if end is not None and update.offer is not None:
                # The request has ended, so no other engine will fetch its blocks.
                self.scheduler.offers.release(update.offer.number)
                with_ends.append(self._end(update.request_id, end, update))
                continue
            if end is None or not ended:
                with_ends.append(update)
            if end is not None:
                with_ends.append(self._end(update.request_id, end, update if ended else None))
        return with_ends

    def _end(self, request_id: str, end: End, last: Update | None = None) -> Update:
        """Make the final update of a request that its grammar ends. `last`: the update that has
        already ended the request; None: the request still runs and is aborted."""
        last = last or self.scheduler.abort(request_id)
        assert last is not None
        assert last.record is not None
        reason = FinishReason.ERROR if end.error else FinishReason.STOP
        last.record.finish_reason = reason
        failed = bool(end.error)
        return last._replace(finish_reason=reason, error=end.error, impossible=failed, offer=None)

    def _note_ends(self, updates: list[Update]) -> None:
        for update in updates:
            if update.record is not None:
                self.ledger.close(update.record)
                self.records.requests.append(update.record)
                if self._grammars is not None:
                    self._grammars.drop(update.request_id)

    def _fail(self, error: Exception) -> list[Update]:
        """Continue after a step that failed. `Scheduler.fail` finds the request at fault."""
        reason = f"{type(error).__name__}: {error}"
        if not self.scheduler.in_flight:
            raise EngineError(f"the engine failed with no step running ({reason})") from error
        updates = self.scheduler.fail(f"the engine failed while running a step ({reason})")
        self._executor.reset()
        self._note_ends(updates)
        return updates
