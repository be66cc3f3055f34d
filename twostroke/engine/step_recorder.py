"""`StepRecorder`: makes the `StepRecord` of each committed step."""

from __future__ import annotations

from twostroke.draft.speculator import StepDrafts
from twostroke.model.describe.cost import CostModel
from twostroke.observe.blame import GapLedger
from twostroke.observe.record import (
    Causes,
    DraftRecord,
    FirstToken,
    PhaseRecord,
    Records,
    StepRecord,
)
from twostroke.plan import StepPlan, StepResult
from twostroke.sched.step import StepInFlight
from twostroke.sched.updates import CommitResult

NO_PHASE = PhaseRecord(rows=0, tokens=0, kv_tokens=0, flops=0.0, num_bytes=0.0)


class StepRecorder:
    def __init__(
        self, cost: CostModel, ledger: GapLedger, records: Records, block_size: int
    ) -> None:
        self._cost, self._ledger, self._records = cost, ledger, records
        self._block_size = block_size
        self._device_free_s = 0.0  # when the executor last became idle

    def add(
        self, step: StepInFlight, result: StepResult, committed: CommitResult, now: float
    ) -> None:
        """Record a step whose tokens were known at `now`."""
        plan, ledger = step.plan, self._ledger
        prefill, decode = self._phases(step, result)
        flops = prefill.flops + decode.flops
        since_s = ledger.add_step(step, result, now, decode_share=decode.flops / flops)
        late: tuple[Causes, ...] = ()
        first: tuple[FirstToken, ...] = ()
        if committed.first or committed.late or committed.resumed:
            for record in committed.first:
                ledger.open(record)
            gaps = [ledger.late(*one) for one in committed.late]
            for record, waits_since_s in committed.resumed:
                ledger.open(record)
                gaps.append(Causes(preemption=now - waits_since_s))
            late = tuple(gaps)
            first = tuple(
                FirstToken(r.ttft_s, r.num_prompt, r.num_cached, r.num_fetched)
                for r in committed.first
            )
        evicted_blocks = 0
        if plan.evicted:
            evicted_blocks = sum(one.stop - one.start for one in plan.evicted)
        self._records.add_step(
            StepRecord(
                step=plan.step,
                planned_s=step.planned_s,
                launched_s=step.launched_s,
                committed_s=now,
                device_s=result.device_s,
                host_gap_s=self._host_gap_s(step, result, now),
                prefill=prefill,
                decode=decode,
                chunks=plan.prefill,
                slots=plan.decode,
                waiting=step.waiting,
                running=step.running,
                preempted=step.preempted,
                kv=step.kv,
                recomputed=step.recomputed,
                since_s=since_s,
                regular=committed.regular,
                late=late,
                first=first,
                predicted_s=step.predicted_device_s or None,
                drafted=committed.drafted,
                comm_s=result.comm_s,
                comm_bytes=result.comm_bytes,
                kv_evicted_tokens=evicted_blocks * self._block_size,
                drafts=None if step.drafts is None else _draft_record(step.drafts, plan, result),
            )
        )

    def _phases(self, step: StepInFlight, result: StepResult) -> tuple[PhaseRecord, PhaseRecord]:
        """Return the work of both phases. In a mixed step the weights count for decode only."""
        plan, cost = step.plan, self._cost
        work, slots = plan.prefill_work, plan.decode_work
        num_tokens = work.tokens + slots.tokens
        weights = cost.for_step(work.tokens).weight_bytes(len(result.tokens), num_tokens)
        prefill = decode = NO_PHASE
        if slots.rows:
            num_bytes = cost.kv_bytes(slots) + weights
            flops = cost.decode_flops(slots)
            decode = PhaseRecord(slots.rows, slots.tokens, slots.kv_tokens, flops, num_bytes)
            weights = 0.0
        if work.rows:
            num_bytes = cost.kv_bytes(work) + weights
            flops = cost.prefill_flops(work, len(step.sampled_requests) - len(plan.decode))
            prefill = PhaseRecord(work.rows, work.tokens, work.kv_tokens, flops, num_bytes)
        return prefill, decode

    def _host_gap_s(self, step: StepInFlight, result: StepResult, now: float) -> float:
        """Return the idle time of the executor before the step, as the executor measured it if it
        can."""
        free_s, self._device_free_s = self._device_free_s, now
        if result.idle_s is not None:
            return result.idle_s
        model_s = 0.0 if step.drafts is None else step.drafts.model_s
        return max(0.0, step.launched_s - free_s - model_s) if free_s else 0.0


def _draft_record(drafts: StepDrafts, plan: StepPlan, result: StepResult) -> DraftRecord:
    depths = [slot.drafts for slot in plan.decode]
    accepted = [0] * max(depths, default=0)
    for count in (result.counts or ())[: len(depths)]:
        for position in range(count - 1):
            accepted[position] += 1
    rows = sum(1 for depth in depths if depth)
    return DraftRecord(
        drafts.offers,
        rows,
        sum(depths),
        tuple(accepted),
        drafts.expected,
        drafts.gain,
        drafts.model_s,
    )
