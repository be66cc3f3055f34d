"""`Pacer`: limits the prefill of a step by time while streams write.

With a goal for the time between two tokens (`itl_slo_s`), the prefill of a step is as large as it
can be while the stream that is closest to its deadline stays on time:

    last token ──────────────── itl_slo_s ───────────────▶ deadline
               delivery │ steps in flight │ host │ this step │ margin
                       now              begin

Without such a goal, the limit is `max_decode_stall` times the time of a step that decodes the
running streams without prefill. That time is learnt from steps without prefill. If prompts always
wait, a step without prefill (a probe) is planned now and then: every `PROBE_EVERY` steps, every
`PROBE_SOON` steps if the last probes had less than half of the present streams, and while no time
is known.

An engine that receives requests from other engines (`receives`) keeps to the goal of one stream
even while it has none: a stream that arrives during a step waits for the end of that step.

`Allowance` (`allowance.py`) turns the time of a step into tokens. One step in `HALVE_EVERY` takes
half of them: if all chunks had the same size, the cost of a token could not be told from the cost
of a step. Times come in as arguments, so the same events at the same times give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twostroke.plan import NO_WORK, PhaseWork, StepPlan
from twostroke.sched.allowance import Allowance
from twostroke.sched.step import SchedulerConfig, StepBuilder, StepInFlight
from twostroke.sched.steptime import MIN_STEPS, StepTimes
from twostroke.sched.work import AttentionWork

HALVE_EVERY = 16
MIN_MARGIN, MAX_MARGIN = 0.03, 0.5  # shares of the expected time
# How many average errors of the step-time model the margin covers: with a goal in seconds, and with
# a goal that is a multiple of a step, which may be missed a little.
ERRORS, ERRORS_OF_STALL = 4.0, 1.5
SMOOTHING = 0.1  # of moving averages
MIN_GOAL_S = 0.04  # people do not see shorter gaps, and short steps waste a fast device
PROBE_EVERY, PROBE_SOON = 64, 4  # steps in a row with prefill before one goes without
MAX_BLIND_PROBES = 8  # probes while no time is known: an executor may report none
MAX_STRETCH = 5.0
ONE_STREAM = PhaseWork(1, 1, 1, 1)


class Pacer:
    """Learns how long steps take, and limits the prefill time of the next step."""

    def __init__(self, config: SchedulerConfig, work: AttentionWork) -> None:
        self.times = StepTimes()
        self.host_s = 0.0  # time of a step beyond its device time
        self.stretch = 1.0  # factor by which streams lengthen the prefill of a prompt
        self._itl_s = config.itl_slo_s
        self._stall = config.max_decode_stall
        self._receives = config.receives
        self._mixed_in_a_row = 0
        # Numbers of streams in the last steps without prefill
        self._probed_rows = deque([0] * MIN_STEPS, MIN_STEPS)
        self._blind_probes = 0
        self._work = work
        self._committed_s = 0.0

    def allowance(self, step: StepBuilder, in_flight: Iterable[StepInFlight]) -> Allowance | None:
        """Return the prefill time of a step whose slots are planned. None: unlimited."""
        streams, decode = step.sampled, step.decode_work
        alone = self.times.decode_only(decode if streams else ONE_STREAM)
        itl_s = self._itl_s
        if itl_s is None and self._stall is not None:
            if streams and self._probe_is_due(decode, alone):
                return Allowance(self.times, decode, self._work, 0.0, spent=True)
            if alone is not None:
                itl_s = max(MIN_GOAL_S, self._stall * (alone + self.host_s))
        if itl_s is None or not streams:
            self.stretch += SMOOTHING * (1.0 - self.stretch)
        if itl_s is None or not (streams or self._receives):
            return None
        begin = self._free_s(step.now, in_flight)
        # The newest token of a stream has been committed, or is in the last step in flight. The
        # slot that the stream has just been given is pending, too.
        newest = (
            request.record.token_s[-1] if request.pending == 1 and request.record.token_s else begin
            for request in streams
        )
        oldest = min(newest, default=begin)
        left = oldest + itl_s - begin - self.host_s
        errors = ERRORS_OF_STALL if self._itl_s is None else ERRORS
        margin = min(max(MIN_MARGIN, errors * self.times.mixed_error), MAX_MARGIN)
        limit_s = max(0.0, left / (1 + margin))
        if streams and alone is not None:
            for_prefill = max(itl_s - alone, itl_s / MAX_STRETCH)
            self.stretch += SMOOTHING * (itl_s / for_prefill - self.stretch)
        halve = step.step % HALVE_EVERY == 0
        return Allowance(self.times, decode, self._work, limit_s, halve)

    def _probe_is_due(self, decode: PhaseWork, alone: float | None) -> bool:
        if alone is None:
            self._blind_probes += 1
            return self._blind_probes <= MAX_BLIND_PROBES
        soon = decode.rows > 2 * min(self._probed_rows)
        return self._mixed_in_a_row >= (PROBE_SOON if soon else PROBE_EVERY)

    def prefill_s(self, start: int, count: int) -> float:
        """The expected prefill time of `count` tokens from `start` on, beside the streams; 0 if
        unknown."""
        work = PhaseWork(1, count, *self._work.of_chunk(start, count))
        return self.stretch * (self.times.predict(work, NO_WORK) or 0.0)

    def expected_s(self, plan: StepPlan) -> float:
        """The expected device time of a step; 0 if it is unknown yet."""
        return self.times.predict(plan.prefill_work, plan.decode_work) or 0.0

    def commit(self, step: StepInFlight, device_s: float, now: float) -> None:
        plan = step.plan
        began = max(self._committed_s, step.planned_s)
        host_s = max(0.0, now - began - device_s)
        host_s = min(host_s, 4 * self.host_s + 1e-3)  # a single stall is no usual step
        self.host_s += SMOOTHING * (host_s - self.host_s)
        self._committed_s = now
        self.times.add(plan.prefill_work, plan.decode_work, device_s)
        if plan.decode and not plan.prefill:
            self._mixed_in_a_row = 0
            self._probed_rows.append(len(plan.decode))
        else:
            self._mixed_in_a_row += 1

    def _free_s(self, now: float, in_flight: Iterable[StepInFlight]) -> float:
        """The expected time at which the last step in flight will have committed."""
        end = self._committed_s
        for step in in_flight:
            end = max(end, step.planned_s) + step.predicted_s + self.host_s
        return max(end, now)
