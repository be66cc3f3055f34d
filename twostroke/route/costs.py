"""`StepCosts`: what work takes in one engine, learnt from the records of its steps.

The engine's own step-time model (`sched/steptime.py`), fed by the records that the server is sent
anyway, and read out as five plain costs, so that a decision about a request is a few products.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes

LEARN_EVERY_S = 0.05  # of steps with prefill, and of those without; one takes about 20 µs here
CHUNK = 512  # prompt tokens of the step that a token's cost is taken from, at the most
POSITIONS = 65536


class PrefillCosts(NamedTuple):
    """Seconds, of a prompt."""

    token: float
    position: float  # each cached position that a token attends to

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """To compute all tokens but the first `num_cached`."""
        tokens = num_tokens - num_cached
        return tokens * (self.token + self.position * (num_cached + tokens / 2))


class DecodeCosts(NamedTuple):
    """Seconds, of a step."""

    step: float
    stream: float  # what each stream adds
    position: float  # what each cached position of a stream adds

    def step_s(self, streams: int, positions: float) -> float:
        return self.step + self.stream * streams + self.position * positions


class StepCosts:
    """None: not enough of such steps has been seen."""

    def __init__(self) -> None:
        self.prefill: PrefillCosts | None = None
        self.decode: DecodeCosts | None = None
        self.learnt_s = 0.0  # when a step was last looked at
        self._times = StepTimes()
        self._again_s = [0.0, 0.0]  # from when on a step is looked at: without prefill, with

    def add_step(self, record: StepRecord) -> None:
        mixed = record.prefill.tokens > 0
        if record.device_s <= 0.0:  # it could not be told
            return
        if record.committed_s < self._again_s[mixed]:
            return
        self._again_s[mixed] = record.committed_s + LEARN_EVERY_S
        self.learnt_s = monotonic()
        times = self._times
        times.add(_work(record.prefill), _work(record.decode), record.device_s)
        if mixed:
            tokens = min(times.largest, CHUNK)
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
    # A decode slot reads each position that it attends to once.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)
