"""`StepCosts`: the costs of prefill and decode in one engine, learnt from its step records.

`StepCosts` gives the records to the step-time model (`sched/steptime.py`) and asks the model for
five costs. With these costs the router predicts times by a few multiplications. The server receives
the step records in any case.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes

# Learning from a step takes about 20 µs, so at most one step with prefill and one step without
# prefill is used in this time.
LEARN_EVERY_S = 0.05
# The cost of a prompt token is the predicted time of a step divided by its prompt tokens. The step
# has as many prompt tokens as the largest one seen, but at most this many.
MAX_CHUNK = 512
# The cost of a position is the difference that so many positions make to a step, divided by them.
MANY_POSITIONS = 65536


class PrefillCosts(NamedTuple):
    """Costs of a prompt, in seconds."""

    token: float
    position: float  # of one token that attends to one position

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Return the time to compute all tokens after the first `num_cached` tokens."""
        tokens = num_tokens - num_cached
        return tokens * (self.token + self.position * (num_cached + tokens / 2))


class DecodeCosts(NamedTuple):
    """Costs of a decode step, in seconds."""

    step: float  # of a step without streams
    stream: float  # of each stream in the step
    position: float  # of each cached position of a stream

    def step_s(self, streams: int, positions: float) -> float:
        return self.step + self.stream * streams + self.position * positions


class StepCosts:
    """The costs of one engine. `prefill` and `decode` are None until enough steps of the phase have
    been seen."""

    def __init__(self) -> None:
        self.prefill: PrefillCosts | None = None
        self.decode: DecodeCosts | None = None
        self.learnt_s = 0.0  # monotonic time at which a step was last used
        self._times = StepTimes()
        # The earliest time of the next step that is used: without prefill, with prefill.
        self._next_s = [0.0, 0.0]

    def add_step(self, record: StepRecord) -> None:
        """Learn from a step, unless its device time is unknown or another step was used shortly
        before."""
        has_prefill = record.prefill.tokens > 0
        if record.device_s <= 0.0:  # the device time is unknown
            return
        if record.committed_s < self._next_s[has_prefill]:
            return
        self._next_s[has_prefill] = record.committed_s + LEARN_EVERY_S
        self.learnt_s = monotonic()
        times = self._times
        times.add(_work(record.prefill), _work(record.decode), record.device_s)
        if has_prefill:
            tokens = min(times.largest, MAX_CHUNK)
            first_chunk_s, late_chunk_s = (
                times.predict(PhaseWork(1, tokens, positions), PhaseWork())
                for positions in (0, MANY_POSITIONS)
            )
            if first_chunk_s is not None and late_chunk_s is not None:
                position_s = (late_chunk_s - first_chunk_s) / MANY_POSITIONS
                self.prefill = PrefillCosts(first_chunk_s / tokens, position_s)
        else:
            empty_s, one_stream_s, positions_s = (
                times.decode_only(PhaseWork(rows, rows, positions, positions))
                for rows, positions in ((0, 0), (1, 0), (0, MANY_POSITIONS))
            )
            if empty_s is not None and one_stream_s is not None and positions_s is not None:
                self.decode = DecodeCosts(
                    empty_s, one_stream_s - empty_s, (positions_s - empty_s) / MANY_POSITIONS
                )


def _work(phase: PhaseRecord) -> PhaseWork:
    # A decode slot attends to each cached position once, so that it reads as many positions as it
    # attends to. The step-time model ignores the positions that prefill reads.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)
