"""`ModelChoice`: decides before each step whether the draft model runs, and for which rows.

Drafting takes time. So the expected rate of a step with k tokens of the draft model is compared
with the rate of the best offers of the drafters that search texts:

    rate(k) = (rows + expected accepted tokens) / (k · draft step + step with the drafted tokens)

k = 0 is the step without the draft model: the model does not run, and falls behind the text. A row
that is behind is caught up in chunks, each as long as `CATCH_UP_STEPS` steps, if the drafts are
expected to save more time while the request writes the rest of its text. The counts of the model's
drafts become outdated while it does not run. So now and then the model drafts for one row as a
probe; probes may take `PROBE_SHARE` of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from twostroke.draft.depth import MIN_GAIN
from twostroke.draft.interface import DraftModel, DraftOffer, DraftRow
from twostroke.draft.survival import Counts, Survival

KNOWN_PRIOR = 0.7  # of a drafted token, before it is drafted
MAX_CURRENT = 2  # backlog of a row that is not behind: tokens after a draft accepted in whole
CATCH_UP_STEPS = 2.0  # the longest chunk of a row that is behind, in times of a step
FIRST_OUTPUTS = 256.0  # tokens that a request is expected to write, until a request has ended
SMOOTHING = 0.1  # of the mean output
PROBE_SHARE = 0.01  # of the time since the model ran
PROBE_STEPS, PROBE_TOKENS = 8, 4

Seconds = Callable[[int], float | None]


class DraftCandidate(NamedTuple):
    """A row of the next step, and the offer that it has without the draft model."""

    request_id: str
    state: Any  # of the draft model; None: the model does not draft for the row
    max_tokens: int  # that may be drafted
    remaining: int  # tokens that the request may write
    counts: Counts
    host: Sequence[float] = ()  # survival of the offer's tokens that would be verified


class ModelRow(NamedTuple):
    """Expectations for one row: the survival of each token that the model would draft, and the
    tokens of the offer without the model, with the sum of their survival."""

    survival: Sequence[float]
    host_depth: int = 0
    host_tokens: float = 0.0


class ModelDepth(NamedTuple):
    """The best depth, and the rows for which the model drafts. Depth 0: the model does not run."""

    depth: int = 0
    rows: tuple[int, ...] = ()
    rate: float = 0.0  # tokens a second
    base_rate: float = 0.0  # without the model
    min_survival: float = 0.0  # above this, another drafted token is worth its time


def choose_model_depth(
    rows: Sequence[ModelRow],
    num_rows: int,
    seconds: Seconds,
    draft_s: Callable[[Sequence[int]], float],
    max_tokens: int,
) -> ModelDepth:
    """Return the depth with the highest rate. `num_rows`: decode rows of the step. `seconds(n)`:
    the expected time of the step with n drafted tokens. `draft_s(rows)`: the expected time of
    drafting one token for each of these rows."""
    host_depth = sum(row.host_depth for row in rows)
    alone_s = seconds(host_depth)
    if alone_s is None:
        return ModelDepth()
    base_rate = (num_rows + sum(row.host_tokens for row in rows)) / alone_s
    best = ModelDepth(rate=base_rate * (1 + MIN_GAIN), base_rate=base_rate)
    expected = [0.0] * len(rows)
    for depth in range(1, max((len(row.survival) for row in rows), default=0) + 1):
        chosen, tokens, verified = [], 0.0, 0
        for n, row in enumerate(rows):
            if depth <= len(row.survival):
                expected[n] += row.survival[depth - 1]
            if expected[n] > row.host_tokens:
                chosen.append(n)
                tokens += expected[n]
                verified += min(depth, len(row.survival))
            else:
                tokens += row.host_tokens
                verified += row.host_depth
        if not chosen or verified > max_tokens:
            continue
        step_s, before_s = seconds(verified), seconds(max(0, verified - len(chosen)))
        if step_s is None or before_s is None:
            break
        each_s = draft_s(chosen)
        rate = (num_rows + tokens) / (step_s + depth * each_s)
        if rate > best.rate:
            cost_s = (each_s + step_s - before_s) / len(chosen)
            best = ModelDepth(depth, tuple(chosen), rate, base_rate, rate * cost_s)
    return best if best.depth else ModelDepth(base_rate=base_rate)


class ModelChoice:
    def __init__(self, model: DraftModel, survival: Survival, adaptive: bool) -> None:
        """`adaptive` False: the model drafts for every row without another offer."""
        self.model = model
        self._survival, self._adaptive = survival, adaptive
        self._mean_output = FIRST_OUTPUTS
        self._idle_s = 0.0  # time of the steps since the model ran
        self._probed = ""  # the request of the probe under way
        self._probe_steps = 0  # steps that are left of the probe

    def note_end(self, num_outputs: int) -> None:
        """Update the mean number of output tokens with an ended request."""
        self._mean_output += SMOOTHING * (num_outputs - self._mean_output)

    def offers(
        self, candidates: Sequence[DraftCandidate], num_rows: int, seconds: Seconds, max_tokens: int
    ) -> dict[str, DraftOffer]:
        """Run the model if it is worth its time. Return its offers by request."""
        model = self.model
        able = [
            n
            for n, one in enumerate(candidates)
            if one.state is not None and model.backlog(one.state) is not None
        ]
        alone_s = seconds(0)
        if not self._adaptive:
            chosen = [candidates[n] for n in able if not candidates[n].host]
            return self._propose([(one, DraftRow(one.state, one.max_tokens)) for one in chosen])
        if alone_s is None or not able:
            return {}
        best = self._depth(candidates, able, num_rows, seconds, max_tokens)
        if best.depth:
            self._idle_s, self._probed = 0.0, ""
            saved_s = num_rows * (1 / best.base_rate - 1 / best.rate) / len(best.rows)
            ready = self._catch_up(candidates, best.rows, CATCH_UP_STEPS * alone_s, saved_s)
            if len(ready) < len(best.rows):
                best = self._depth(candidates, ready, num_rows, seconds, max_tokens)
            chosen = [candidates[n] for n in best.rows]
            return self._propose([(one, self._row(one, best.min_survival)) for one in chosen])
        self._idle_s += alone_s
        ready = self._catch_up(
            candidates, self._probe(candidates, able), CATCH_UP_STEPS * alone_s, None
        )
        if not ready:
            return {}
        self._probe_steps -= 1
        if not self._probe_steps:
            self._probed, self._idle_s = "", 0.0
        chosen = [candidates[n] for n in ready]
        return self._propose(
            [(one, DraftRow(one.state, min(PROBE_TOKENS, one.max_tokens))) for one in chosen]
        )

    def _depth(
        self,
        candidates: Sequence[DraftCandidate],
        able: Sequence[int],
        num_rows: int,
        seconds: Seconds,
        max_tokens: int,
    ) -> ModelDepth:
        rows = [ModelRow((), len(one.host), sum(one.host)) for one in candidates]
        for n in able:
            one = candidates[n]
            keys = self.model.known_keys(one.state, one.max_tokens)
            priors = (KNOWN_PRIOR,) * len(keys)
            expected = self._survival.of_offer(keys, priors, one.counts)
            rows[n] = rows[n]._replace(survival=expected)
        return choose_model_depth(
            rows,
            num_rows,
            seconds,
            lambda chosen: self.model.step_s([candidates[n].state for n in chosen]),
            max_tokens,
        )

    def _catch_up(
        self,
        candidates: Sequence[DraftCandidate],
        wanted: Sequence[int],
        limit_s: float,
        saved_s: float | None,
    ) -> list[int]:
        """Return the rows that are ready to draft. Compute a part of the backlog of the others, in
        `limit_s` at most. `saved_s`: the expected gain for each token that the row writes; None:
        catch up in any case."""
        ready, chunks = [], []
        for n in wanted:
            one = candidates[n]
            backlog = self.model.backlog(one.state) or 0
            if backlog > MAX_CURRENT:
                cost_s = self.model.catch_up_s(one.state)
                left = min(float(one.remaining), self._mean_output)
                if saved_s is not None and cost_s > left * saved_s:
                    continue
                size = self.model.max_chunk(one.state, limit_s) if limit_s > 0.0 else 0
                if size < backlog:
                    if size:
                        chunks.append((one.state, size))
                    limit_s = 0.0
                    continue
                limit_s -= cost_s
            ready.append(n)
        if chunks:
            self.model.catch_up(chunks)
        return ready

    def _probe(self, candidates: Sequence[DraftCandidate], able: Sequence[int]) -> list[int]:
        """Return the row of the probe under way, or of a new probe if one is due."""
        probed = [n for n in able if candidates[n].request_id == self._probed]
        if not probed and self._probed:  # the request of the probe has ended
            self._probed, self._idle_s = "", 0.0
        if probed:
            return probed
        costs = {n: self.model.catch_up_s(candidates[n].state) for n in able}
        cheapest = min(costs, key=lambda n: costs[n])
        one = candidates[cheapest]
        drafting_s = PROBE_STEPS * PROBE_TOKENS * self.model.step_s([one.state])
        if costs[cheapest] + drafting_s > PROBE_SHARE * self._idle_s:
            return []
        self._probed, self._probe_steps = one.request_id, PROBE_STEPS
        return [cheapest]

    def _row(self, one: DraftCandidate, min_survival: float) -> DraftRow:
        def goes_on(offer: DraftOffer) -> bool:
            survives = self._survival.of_offer(offer.keys, offer.priors, one.counts)
            (*_, key) = self.model.known_keys(one.state, len(offer.tokens) + 1)
            next_rate = self._survival.rate(key, KNOWN_PRIOR, one.counts)
            return survives[-1] * next_rate >= min_survival

        return DraftRow(one.state, one.max_tokens, goes_on)

    def _propose(self, rows: Sequence[tuple[DraftCandidate, DraftRow]]) -> dict[str, DraftOffer]:
        if not rows:
            return {}
        offers = self.model.propose([row for _, row in rows])
        found = zip(rows, offers, strict=True)
        return {one.request_id: offer for (one, _), offer in found if offer is not None}
