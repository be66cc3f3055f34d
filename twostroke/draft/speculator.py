"""`Speculator`: the drafts of each step, from all drafters; the scheduler owns it.

    begin(request) ─▶ drafts(rows), before each step ─▶ end(request)
                      the best offer of each row, cut to its depth

The drafters that search texts make their offers first. A draft model then runs for the rows where
its drafts are worth the time (`model_choice.py`).

The offers of all drafters are kept until the text shows whether they were right (`survival.py`).
Deterministic: the same texts and step times give the same drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from twostroke.draft.depth import choose_depths
from twostroke.draft.drafters import NgramDrafter, PredictedDrafter, SuffixDrafter
from twostroke.draft.interface import Drafter, DraftModel, DraftOffer, DraftRow, Text
from twostroke.draft.model_choice import DraftCandidate, ModelChoice
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.draft.survival import Counts, Survival
from twostroke.draft.token_index import IndexBudget
from twostroke.observe.record import RequestRecord

MAX_STEP_DRAFTS = 256  # drafted tokens of all rows in a step
MAX_STEP_INDEXED = 2048  # tokens that the drafters' indexes add in a step, some 5 ms
# The cost of drafted tokens is learnt from steps with drafts. If no draft was expected to save time
# in PROBE_EVERY steps, a likely draft of at most PROBE_TOKENS is verified to measure the cost.
PROBE_EVERY = 256
PROBE_TOKENS = 4
PROBE_SURVIVAL = 0.5  # minimum survival of each token of a probe


class DraftRules(Protocol):
    """Rules that restrict the drafts of some requests: grammars, and reasoning that is followed."""

    def allows_drafts(self, request_id: str) -> bool: ...

    def limit_drafts(self, request_id: str, drafts: Sequence[int]) -> int:
        """Return how many of these drafted tokens may be verified."""
        ...


class Drafted(NamedTuple):
    """The draft of one row in a step."""

    drafter: str
    tokens: tuple[int, ...]


class StepDrafts(NamedTuple):
    """The drafts of a step by request, with the expected tokens and gain."""

    by_request: dict[str, Drafted]
    offers: int = 0  # rows with an offer
    expected: float = 0.0  # drafted tokens that are expected to become text
    gain: float = 0.0  # expected rate of tokens over the rate without drafts, minus 1
    model_s: float = 0.0  # time that the draft model ran

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
    """A request, its drafters' states, and its counts."""

    text: Text
    states: dict[str, Any]  # by the name of the drafter
    # By the name of the drafter: an offer not yet compared with the text, and where it begins.
    waiting: dict[str, tuple[int, DraftOffer]] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)


@dataclass(slots=True)
class _Offered:
    """A row of a step with its best offer so far."""

    request_id: str
    followed: _Followed
    remaining: int  # tokens that the request may write
    max_tokens: int  # that may be drafted
    offer: DraftOffer | None = None
    survival: list[float] = field(default_factory=list)


