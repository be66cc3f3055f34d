"""`Allowance`: the prefill tokens that one step has time for.

The chunk is as large as the step's time limit allows. It is at least the larger of two floors, so
that no goal stops a prompt:

  - the tokens that fit in 1.25 times the time of a step with one prompt token, at most
    `FLOOR_TOKENS`;
  - `MIN_CHUNK` tokens, or more if the prompt would otherwise take over `MAX_PREFILL_STEPS` steps.

So the first prompt in order is computed within that many steps, whatever the goal. The gap between
two tokens is at most the goal, or the time of a step with the larger floor if that is longer, plus
the error of the step-time model.
"""

from __future__ import annotations

from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes
from twostroke.sched.work import AttentionWork

FLOOR_SHARE = 0.25  # of the time of a step with one prompt token
FLOOR_TOKENS = 64
MIN_CHUNK = 2
MAX_PREFILL_STEPS = 2048
UNTIMED_CHUNK = 32  # limit while no step has been timed; later twice the largest chunk seen
CHUNK_MULTIPLE = 4  # tokens that kernels process together: one costs as much as four
MIN_SECOND_CHUNK = 8  # a second chunk that would be shorter is left for the next step


class Allowance:
    """The time of one step that is left for prefill."""

    def __init__(
        self,
        times: StepTimes,
        decode: PhaseWork,
        work: AttentionWork,
        limit_s: float,
        halve: bool = False,
        spent: bool = False,
    ) -> None:
        self.limit_s = limit_s  # device time of the whole step, by the step-time model
        self.spent = spent  # a chunk was cut: no more prefill fits
        self._halve = halve
        self._times = times
        self._decode = decode
        self._work = work

    def fit(self, before: PhaseWork, start: int, max_tokens: int, length: int) -> int:
        """Return how many tokens from `start` on, of a prompt of `length`, fit in addition to the
        prefill work `before`."""
        first = not before.tokens
        max_known = max(UNTIMED_CHUNK, 2 * self._times.largest) - before.tokens
        count = min(max_tokens, max_known)
        one = self._seconds(before, start, 1)
        if one is None:
            count = min(count, self._untimed_chunk()) if first else 0
        else:
            count = self._largest(self.limit_s, before, start, count)
            if first and count < FLOOR_TOKENS:
                floor = min(max_tokens, max_known, FLOOR_TOKENS)
                limit_s = (1 + FLOOR_SHARE) * one
                count = max(count, self._largest(limit_s, before, start, floor))
            if self._halve and count < max_tokens:
                count //= 2
            if FLOOR_TOKENS // 4 <= count < max_tokens:
                count -= count % CHUNK_MULTIPLE
            if first:
                count = min(max_tokens, max(count, MIN_CHUNK, -(-length // MAX_PREFILL_STEPS)))
        self.spent = count < max_tokens
        return 0 if self.spent and not first and count < MIN_SECOND_CHUNK else count

    def _untimed_chunk(self) -> int:
        """Return the chunk while no prefill has been timed: a token counts as a decode step."""
        alone = self._times.decode_only(self._decode)
        tokens = UNTIMED_CHUNK if not alone else int(self.limit_s / alone)
        return min(max(tokens, MIN_CHUNK), UNTIMED_CHUNK)

    def _largest(self, limit_s: float, before: PhaseWork, start: int, max_tokens: int) -> int:
        """Return the largest chunk that keeps the step within `limit_s`, to within 1/64 of it."""
        if max_tokens <= 0 or (self._seconds(before, start, max_tokens) or 0.0) <= limit_s:
            return max(0, max_tokens)
        fits, too_many = 0, max_tokens
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
