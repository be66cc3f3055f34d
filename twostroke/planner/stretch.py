"""`SteadyScheduler`: the product's scheduler, which can also run a stretch of equal steps at once.

Most steps of a simulation only decode, for the same requests as the step before. Until a request
ends or arrives, the scheduler would plan the same slots again. A stretch gives the same tokens,
times and blocks as these steps. Only the pacing learns nothing from a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.sched.scheduler import Scheduler

TOKEN = 7  # the id of every sampled token


class SteadyScheduler(Scheduler):
    """A scheduler for simulations."""

    def steady_steps(self) -> int:
        """Return how many of the next steps give a slot to each running request and end none."""
        if self.in_flight or self._retired or not self._plain:
            return 0
        kv, requests = self.kv, self._decode.requests
        steps = min((request.remaining for request in requests), default=0) - 1
        short = 0
        for request in requests:
            short += max(
                0, -(-(request.kv.num_computed + steps - request.kv.capacity) // kv.block_size)
            )
        return steps if all(short <= pool.num_available for pool in kv.pools) else 0

    def will_be_steady(self) -> bool:
        """Return True if the steps after the one in flight can be a stretch of at least two, and
        the one in flight ends no request."""
        requests = self._decode.requests
        return self._plain and bool(requests) and min(one.remaining for one in requests) > 3

    @property
    def _plain(self) -> bool:
        """Return True if there is only decode work, without features that a stretch leaves out."""
        kv = self.kv
        special = kv.eviction is not None or any(kv.windows) or self.speculator is not None
        return not (special or self._prefill.has_work or self.received.has_work)

    @property
    def positions(self) -> int:
        """The number of positions that the slots of the next step attend to."""
        return sum(request.kv.num_computed + 1 for request in self._decode.requests)

    def run_stretch(self, ends_s: Sequence[float]) -> None:
        """Run a step for each entry of `ends_s`, which is the time of its end. `steady_steps` must
        allow this number of steps."""
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
