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

Not less than a floor, though, so that no goal stops a prompt (`Allowance.fit` has it):

  - a quarter more than what the step takes with a single token of the prompt, up to `FLOOR` tokens;
  - `LEAST` tokens, and at least a `WITHIN`th of the prompt.

So the first prompt in order is computed within `WITHIN` steps whatever the goal, and a gap is at
most the longest of the goal, a quarter more than a step with one token of prefill, and a step with
a `WITHIN`th of a prompt; beyond that only by what the model did not foresee. One step in `TRIES`
takes half: of chunks that are all alike nobody can tell what a token costs and what the step, and
a wrong idea of the latter would keep them alike. Times come in as arguments: same events at the
same times, same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from twostroke.plan import PhaseWork, StepPlan
from twostroke.sched.step import SchedulerConfig, visible_positions
from twostroke.sched.steptime import ENOUGH, StepTimes

if TYPE_CHECKING:
    from twostroke.sched.scheduler import InFlight
    from twostroke.sched.step import StepBuilder

FLOOR_SHARE = 0.25
FLOOR = 64
LEAST = 2
WITHIN = 2048
UNKNOWN = 32  # tokens of a chunk before anything is known; later at most twice the largest seen
TRIES = 16
ALIGNED = 4  # tokens that kernels take together: one more than a multiple costs as much as four
SLIVER = 8  # a second chunk that time cuts below this is left for the next step
MARGIN = (0.03, 0.5)  # least and most, as a share of what the model expects
# Average errors of the model that the margin covers: where somebody asked for milliseconds, and
# where the goal is a multiple of a step, which may be missed a little.
ERRORS, ERRORS_OF_STALL = 4.0, 1.5
SMOOTH = 0.1  # of the host's share of a step
LEAST_GOAL_S = 0.04  # of a stall: nobody sees a shorter gap, and short steps waste a fast device
PROBE_EVERY, PROBE_SOON = 64, 4  # steps in a row with prefill before one goes without
MOST_BLIND_PROBES = 8  # an executor that tells no times is not waited for
MOST_STRETCH = 5.0


