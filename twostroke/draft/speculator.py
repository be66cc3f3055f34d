"""`Speculator`: the drafts of each step, from all drafters; the scheduler owns it.

    begin(request) ─▶ drafts(rows), before each step ─▶ end(request)
                      the best offer of each row, cut to its depth

The offers of all drafters are remembered until the text shows whether they were right
(`survival.py`). Deterministic: the same texts and step times give the same drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.draft.depth import choose_depths
from twostroke.draft.drafters import (
    Drafter,
    DraftOffer,
    DraftState,
    NgramDrafter,
    PredictedDrafter,
    SuffixDrafter,
    Text,
)
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.draft.survival import Counts, Survival
from twostroke.draft.token_index import IndexBudget
from twostroke.observe.record import RequestRecord

MAX_STEP_DRAFTS = 256  # drafted tokens of all rows in a step
MAX_STEP_INDEXED = 2048  # tokens that the drafters' indexes add in a step, some 5 ms
# The cost of drafted tokens is learnt from steps that have some. If no draft was expected to pay
# for itself in this many steps, a likely draft of a few tokens is verified to measure the cost.
PROBE_EVERY = 256
PROBE_TOKENS = 4
PROBE_SURVIVAL = 0.5  # of each token of such a draft
LimitDrafts = Callable[[str, Sequence[int]], int]


class Drafted(NamedTuple):
    """The draft of one row in a step."""

    drafter: str
    tokens: tuple[int, ...]


class StepDrafts(NamedTuple):
    """The drafts of a step by request, and what was expected of them."""

    by_request: dict[str, Drafted]
    offers: int = 0  # rows with an offer
    expected: float = 0.0  # drafted tokens that are expected to become text
    gain: float = 0.0  # expected rate of tokens over the rate without drafts, minus 1

    def note(self, record: RequestRecord, drafted: int, accepted: int) -> None:
        """Count the outcome of a request's draft in its record."""
        record.drafted += drafted
        record.accepted += accepted
        found = self.by_request.get(record.request_id)
        if found is not None and found.drafter == PredictedDrafter.name:
            record.predicted += drafted
            record.predicted_accepted += accepted


NO_DRAFTS = StepDrafts({})


class Row(NamedTuple):
    """A row of the next step that may have drafts."""

    request_id: str
    max_tokens: int


@dataclass(slots=True)
class _Followed:
    """One request."""

    text: Text
    states: list[tuple[str, DraftState]]
    waiting: dict[str, tuple[int, DraftOffer]] = field(
        default_factory=dict
    )  # offers not yet compared
    counts: Counts = field(default_factory=dict)


class Speculator:
    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.survival = Survival()
        self._budget = IndexBudget(MAX_STEP_INDEXED)
        self.drafters = make_drafters(config, self._budget)
        self._followed: dict[str, _Followed] = {}
        self._steps_without = 0  # steps in a row with offers and no drafts

    def __len__(self) -> int:
        return len(self._followed)

    def begin(self, request_id: str, text: Text) -> None:
        opened = ((drafter.name, drafter.open(text)) for drafter in self.drafters)
        states = [(name, state) for name, state in opened if state is not None]
        self._followed[request_id] = _Followed(text, states)

    def end(self, request_id: str) -> None:
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._compare(followed)
            for drafter in self.drafters:
                drafter.close(followed.text)

    def drafts(
        self,
        rows: Sequence[Row],
        num_rows: int,
        seconds: Callable[[int], float | None],
        max_tokens: int = MAX_STEP_DRAFTS,
        limit_drafts: LimitDrafts | None = None,
    ) -> StepDrafts:
        """Return the drafts of the next step. `rows`: those that may have drafts, of `num_rows` in
        the step. `seconds(n)`: the expected time of the step with n drafted tokens. `max_tokens`:
        of all rows."""
        self._budget.renew()
        found: list[tuple[str, DraftOffer]] = []
        survivals: list[list[float]] = []
        for request_id, limit in rows:
            offer, survival = self._best_offer(self._followed[request_id], limit)
            if offer is not None and limit_drafts is not None:
                survival = survival[: limit_drafts(request_id, offer.tokens)]
            if offer is not None and survival:
                found.append((request_id, offer))
                survivals.append(survival)
        if not found:
            return NO_DRAFTS
        max_tokens = min(max_tokens, MAX_STEP_DRAFTS)
        if self.config.adaptive:
            chosen = choose_depths(survivals, num_rows, seconds, max_tokens, self.config.min_depth)
            depths, expected, gain = chosen
            self._steps_without = 0 if any(depths) else self._steps_without + 1
            if self._steps_without >= PROBE_EVERY and seconds(0) is not None:
                depths, expected = self._probe(survivals, max_tokens)
        else:
            depths, expected, gain = [], 0.0, 0.0
            for survival in survivals:
                depth = min(len(survival), max_tokens)
                max_tokens -= depth
                depths.append(depth)
                expected += sum(survival[:depth])
        by_request = {
            request_id: Drafted(offer.drafter, offer.tokens[:depth])
            for (request_id, offer), depth in zip(found, depths, strict=True)
            if depth
        }
        return StepDrafts(by_request, len(found), expected, gain)

    def _probe(self, survivals: list[list[float]], max_tokens: int) -> tuple[list[int], float]:
        """Return the depths of a step that measures the cost of drafts, and the expected tokens."""
        best = max(range(len(survivals)), key=lambda n: sum(survivals[n]))
        likely = [one for one in survivals[best] if one >= PROBE_SURVIVAL]
        likely = likely[: min(PROBE_TOKENS, max_tokens)]
        if likely:
            self._steps_without = 0
        return [len(likely) if n == best else 0 for n in range(len(survivals))], sum(likely)

    def _best_offer(self, followed: _Followed, limit: int) -> tuple[DraftOffer | None, list[float]]:
        """Return the offer with the most tokens that are expected to become text."""
        self._compare(followed)
        best: DraftOffer | None = None
        best_survival: list[float] = []
        most, known = 0.0, len(followed.text.tokens)
        limit = min(limit, self.config.max_depth)
        for name, state in followed.states:
            offer = state.propose(limit)
            if offer is None:
                continue
            followed.waiting.setdefault(name, (known, offer))
            survival = self.survival.of_offer(offer.keys, offer.priors, followed.counts)
            if sum(survival) > most:
                best, best_survival, most = offer, survival, sum(survival)
        return best, best_survival

    def _compare(self, followed: _Followed) -> None:
        """Count the tokens of earlier offers that the text has reached. An offer whose end the text
        has not reached waits."""
        tokens = followed.text.tokens
        for name, (start, offer) in list(followed.waiting.items()):
            written = tokens[start : start + len(offer.tokens)]
            same = 0
            while same < len(written) and written[same] == offer.tokens[same]:
                same += 1
            if same == len(written) < len(offer.tokens):
                continue
            del followed.waiting[name]
            for n in range(min(same + 1, len(offer.tokens))):
                self.survival.add(offer.keys[n], n < same, followed.counts)


def make_drafters(config: SpeculationConfig, budget: IndexBudget) -> list[Drafter]:
    drafters: list[Drafter] = [PredictedDrafter(budget)]
    if "suffix" in config.methods:
        drafters.append(
            SuffixDrafter(
                config.suffix_depth,
                config.suffix_factor,
                config.suffix_min_prob,
                config.suffix_requests,
                budget=budget,
            )
        )
    if "ngram" in config.methods:
        drafters.append(NgramDrafter(config.ngram_min, config.ngram_max, budget))
    return drafters
