"""`StepTimes`: predicts the device time of a step from the steps that ran.

There are two regimes. In each, the time is a sum of amounts of work times costs; no cost is
negative:

    decode only     a step  +  rows  +  cached positions read
                    +  with drafts: a constant  +  drafted tokens  +  positions they attend to
    with prefill    a step  +  tokens (three slopes)  +  positions attended to  +  rows
                    +  cached positions read, at the cost they have without prefill

Tokens are all tokens of the step, since the linear layers see one flat run of them. Ranks send the
same number of bytes for each token (`ring_bytes` in `cost.py`) in the same number of collectives a
step, so communication is part of the slopes and of the step's constant. Slopes grow at `KNEES` and
never shrink: a few tokens are nearly free on a GPU, and a CPU pays for each. A step with prefill is
never expected to take less time than its decode slots alone. The cost of positions read by slots is
not learnt from such steps: the context of a prompt and of the streams grow together there, so the
cost of one could be charged to the other.

Costs are the non-negative least squares of the *relative* errors, with older steps fading out: sums
of the normal equations, then a round of coordinate descent from the costs before. No matrix is
inverted and fading sums are bounded, so this can run for years; costs of work that the newest steps
lack stay as they were. All costs of a regime are multiplied by a factor, which quickly follows
influences on all steps, such as other load on the machine or the clock rate. The time of a step
that took far longer or shorter than expected (an outlier) counts only up to a limit, unless
`MIN_OUTLIERS` outliers come in a row.

Plain Python, about 10 µs a step. The same steps give the same costs.
"""

from __future__ import annotations

from operator import mul

from twostroke.plan import PhaseWork

KNEES = (128, 512)  # tokens in a step above which each token may cost more
MIN_STEPS = 3  # steps of a regime before it predicts
DECAY = 0.998  # weight of the past, with each step of the regime
RESCALE_AT = 1e9  # weight of the newest step at which all weights are divided by it
DAMPING = 0.01  # costs that contribute little to the steps are learnt slowly
FACTOR_RATE = 0.1  # at which the factor follows a step
READS_UNIT = 4096
READS = 2  # index of the cost of cached positions read, without prefill
MIN_OUTLIERS = 3  # outliers in a row from which on they count in full
ERROR_OVER = 30  # steps over which errors are averaged
SETTLED_STEPS = 64  # steps of a regime after which one round of descent a step is enough
MIN_SHARE = 0.1  # of a step that is always attributed to the learnt costs
MIN_TOLERANCE = 0.25  # relative error below which a step is no outlier


class Costs:
    """One regime: time = factor · Σ cost · amount."""

    def __init__(self, size: int, step: int) -> None:
        self.steps = 0
        self._step = step  # index of the amount that is always one: the step itself
        self.costs = [0.0] * size
        self.factor = 1.0
        self.error = 0.0  # recent mean absolute relative error of predictions
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._weight = 1.0  # of the newest step in these sums
        self._outliers = 0  # in a row: positive if the steps were slow, negative if fast

    def expected(self, amounts: list[float]) -> float:
        return self.factor * sum(map(mul, self.costs, amounts))

    def add(self, amounts: list[float], seconds: float, known_s: float = 0.0) -> None:
        """`known_s`: the part of `seconds` that these costs do not explain."""
        base = sum(map(mul, self.costs, amounts))
        counted = seconds
        if self.steps >= MIN_STEPS and base > 0.0:
            expected = self.factor * base + known_s
            off = min(abs(expected - seconds) / seconds, 1.0)
            share = 1.0 / min(self.steps - MIN_STEPS + 1, ERROR_OVER)
            limit = 1.0 + max(MIN_TOLERANCE, 4.0 * self.error)
            self.error += share * (off - self.error)
            counted = self._clamped(seconds, expected, limit)
            # The error is relative to the expected time. Relative to the measured time, slow steps
            # would count less, and the costs would be too low.
            scale = 1.0 / expected
            rest = max(counted - known_s, MIN_SHARE * counted)
            self.factor += FACTOR_RATE * (rest / base - self.factor)
        else:
            scale = 1.0 / seconds
            if not self.steps:
                self.costs[0] = seconds / amounts[0]
            rest = max(counted - known_s, MIN_SHARE * counted)
        self.steps += 1
        self._learn([scale * amount for amount in amounts], scale * rest)

    def _clamped(self, seconds: float, expected: float, limit: float) -> float:
        """Return the time, or the part of an outlier that counts."""
        if expected / limit <= seconds <= expected * limit:
            self._outliers = 0
            return seconds
        slow = 1 if seconds > expected else -1
        self._outliers = self._outliers + slow if self._outliers * slow > 0 else slow
        if abs(self._outliers) >= MIN_OUTLIERS:
            return seconds
        return expected * limit if slow > 0 else expected / limit

    def _learn(self, amounts: list[float], target: float) -> None:
        self._weight /= DECAY  # a growing weight of the newest step is a fading past
        if self._weight > RESCALE_AT:
            self._rescale()
        products, targets, costs = self._products, self._targets, self.costs
        for index, amount in enumerate(amounts):
            if amount:
                part = self._weight * amount
                row = products[index]
                products[index] = [old + part * other for old, other in zip(row, amounts)]  # noqa: B905
                targets[index] += part * target
        damping = DAMPING * products[self._step][self._step]
        for _ in range(1 if self.steps > SETTLED_STEPS else 8):
            for index, row in enumerate(products):
                if weight := row[index]:
                    change = (targets[index] - sum(map(mul, row, costs))) / (weight + damping)
                    costs[index] = max(0.0, costs[index] + change)

    def _rescale(self) -> None:
        self._products = [[each / self._weight for each in row] for row in self._products]
        self._targets = [each / self._weight for each in self._targets]
        self._weight = 1.0


