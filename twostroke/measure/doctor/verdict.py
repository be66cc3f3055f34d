"""The doctor's verdict, which `twostroke doctor URL --json` prints and `twostroke ab` reads.

verdict     healthy, slow_to_start, slow_to_stream, both, not_enough_evidence
causes      the causes with their evidence, the largest first
ledger      the share of each part of the requests' time; the sum is 1
experiment  the next change to try on `twostroke serve`, with its predicted gain
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

# Cause → its description in a report.
CAUSES = {
    "queueing_behind_prefills": "Requests wait in the queue while long prompts are computed.",
    "prefill_starves_decode": "Streams stall while the prompts of other requests are computed.",
    "batch_too_small": "Requests wait although the device could run a larger batch.",
    "kv_pressure": "The KV cache is full: requests wait for blocks or are preempted.",
    "no_prefix_reuse": "Prompts share a prefix that is computed again for every request.",
    "tokenizer_or_template": "The chat template or the tokenizer delays requests before the queue.",
    "client_or_network": "Time is lost between the server and the client.",
    "overloaded": "The server is overloaded: requests wait behind a full batch.",
    "cold_start": "The engine was starting while requests arrived.",
    "host_bound_decode": "The device waits for the host between steps.",
    "cpu_taken": "Other programs or a quota take the server's processor time.",
    "clock_throttled": "The processor runs below its clock.",
    "memory_swapped": "Memory of the server is in swap or comes from disk.",
    "gpu_shared": "Other processes compute on the server's GPU.",
    "gpu_unused": "The model runs on the CPU although the machine has a GPU.",
    "slow_kernels": "The kernels do not use the instructions that the CPU has.",
    "dense_weights": "Decode reads weights of 16 or 32 bits where a quantised file would do.",
    "slow_computing": "The same steps take longer than they did in the server's best time.",
    "slow_interconnect": "Devices wait for the results of other devices.",
}
# Causes in the machine. They come before other causes, because they slow everything down.
OF_MACHINE = (
    "cpu_taken",
    "clock_throttled",
    "memory_swapped",
    "gpu_shared",
    "gpu_unused",
    "slow_kernels",
    "slow_computing",
)
# Notes do not change the verdict.
NOTES = {
    "output_bound": "Most of the time goes into long answers, which is not a fault.",
    "prompt_bound": "Most of the time goes into the requests' own prompts, which is not a fault.",
    "memory_reserved": "The KV cache is reserved at the start; its free memory is not a leak.",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of slowness with its evidence."""

    cause: str  # one of CAUSES
    confidence: float  # 0 to 1
    evidence: tuple[str, ...]  # sentences with figures
    share: float  # share of the time to the first token or between tokens, the larger of both
    phase: str  # "start", "stream" or "both"
    weight: float = 0.0  # share of the total time of the requests, which orders the causes


@dataclass(frozen=True, slots=True)
class ProposedExperiment:
    """The next change to try. `setting` maps flags of `twostroke serve` to values; True means a
    flag without a value."""

    name: str
    setting: dict[str, Any]
    metric: str  # "ttft", "tpot" or "itl" (its 99th percentile)
    predicted_ratio: float  # of the metric, after / before
    why: str

    @property
    def options(self) -> str:
        """The setting as options of a command line."""
        return " ".join(
            flag if value is True else f"{flag} {value}" for flag, value in self.setting.items()
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a diagnosis."""

    verdict: str
    evidence_level: str  # "client only", "/metrics", "step records"
    causes: tuple[Cause, ...] = ()
    ledger: dict[str, float] = field(default_factory=dict)  # part → share of the time; sums to 1
    experiment: ProposedExperiment | None = None
    notes: tuple[str, ...] = ()  # sentences about observations that are not faults
    not_examined: dict[str, str] = field(default_factory=dict)  # cause → the reason
    figures: dict[str, Any] = field(default_factory=dict)  # the inputs of the rules
    server: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # length of the watch
    requests: int = 0  # number of requests in the ledger
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "the verdict") -> Verdict:
        """Read a verdict. Raise `ConfigError` for any other file."""
        try:
            fields = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ConfigError(
                    f"{name} has schema {fields['schema']}; only {SCHEMA} is supported"
                )
            causes = tuple(Cause(**one) for one in fields.pop("causes"))
            experiment = fields.pop("experiment")
            found = cls(
                **fields,
                causes=causes,
                experiment=None if experiment is None else ProposedExperiment(**experiment),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{name} is not a verdict; write a verdict with `twostroke doctor URL --json`"
            ) from None
        if found.verdict not in VERDICTS:
            raise ConfigError(f"{name}: unknown verdict {found.verdict!r}")
        return found


def headline(found: Verdict) -> str:
    """Return the verdict in one sentence."""
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
