"""The doctor's verdict: what `twostroke doctor URL --json` prints, and what other commands read.

verdict     healthy, slow_to_start, slow_to_stream, both, not_enough_evidence
causes      why, the largest first, each with figures
ledger      where the time of the requests went; sums to 100%
experiment  the one change to try next on `twostroke serve`, and what it should gain
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from twostroke.errors import ConfigError

SCHEMA = 1
HEALTHY, SLOW_TO_START, SLOW_TO_STREAM = "healthy", "slow_to_start", "slow_to_stream"
BOTH, NOT_ENOUGH = "both", "not_enough_evidence"
VERDICTS = (HEALTHY, SLOW_TO_START, SLOW_TO_STREAM, BOTH, NOT_ENOUGH)

# What each cause is, in a sentence that a stranger understands.
CAUSES = {
    "queueing_behind_prefills": "Requests wait for their turn while long prompts are computed.",
    "prefill_starves_decode": "Streams stand still while the prompts of others are computed.",
    "batch_too_small": "Requests wait for a seat although the machine could run more at one time.",
    "kv_pressure": "The KV cache is full: requests wait for room, or lose theirs to others.",
    "no_prefix_reuse": "Prompts begin alike, and the part they share is computed every time.",
    "tokenizer_or_template": "Template and tokenizer take long before a request reaches the queue.",
    "client_or_network": "Time is lost between the server and whoever reads the answer.",
    "overloaded": "More arrives than the machine can compute: requests wait behind a full batch.",
    "cold_start": "The engine was starting while requests were there.",
    "host_bound_decode": "The device waits for the host between two steps.",
    "slow_interconnect": "Devices wait for each other's parts of a layer.",
}
# Said, and never a reason for another verdict than `healthy`.
NOTES = {
    "output_bound": "Most of the time goes into writing long answers: nothing is wrong with that.",
    "prompt_bound": "Most of the time goes into computing the requests' own prompts.",
    "memory_reserved": "The KV cache is reserved from the start; free room in it is not a leak.",
}


@dataclass(frozen=True, slots=True)
class Cause:
    cause: str  # one of CAUSES
    confidence: float  # 0 to 1
    evidence: tuple[str, ...]  # sentences with figures
    share: float  # of the time before the first token or of that between tokens, the worse of both
    phase: str  # "start", "stream" or "both"
    weight: float = 0.0  # of all the time of the requests: by this the largest comes first


@dataclass(frozen=True, slots=True)
class Experiment:
    """The next change to try. `setting`: flags of `twostroke serve` and their new values; True: a
    flag without a value."""

    name: str
    setting: dict[str, Any]
    metric: str  # "ttft", "tpot" or "itl" (its 99th percentile)
    predicted_ratio: float  # of the metric, after / before
    why: str

    @property
    def options(self) -> str:
        """As words of a command line."""
        words = (f"{flag}" if value is True else f"{flag} {value}" for flag, value in self.items)
        return " ".join(words)

    @property
    def items(self) -> list[tuple[str, Any]]:
        return list(self.setting.items())


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str
    evidence_level: str  # "client only", "/metrics", "step records"
    causes: tuple[Cause, ...] = ()
    ledger: dict[str, float] = field(default_factory=dict)  # part → share of the time; sums to 1
    experiment: Experiment | None = None
    notes: tuple[str, ...] = ()  # sentences: what was seen and is no fault
    not_examined: dict[str, str] = field(default_factory=dict)  # cause → why it could not be judged
    figures: dict[str, Any] = field(default_factory=dict)  # what the rules looked at
    server: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # how long it looked
    requests: int = 0  # that the ledger is made of
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "the verdict") -> Verdict:
        """Raises `ConfigError` for what no doctor has written."""
        try:
            given = json.loads(text)
            if given["schema"] != SCHEMA:
                raise ConfigError(f"{name} has schema {given['schema']}, and {SCHEMA} is read here")
            causes = tuple(Cause(**one) for one in given.pop("causes"))
            experiment = given.pop("experiment")
            found = cls(
                **given,
                causes=causes,
                experiment=None if experiment is None else Experiment(**experiment),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{name} is no verdict; write one with `twostroke doctor URL --json`"
            ) from None
        if found.verdict not in VERDICTS:
            raise ConfigError(f"{name}: there is no verdict {found.verdict!r}")
        return found


def headline(found: Verdict) -> str:
    """The verdict in one sentence."""
    words = {
        HEALTHY: "Healthy",
        SLOW_TO_START: "Slow to start",
        SLOW_TO_STREAM: "Slow to stream",
        BOTH: "Slow to start and slow to stream",
        NOT_ENOUGH: "Not enough evidence",
    }[found.verdict]
    if found.verdict in (HEALTHY, NOT_ENOUGH) or not found.causes:
        return f"{words}."
    return f"{words}: {CAUSES[found.causes[0].cause]}"
