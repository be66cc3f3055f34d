"""`Allowance`: how many tokens of prefill one step has time for.

As many as keep the step within its time, but not less than a floor, so that no goal stops a prompt:

  - a quarter more than what the step takes with a single token of the prompt, up to `FLOOR_TOKENS`;
  - `MIN_CHUNK` tokens, and so many that the prompt takes at most `MAX_PREFILL_STEPS` steps.

So the first prompt in order is computed within that many steps whatever the goal, and a gap is at
most the longest of the goal, a quarter more than a step with one token of prefill, and a step with
that part of a prompt; beyond that only by what the model of step times did not foresee.
"""

from __future__ import annotations

from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes
from twostroke.sched.work import AttentionWork

FLOOR_SHARE = 0.25
FLOOR_TOKENS = 64
MIN_CHUNK = 2
MAX_PREFILL_STEPS = 2048
UNTIMED_CHUNK = 32  # at most, while no step has been timed; later twice the largest seen
CHUNK_MULTIPLE = 4  # tokens that kernels take together: one more costs as much as four
MIN_SECOND_CHUNK = 8  # a second chunk that time cuts below this is left for the next step


class Allowance:
    """What is left of one step's time for prefill."""

    def __init__(
        self,
        times: StepTimes,
        decode: PhaseWork,
        work: AttentionWork,
        limit_s: float,
        halve: bool = False,
        spent: bool = False,
    ) -> None:
        self.limit_s = limit_s  # for the whole step on the device, as the model counts it
        self.spent = spent  # a chunk was cut: nothing more fits
        self._halve = halve
        self._times = times
        self._decode = decode
        self._work = work

    def fit(self, before: PhaseWork, start: int, most: int, length: int) -> int:
        """How many tokens from `start` on, of a prompt of `length`, fit beside what the step has
        by now; at most `most`."""
        first = not before.tokens
        known = max(UNTIMED_CHUNK, 2 * self._times.largest) - before.tokens
        count = min(most, known)
        one = self._seconds(before, start, 1)
        if one is None:
            count = min(count, self._untimed_chunk()) if first else 0
        else:
            count = self._largest(self.limit_s, before, start, count)
            if first and count < FLOOR_TOKENS:
                limit_s = (1 + FLOOR_SHARE) * one
                count = max(
                    count, self._largest(limit_s, before, start, min(most, known, FLOOR_TOKENS))
                )
            if self._halve and count < most:
                count //= 2
            if FLOOR_TOKENS // 4 <= count < most:
                count -= count % CHUNK_MULTIPLE
            if first:
                count = min(most, max(count, MIN_CHUNK, -(-length // MAX_PREFILL_STEPS)))
        self.spent = count < most
        return 0 if self.spent and not first and count < MIN_SECOND_CHUNK else count

    def _untimed_chunk(self) -> int:
        """While no step with prefill has been timed: as if each token took a step of decode."""
        alone = self._times.decode_only(self._decode)
        tokens = UNTIMED_CHUNK if not alone else int(self.limit_s / alone)
        return min(max(tokens, MIN_CHUNK), UNTIMED_CHUNK)

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
        work = before.with_chunk(count, self._work.of_chunk(start, count))
        return self._times.predict(work, self._decode)
