"""`SteadyScheduler`: the product's scheduler, which can also run a stretch of equal steps at once.

Most steps of a simulation only decode, for the same requests as the step before. Until a request
ends or arrives, the scheduler would plan the same slots again. A stretch has the result of these
steps: tokens, times and blocks. Only the pacing learns nothing from a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.sched.scheduler import Scheduler

TOKEN = 7  # the id of every sampled token


class SteadyScheduler(Scheduler):
    """A scheduler for simulations."""

    def steady_steps(self) -> int:
        """Return how many of the next steps give a slot to each running request and end none."""
        kv, requests = self.kv, self._decode.requests
        special = kv.eviction is not None or any(kv.windows) or self._retired
        if special or self.in_flight or self._prefill.has_work or self.received.has_work:
            return 0
        steps = min((request.remaining for request in requests), default=0) - 1
        short = 0
        for request in requests:
            short += max(
                0, -(-(request.kv.num_computed + steps - request.kv.capacity) // kv.block_size)
            )
        return steps if all(short <= pool.num_available for pool in kv.pools) else 0

    @property
    def positions(self) -> int:
        """The number of positions that the slots of the next step attend to."""
        return sum(request.kv.num_computed + 1 for request in self._decode.requests)

    def run_stretch(self, ends_s: Sequence[float]) -> None:
        """Run a step for each entry of `ends_s`, the time of its end. There must be as many
        `steady_steps`."""
        count = len(ends_s)
        steps, tokens = range(self._step, self._step + count), [TOKEN] * count
        for request in self._decode.requests:
            seq, record = request.kv, request.record
            assert self.kv.reserve(seq, seq.num_computed + count) is not None
            self.kv.advance(seq, count, steps[-1])
            request.remaining -= count
            request.tokens += tokens
            record.token_s.extend(ends_s)
            record.token_step.extend(steps)
            if seq.num_computed >= seq.register_at:
                self.kv.register(seq, request.tokens)
        self._step += count
        self._committed_step = steps[-1]
        self.kv.commit(steps[-1])
