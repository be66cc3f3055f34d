"""`StepCosts`: the costs of prefill and decode in one engine, learnt from its step records.

`StepCosts` gives the records to the step-time model (`sched/steptime.py`), and from the model gets
five costs. With these costs the router predicts times by a few multiplications.
"""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes

# Learning from a step takes about 20 µs. So in this time at most one step with prefill and one step
# without prefill are used.
LEARN_EVERY_S = 0.05
# The cost of a prompt token is the predicted time of a step with one chunk, divided by the chunk's
# tokens. The chunk is as long as the longest one seen, but not longer than this.
MAX_CHUNK = 512
# The cost of a position is the predicted time that this many positions add to a step, divided by
# their number.
MANY_POSITIONS = 65536


class PrefillCosts(NamedTuple):
    """Costs of a prompt, in seconds."""

    token: float
    position: float  # for each position to which a token attends

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Return the time to compute all tokens after the first `num_cached` tokens."""
        tokens = num_tokens - num_cached
        return tokens * (self.token + self.position * (num_cached + tokens / 2))


class DecodeCosts(NamedTuple):
    """Costs of a decode step, in seconds."""

    step: float  # for any number of streams
    stream: float  # for each stream in the step
    position: float  # for each cached position of a stream

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
        # The earliest time of the next step to learn from: without prefill, with prefill.
        self._next_s = [0.0, 0.0]

    def add_step(self, record: StepRecord) -> None:
        """Learn from a step, unless its device time is unknown or another step was used shortly
        before."""
        has_prefill = record.prefill.tokens > 0
        if record.device_s <= 0.0 or record.committed_s < self._next_s[has_prefill]:
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
    # The last two fields are the positions attended to and the positions read. They are equal for
    # decode. For prefill, the step-time model ignores the positions read.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)
