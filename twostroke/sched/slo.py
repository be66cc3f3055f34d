"""`Pacer`: limits the prefill of a step by time while requests decode.

With a goal for the time between two tokens (`itl_slo_s`), the prefill of a step is as large as it
can be while the stream that is closest to its deadline stays on time:

    last token ──────────────── itl_slo_s ───────────────▶ deadline
                elapsed │ steps in flight │ host │ this step │ margin
                       now              begin

Without such a goal, a gap between two tokens may be `max_decode_stall` times as long as a step that
decodes the running streams without prefill. That time is learnt from steps without prefill. While
prompts are always waiting, a step without prefill (a probe) is planned now and then: every
`PROBE_EVERY` steps, every `PROBE_SOON` steps if one of the last probes had less than half of the
present streams, and at the start, while no time is known.

An engine that receives requests from other engines (`receives_requests`) limits prefill as if one
stream were running even if none is: a stream that arrives during a step waits for the end of that
step.

`Allowance` (`allowance.py`) turns the time of a step into tokens. One step in `HALVE_EVERY` takes
half of them: if all chunks had the same size, the cost of a token could not be told from the fixed
cost of a step. Times come in as arguments, so the same events at the same times give the same
plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from twostroke.plan import NO_WORK, PhaseWork, StepPlan
from twostroke.sched.allowance import Allowance
from twostroke.sched.step import SchedulerConfig, StepBuilder, StepInFlight
from twostroke.sched.steptime import MIN_STEPS, StepTimes
from twostroke.sched.work import AttentionWork

HALVE_EVERY = 16
MIN_MARGIN, MAX_MARGIN = 0.03, 0.5  # shares of the expected time
# The margin as a multiple of the step-time model's average error: with a goal in seconds, and with
# a goal that is a multiple of a step, which may be missed a little.
MARGIN_ERRORS, MARGIN_ERRORS_OF_STALL = 4.0, 1.5
SMOOTHING = 0.1  # of moving averages
MIN_ITL_S = 0.04  # people do not see shorter gaps, and short steps waste a fast device
PROBE_EVERY, PROBE_SOON = 64, 4  # steps in a row with prefill before one goes without
MAX_BLIND_PROBES = 8  # probes while no time is known: an executor may report none
MAX_STRETCH = 5.0  # see `Pacer.stretch`
ONE_STREAM = PhaseWork(1, 1, 1, 1)


class Pacer:
    """Learns how long steps take, and limits the prefill time of the next step."""

    def __init__(self, config: SchedulerConfig, work: AttentionWork) -> None:
        self.times = StepTimes()
        # Of steps at the start, for `prefill_s` before requests have run
        self._start_times = StepTimes()
        self.host_s = 0.0  # time of a step beyond its device time
        self.stretch = 1.0  # factor by which streams lengthen the prefill of a prompt
        self._itl_s = config.itl_slo_s
        self._stall = config.max_decode_stall
        self._receives_requests = config.receives_requests
        self._steps_since_probe = 0
        # Numbers of streams in the last steps without prefill
        self._probed_rows = deque([0] * MIN_STEPS, MIN_STEPS)
        self._blind_probes = 0
        self._work = work
        self._committed_s = 0.0
        self._decode_s: float | None = None  # expected time of the newest slots without prefill

    def allowance(
        self, step: StepBuilder, in_flight: Iterable[StepInFlight], prompts: bool = True
    ) -> Allowance | None:
        """Return the prefill time of a step whose decode slots are planned. None: unlimited, or not
        needed because there are no `prompts`."""
        streams, decode = step.sampled_requests, step.decode_work
        alone = self._decode_s = self.times.decode_only(decode if streams else ONE_STREAM)
        itl_s = self._itl_s
        if itl_s is None and self._stall is not None:
            if streams and self._probe_is_due(decode, alone):
                spent = Allowance(self.times, decode, self._work, 0.0, spent=True)
                return spent if prompts else None
            if alone is not None:
                itl_s = max(MIN_ITL_S, self._stall * (alone + self.host_s))
        if itl_s is None or not streams:
            self.stretch += SMOOTHING * (1.0 - self.stretch)
        if itl_s is None or not (streams or self._receives_requests):
            return None
        if streams and alone is not None:
            for_prefill = max(itl_s - alone, itl_s / MAX_STRETCH)
            self.stretch += SMOOTHING * (itl_s / for_prefill - self.stretch)
        if not prompts:
            return None
        begin = self._device_free_at_s(step.now, in_flight)
        # `pending` counts the slot that has just been planned, with its drafts. If that is all, no
        # step in flight writes a token of the stream: its newest token is committed. If not, the
        # newest token comes at the end of the last step in flight, which is `begin`.
        newest = (
            request.record.token_s[-1]
            if request.pending == 1 + slot.drafts and request.record.token_s
            else begin
            for request, slot in zip(streams, step.slots, strict=True)
        )
        oldest = min(newest, default=begin)
        left = oldest + itl_s - begin - self.host_s - step.model_s
        errors = MARGIN_ERRORS_OF_STALL if self._itl_s is None else MARGIN_ERRORS
        margin = min(max(MIN_MARGIN, errors * self.times.mixed_error), MAX_MARGIN)
        limit_s = max(0.0, left / (1 + margin))
        halve = step.step % HALVE_EVERY == 0
        return Allowance(self.times, decode, self._work, limit_s, halve)

    def _probe_is_due(self, decode: PhaseWork, alone: float | None) -> bool:
        if alone is None:
            self._blind_probes += 1
            return self._blind_probes <= MAX_BLIND_PROBES
        soon = decode.rows > 2 * min(self._probed_rows)
        return self._steps_since_probe >= (PROBE_SOON if soon else PROBE_EVERY)

    def seconds_with_drafts(self, decode: PhaseWork) -> Callable[[int], float | None]:
        """Return a function: the expected seconds of a step with these slots and n drafted tokens,
        with the host's part. The drafts are spread over the rows."""
        context = decode.kv_reads // max(1, decode.rows)

        def seconds(count: int) -> float | None:
            work = PhaseWork(
                decode.rows,
                decode.tokens + count,
                decode.kv_tokens + count * context,
                decode.kv_reads + count,
            )
            alone = self.times.decode_only(work)
            return None if alone is None else alone + self.host_s

        return seconds

    def note_start_step(self, start: int, count: int, seconds: float) -> None:
        """Learn from a step that the executor ran before the first request."""
        self._start_times.add(self._chunk(start, count), NO_WORK, seconds)

    def prefill_s(self, start: int, count: int) -> float:
        """Return the expected time to prefill `count` tokens beside the streams; 0: unknown."""
        work = self._chunk(start, count)
        seconds = self.times.predict(work, NO_WORK)
        if seconds is None:
            seconds = self._start_times.predict(work, NO_WORK)
        return self.stretch * (seconds or 0.0)

    def _chunk(self, start: int, count: int) -> PhaseWork:
        return PhaseWork(1, count, *self._work.of_chunk(start, count))

    def expected_s(self, plan: StepPlan) -> float:
        """Return the expected device time of the step of the last `allowance`; 0: unknown."""
        if not plan.prefill:
            return self._decode_s or 0.0
        return self.times.predict(plan.prefill_work, plan.decode_work) or 0.0

    def commit(self, step: StepInFlight, device_s: float, now: float) -> None:
        plan = step.plan
        began = max(self._committed_s, step.planned_s)
        model_s = 0.0 if step.drafts is None else step.drafts.model_s
        host_s = max(0.0, now - began - model_s - device_s)
        host_s = min(host_s, 4 * self.host_s + 1e-3)  # one stall hardly moves the average
        self.host_s += SMOOTHING * (host_s - self.host_s)
        self._committed_s = now
        self.times.add(plan.prefill_work, plan.decode_work, device_s)
        if plan.decode and not plan.prefill:
            self._steps_since_probe = 0
            self._probed_rows.append(len(plan.decode))
        else:
            self._steps_since_probe += 1

    def _device_free_at_s(self, now: float, in_flight: Iterable[StepInFlight]) -> float:
        """Return the expected time at which the last step in flight will have committed."""
        end = self._committed_s
        for step in in_flight:
            end = max(end, step.planned_s) + step.predicted_device_s + self.host_s
        return max(end, now)