class StepTimes:
    def __init__(self) -> None:
        self.largest = 0  # prefill tokens in one step, of those seen
        self._decode = Costs(6, 0)
        self._mixed = Costs(6, 5)

    def add(self, prefill: PhaseWork, decode: PhaseWork, seconds: float) -> None:
        """Learn from a step that took `seconds` on the device."""
        if not 0.0 < seconds < float("inf"):
            return
        if prefill.tokens:
            self.largest = max(self.largest, prefill.tokens)
            self._mixed.add(_mixed_amounts(prefill, decode), seconds, self._reads_s(decode))
        elif decode.tokens:
            self._decode.add(_decode_amounts(decode), seconds)

    def decode_only(self, decode: PhaseWork) -> float | None:
        """Return the seconds of a step without prefill; None: too few steps were seen."""
        if self._decode.steps < MIN_STEPS:
            return None
        return self._decode.expected(_decode_amounts(decode))

    def predict(self, prefill: PhaseWork, decode: PhaseWork) -> float | None:
        """Return the seconds of a step, never less for more work; None: too few steps were seen."""
        alone = self.decode_only(decode) if decode.tokens else 0.0
        if not prefill.tokens:
            return alone
        if self._mixed.steps < MIN_STEPS:
            return None
        mixed = self._mixed.expected(_mixed_amounts(prefill, decode)) + self._reads_s(decode)
        return max(mixed, alone or 0.0)

    def _reads_s(self, decode: PhaseWork) -> float:
        return self._decode.factor * self._decode.costs[READS] * decode.kv_reads / READS_UNIT

    @property
    def error(self) -> float:
        """Recent mean absolute relative error of predictions, of the worse of the two regimes."""
        return max(self._decode.error, self._mixed.error)

    @property
    def mixed_error(self) -> float:
        """Recent mean absolute relative error of predictions of steps with prefill."""
        return self._mixed.error


# Amounts are scaled to about one in a usual step. If amounts always grow together, their cost is
# charged to the first: until sizes differ, to the tokens of a step with prefill, and to the
# constant of a step without.


def _decode_amounts(decode: PhaseWork) -> list[float]:
    drafts = decode.tokens - decode.rows
    if not drafts:
        return [1.0, decode.rows / 8, decode.kv_reads / READS_UNIT, 0.0, 0.0, 0.0]
    attended = decode.kv_tokens - decode.kv_reads  # beyond the first token of each row
    reads = decode.kv_reads / READS_UNIT
    return [1.0, decode.rows / 8, reads, 1.0, drafts / 8, attended / READS_UNIT]


def _mixed_amounts(prefill: PhaseWork, decode: PhaseWork) -> list[float]:
    tokens = prefill.tokens + decode.tokens
    return [
        tokens / 128,
        prefill.kv_tokens / 65536,
        max(0, tokens - KNEES[0]) / 128,
        max(0, tokens - KNEES[1]) / 128,
        decode.rows / 8,
        1.0,
    ]