class Allowance:
    """What is left of one step's time for prefill."""

    def __init__(
        self,
        times: StepTimes,
        decode: PhaseWork,
        window: int | None,
        limit_s: float,
        tries: bool = False,
        spent: bool = False,
    ) -> None:
        self.limit_s = limit_s  # for the whole step on the device, as the model counts it
        self.spent = spent  # a chunk was cut: nothing more fits
        self._tries = tries
        self._times = times
        self._decode = decode
        self._window = window

    def fit(self, before: PhaseWork, start: int, most: int, length: int) -> int:
        """How many tokens from `start` on, of a prompt of `length`, fit beside what the step has
        by now; at most `most`."""
        first = not before.tokens
        known = max(UNKNOWN, 2 * self._times.largest) - before.tokens
        count = min(most, known)
        one = self._seconds(before, start, 1)
        if one is None:
            count = min(count, UNKNOWN) if first else 0
        else:
            count = self._largest(self.limit_s, before, start, count)
            if first and count < FLOOR:
                limit_s = (1 + FLOOR_SHARE) * one
                count = max(count, self._largest(limit_s, before, start, min(most, known, FLOOR)))
            if self._tries and count < most:
                count //= 2
            if FLOOR // 4 <= count < most:
                count -= count % ALIGNED
            if first:
                count = min(most, max(count, LEAST, -(-length // WITHIN)))
        self.spent = count < most
        return 0 if self.spent and not first and count < SLIVER else count

    def _largest(self, limit_s: float, before: PhaseWork, start: int, most: int) -> int:
        if most <= 0 or (self._seconds(before, start, most) or 0.0) <= limit_s:
            return max(0, most)
        fits, too_many = 0, most
        while too_many - fits > 1 + fits // 64:
            middle = (fits + too_many) // 2
            if (self._seconds(before, start, middle) or 0.0) <= limit_s:
                fits = middle
            else:
                too_many = middle
        return fits

    def _seconds(self, before: PhaseWork, start: int, count: int) -> float | None:
        work = PhaseWork(
            before.rows + 1,
            before.tokens + count,
            before.kv_tokens + visible_positions(start, count, self._window),
            before.kv_reads + start + count,
        )
        return self._times.predict(work, self._decode)


class Pacer:
    """Learns what steps take, and says what the next one may take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.times = StepTimes()
        self.host_s = 0.0  # what a step takes beyond its time on the device
        self.stretch = 1.0  # how much longer a prompt takes beside the streams than alone
        self._itl_s = config.itl_slo_s
        self._stall = config.max_decode_stall
        self._mixed_in_a_row = 0
        self._probed_rows = deque([0] * ENOUGH, ENOUGH)  # streams of the last steps without prefill
        self._blind_probes = 0
        self._window = config.windows[0] if len(config.windows) == 1 else None
        self._committed_s = 0.0

    def allowance(self, step: StepBuilder, flights: Iterable[InFlight]) -> Allowance | None:
        """For a step that has its slots. None: only the token budget bounds it."""
        streams, decode = step.sampled, step.decode_work
        alone = self.times.decode_only(decode)
        itl_s = self._itl_s
        if itl_s is None and self._stall is not None and streams:
            if self._probe_is_due(decode, alone):
                return Allowance(self.times, decode, self._window, 0.0, spent=True)
            if alone is not None:
                itl_s = max(LEAST_GOAL_S, self._stall * (alone + self.host_s))
        if itl_s is None or not streams:
            self.stretch += SMOOTH * (1.0 - self.stretch)
            return None
        begin = self._free_s(step.now, flights)
        # A stream's newest token is one that has come, or is in the last step in flight; the slot
        # it has just been given is pending, too.
        oldest = min(
            request.record.token_s[-1] if request.pending == 1 and request.record.token_s else begin
            for request in streams
        )
        left = oldest + itl_s - begin - self.host_s
        least, most = MARGIN
        errors = ERRORS_OF_STALL if self._itl_s is None else ERRORS
        margin = min(max(least, errors * self.times.mixed_error), most)
        limit_s = max(0.0, left / (1 + margin))
        if alone is not None:
            for_prefill = max(itl_s - alone, itl_s / MOST_STRETCH)
            self.stretch += SMOOTH * (itl_s / for_prefill - self.stretch)
        tries = step.step % TRIES == 0
        return Allowance(self.times, decode, self._window, limit_s, tries)

    def _probe_is_due(self, decode: PhaseWork, alone: float | None) -> bool:
        if alone is None:
            self._blind_probes += 1
            return self._blind_probes <= MOST_BLIND_PROBES
        soon = decode.rows > 2 * min(self._probed_rows)
        return self._mixed_in_a_row >= (PROBE_SOON if soon else PROBE_EVERY)

    def prefill_s(self, start: int, count: int) -> float:
        """How long `count` tokens from `start` on will take beside the streams; 0 if unknown."""
        work = PhaseWork(1, count, visible_positions(start, count, self._window), start + count)
        return self.stretch * (self.times.predict(work, PhaseWork()) or 0.0)

    def expected_s(self, plan: StepPlan) -> float:
        """The step's time on the device; 0 if it cannot be told yet."""
        return self.times.predict(plan.prefill_work, plan.decode_work) or 0.0

    def commit(self, flight: InFlight, device_s: float, now: float) -> None:
        plan = flight.plan
        began = max(self._committed_s, flight.planned_s)
        host_s = max(0.0, now - began - device_s)
        host_s = min(host_s, 4 * self.host_s + 1e-3)  # one stall is not what a step takes
        self.host_s += SMOOTH * (host_s - self.host_s)
        self._committed_s = now
        self.times.add(plan.prefill_work, plan.decode_work, device_s)
        if plan.decode and not plan.prefill:
            self._mixed_in_a_row = 0
            self._probed_rows.append(len(plan.decode))
        else:
            self._mixed_in_a_row += 1

    def _free_s(self, now: float, flights: Iterable[InFlight]) -> float:
        """When the last step in flight will have committed."""
        end = self._committed_s
        for flight in flights:
            end = max(end, flight.planned_s) + flight.predicted_s + self.host_s
        return max(end, now)