class Speculator:
    def __init__(self, config: SpeculationConfig, model: DraftModel | None = None) -> None:
        """`model`: the draft model, if there is one."""
        self.config = config
        self.survival = Survival()
        self._budget = IndexBudget(MAX_STEP_INDEXED)
        self.drafters = make_drafters(config, self._budget)
        self.model = model
        self._choice = None
        if model is not None:
            self._choice = ModelChoice(model, self.survival, config.adaptive)
        self._followed: dict[str, _Followed] = {}
        self._steps_without = 0  # steps in a row with offers and no drafts

    def __len__(self) -> int:
        return len(self._followed)

    @property
    def _all_drafters(self) -> list[Drafter]:
        return self.drafters if self.model is None else [*self.drafters, self.model]

    def begin(self, request_id: str, text: Text) -> None:
        opened = ((drafter.name, drafter.open(text)) for drafter in self._all_drafters)
        states = {name: state for name, state in opened if state is not None}
        self._followed[request_id] = _Followed(text, states)

    def pause(self, request_id: str) -> None:
        """Free the draft model's memory of a preempted request, which may wait for long."""
        if self.model is not None and request_id in self._followed:
            self.model.pause(self._followed[request_id].text)

    def end(self, request_id: str) -> None:
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            self._compare(followed)
            text = followed.text
            if self._choice is not None:
                self._choice.note_end(len(text.tokens) - text.num_prompt)
            for drafter in self._all_drafters:
                drafter.close(text)

    def reset_prefixes(self) -> None:
        if self.model is not None:
            self.model.reset_prefixes()

    def audit(self) -> None:
        if self.model is not None:
            self.model.audit()

    def drafts(
        self,
        rows: Sequence[Row],
        num_rows: int,
        seconds: Callable[[int], float | None],
        max_tokens: int = MAX_STEP_DRAFTS,
        rules: DraftRules | None = None,
    ) -> StepDrafts:
        """Return the drafts of the next step. `rows`: the rows that may have drafts. `num_rows`:
        all decode rows of the step. `seconds(n)`: the expected time of the step with n drafted
        tokens. `max_tokens`: maximum of drafted tokens in all rows."""
        self._budget.renew()
        max_tokens = min(max_tokens, MAX_STEP_DRAFTS)
        offered = []
        for request_id, limit in rows:
            if rules is None or rules.allows_drafts(request_id):
                followed = self._followed[request_id]
                self._compare(followed)
                depth = min(limit, self.config.max_depth)
                offered.append(_Offered(request_id, followed, limit, depth))
        for drafter in self.drafters:
            asked = [row for row in offered if drafter.name in row.followed.states]
            drafted = drafter.propose(
                [DraftRow(row.followed.states[drafter.name], row.max_tokens) for row in asked]
            )
            for row, offer in zip(asked, drafted, strict=True):
                self._consider(row, offer, rules)
        model_s = 0.0
        if self.model is not None and self._choice is not None and offered:
            self._draft_with_model(self._choice, offered, num_rows, seconds, max_tokens, rules)
            model_s = self.model.take_seconds()
        found = [row for row in offered if row.survival]
        if not found:
            return NO_DRAFTS._replace(model_s=model_s)
        survivals = [row.survival for row in found]
        expected = gain = 0.0
        if self.config.adaptive:
            depths, expected, gain = choose_depths(
                survivals, num_rows, seconds, max_tokens, self.config.min_depth, model_s
            )
            self._steps_without = 0 if any(depths) else self._steps_without + 1
            if self._steps_without >= PROBE_EVERY and seconds(0) is not None:
                depths, expected = self._probe(survivals, max_tokens)
        else:
            depths = []
            for survival in survivals:
                depth = min(len(survival), max_tokens)
                max_tokens -= depth
                depths.append(depth)
                expected += sum(survival[:depth])
        by_request = {
            row.request_id: Drafted(row.offer.drafter, row.offer.tokens[:depth])
            for row, depth in zip(found, depths, strict=True)
            if depth and row.offer is not None
        }
        return StepDrafts(by_request, len(found), expected, gain, model_s)

    def _consider(self, row: _Offered, offer: DraftOffer | None, rules: DraftRules | None) -> None:
        """Replace the best offer of a row if more tokens of the new offer are expected to become
        text."""
        if offer is None:
            return
        followed = row.followed
        followed.waiting.setdefault(offer.drafter, (len(followed.text.tokens), offer))
        survival = self.survival.of_offer(offer.keys, offer.priors, followed.counts)
        if sum(survival) <= sum(row.survival):
            return
        if rules is not None:
            survival = survival[: rules.limit_drafts(row.request_id, offer.tokens)]
        if sum(survival) > sum(row.survival):
            row.offer, row.survival = offer, survival

    def _draft_with_model(
        self,
        choice: ModelChoice,
        offered: Sequence[_Offered],
        num_rows: int,
        seconds: Callable[[int], float | None],
        max_tokens: int,
        rules: DraftRules | None,
    ) -> None:
        """Consider the offers of the draft model for the rows where they are worth the time."""
        depths = [len(row.survival) for row in offered]
        if self.config.adaptive:
            survivals = [row.survival for row in offered]
            depths = choose_depths(
                survivals, num_rows, seconds, max_tokens, self.config.min_depth
            ).depths
        candidates = [
            DraftCandidate(
                row.request_id,
                row.followed.states.get(choice.model.name),
                row.max_tokens,
                row.remaining,
                row.followed.counts,
                row.survival[:depth],
            )
            for row, depth in zip(offered, depths, strict=True)
        ]
        found = choice.offers(candidates, num_rows, seconds, max_tokens)
        for row in offered:
            self._consider(row, found.get(row.request_id), rules)

    def _probe(self, survivals: list[list[float]], max_tokens: int) -> tuple[list[int], float]:
        """Return the depths of a step that measures the cost of drafts, and the expected tokens."""
        best = max(range(len(survivals)), key=lambda n: sum(survivals[n]))
        likely = [one for one in survivals[best] if one >= PROBE_SURVIVAL]
        likely = likely[: min(PROBE_TOKENS, max_tokens)]
        if likely:
            self._steps_without = 0
        return [len(likely) if n == best else 0 for n in range(len(survivals))], sum(likely)

    def _compare(self, followed: _Followed) -> None:
        """Count the tokens of earlier offers that the text has reached. An offer that agrees with
        the text so far, and continues beyond its end, stays in `waiting`."""
        tokens = followed.text.tokens
        for name, (start, offer) in list(followed.waiting.items()):
            written = tokens[start : start + len(offer.tokens)]
            same = 0
            while same < len(written) and written[same] == offer.tokens[same]:
                same += 1
            if same == len(written) < len(offer.tokens):
                continue
            del followed.waiting[name]
            for keys in (offer.keys, offer.known_keys):
                for n, key in enumerate(keys[: same + 1]):
                    self.survival.add(key, n < same, followed.counts)


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
