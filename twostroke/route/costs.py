"""`StepCosts`: the time that work takes in one engine, learnt from the records of its steps.

It feeds the step-time model (`sched/steptime.py`) with the records that the server is sent anyway,
and reads out five plain costs, so that a decision about a request takes a few multiplications.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes

LEARN_EVERY_S = 0.05  # for steps with prefill, and for those without; one takes about 20 µs
MAX_CHUNK = 512  # prompt tokens of the step from which the cost of a token is computed
POSITIONS = 65536


class PrefillCosts(NamedTuple):
    """Costs of a prompt, in seconds."""

    token: float
    position: float  # for each cached position that a token attends to

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """The time to compute all tokens but the first `num_cached`."""
        tokens = num_tokens - num_cached
        return tokens * (self.token + self.position * (num_cached + tokens / 2))


class DecodeCosts(NamedTuple):
    """Costs of a step, in seconds."""

    step: float
    stream: float  # added by each stream
    position: float  # added by each cached position of a stream

    def step_s(self, streams: int, positions: float) -> float:
        return self.step + self.stream * streams + self.position * positions


class StepCosts:
    """`prefill`, `decode`: None while too few steps of the phase have been seen."""

    def __init__(self) -> None:
        self.prefill: PrefillCosts | None = None
        self.decode: DecodeCosts | None = None
        self.learnt_s = 0.0  # when it last learnt from a step
        self._times = StepTimes()
        self._again_s = [0.0, 0.0]  # when it learns from the next step: without prefill, with

    def add_step(self, record: StepRecord) -> None:
        mixed = record.prefill.tokens > 0
        if record.device_s <= 0.0:  # unknown
            return
        if record.committed_s < self._again_s[mixed]:
            return
        self._again_s[mixed] = record.committed_s + LEARN_EVERY_S
        self.learnt_s = monotonic()
        times = self._times
        times.add(_work(record.prefill), _work(record.decode), record.device_s)
        if mixed:
            tokens = min(times.largest, MAX_CHUNK)
            alone, far = (
                times.predict(PhaseWork(1, tokens, positions), PhaseWork())
                for positions in (0, POSITIONS)
            )
            if alone is not None and far is not None:
                self.prefill = PrefillCosts(alone / tokens, (far - alone) / POSITIONS)
        else:
            none, stream, read = (
                times.decode_only(PhaseWork(rows, rows, positions, positions))
                for rows, positions in ((0, 0), (1, 0), (0, POSITIONS))
            )
            if none is not None and stream is not None and read is not None:
                self.decode = DecodeCosts(none, stream - none, (read - none) / POSITIONS)


def _work(phase: PhaseRecord) -> PhaseWork:
    # A decode slot reads each position that it attends to, once.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)
