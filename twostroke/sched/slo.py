"""Chunks by the clock: how much prefill a step may take while streams write.

With a goal for the time between two tokens (`itl_slo_s`) a step's prefill is as large as leaves
the stream that is closest to its deadline on time:

    last token ──────────────── itl_slo_s ───────────────▶ deadline
               delivery │ steps in flight │ host │ this step │ margin
                       now              begin

Without one, `max_decode_stall` makes the goal: so many times what a step with the running streams
takes without prefill. That is learnt from steps without prefill, so where prompts always wait one
is planned now and then: a probe. Every `PROBE_EVERY` steps; every `PROBE_SOON` while the last few
had less than half of today's streams; and while nothing is known.

An engine that others hand requests to (`receives`) keeps to the goal of one stream while it has
none: a stream that comes in the middle of a step waits for its end.

`Allowance` (`allowance.py`) turns a step's time into tokens. One step in `HALVE_EVERY` takes half
of them: from chunks that are all alike nobody can tell what a token costs and what the step, and a
wrong idea of the latter would keep them alike. Times come in as arguments: same events at the same
times, same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twostroke.plan import PhaseWork, StepPlan
from twostroke.sched.allowance import Allowance
from twostroke.sched.step import SchedulerConfig, StepBuilder, StepInFlight
from twostroke.sched.steptime import MIN_STEPS, StepTimes
from twostroke.sched.work import AttentionWork

HALVE_EVERY = 16
MARGIN = (0.03, 0.5)  # least and most, as a share of what the model expects
# Average errors of the model that the margin covers: where somebody asked for milliseconds, and
# where the goal is a multiple of a step, which may be missed a little.
ERRORS, ERRORS_OF_STALL = 4.0, 1.5
SMOOTHING = 0.1  # of the host's share of a step
MIN_GOAL_S = 0.04  # of a stall: nobody sees a shorter gap, and short steps waste a fast device
PROBE_EVERY, PROBE_SOON = 64, 4  # steps in a row with prefill before one goes without
MAX_BLIND_PROBES = 8  # an executor that tells no times is not waited for
MAX_STRETCH = 5.0
ONE_STREAM = PhaseWork(1, 1, 1, 1)


class Pacer:
    """Learns what steps take, and says what the next one may take."""

    def __init__(self, config: SchedulerConfig, work: AttentionWork) -> None:
        self.times = StepTimes()
        self.host_s = 0.0  # what a step takes beyond its time on the device
        self.stretch = 1.0  # how much longer a prompt takes beside the streams than alone
        self._itl_s = config.itl_slo_s
        self._stall = config.max_decode_stall
        self._receives = config.receives
        self._mixed_in_a_row = 0
        # Streams of the last steps without prefill
        self._probed_rows = deque([0] * MIN_STEPS, MIN_STEPS)
        self._blind_probes = 0
        self._work = work
        self._committed_s = 0.0

    def allowance(self, step: StepBuilder, in_flight: Iterable[StepInFlight]) -> Allowance | None:
        """For a step that has its slots. None: only the token budget bounds it."""
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
        # A stream's newest token is one that has come, or is in the last step in flight; the slot
        # it has just been given is pending, too.
        newest = (
            request.record.token_s[-1] if request.pending == 1 and request.record.token_s else begin
            for request in streams
        )
        oldest = min(newest, default=begin)
        left = oldest + itl_s - begin - self.host_s
        least, most = MARGIN
        errors = ERRORS_OF_STALL if self._itl_s is None else ERRORS
        margin = min(max(least, errors * self.times.mixed_error), most)
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
        """How long `count` tokens from `start` on will take beside the streams; 0 if unknown."""
        work = PhaseWork(1, count, *self._work.of_chunk(start, count))
        return self.stretch * (self.times.predict(work, PhaseWork()) or 0.0)

    def expected_s(self, plan: StepPlan) -> float:
        """The step's time on the device; 0 if it cannot be told yet."""
        return self.times.predict(plan.prefill_work, plan.decode_work) or 0.0

    def commit(self, step: StepInFlight, device_s: float, now: float) -> None:
        plan = step.plan
        began = max(self._committed_s, step.planned_s)
        host_s = max(0.0, now - began - device_s)
        host_s = min(host_s, 4 * self.host_s + 1e-3)  # one stall is not what a step takes
        self.host_s += SMOOTHING * (host_s - self.host_s)
        self._committed_s = now
        self.times.add(plan.prefill_work, plan.decode_work, device_s)
        if plan.decode and not plan.prefill:
            self._mixed_in_a_row = 0
            self._probed_rows.append(len(plan.decode))
        else:
            self._mixed_in_a_row += 1

    def _free_s(self, now: float, in_flight: Iterable[StepInFlight]) -> float:
        """When the last step in flight will have committed."""
        end = self._committed_s
        for step in in_flight:
            end = max(end, step.planned_s) + step.predicted_s + self.host_s
        return max(end, now)
