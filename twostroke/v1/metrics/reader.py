"""The metrics of `LLM.get_metrics`: the series of /metrics as objects, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.samples import Sample


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: float  # an int, except for seconds


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    """A counter of speculative decoding for each position in a draft."""

    values: list[int]


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper limit → number of values up to the limit; the last is +Inf


PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def metric_objects(families: Iterable[Family]) -> list[Metric]:
    """Convert Prometheus families to objects, one for each set of labels."""
    found: list[Metric] = []
    for family in families:
        samples: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
        for sample in family.samples:
            labels = tuple(item for item in sample.labels.items() if item[0] != "le")
            samples.setdefault(labels, []).append(sample)
        if family.name == PER_POSITION:
            found += _vectors(family)
            continue
        for labels, group in samples.items():
            found.append(_metric(family.name, family.type, dict(labels), group))
    return found


def _vectors(family: Family) -> list[Metric]:
    counts: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for sample in family.samples:
        labels = tuple(item for item in sample.labels.items() if item[0] != "position")
        if "position" in sample.labels and not sample.name.endswith("_created"):
            position = int(sample.labels["position"])
            counts.setdefault(labels, {})[position] = int(sample.value)
    return [
        Vector(family.name, dict(labels), [values.get(n, 0) for n in range(max(values) + 1)])
        for labels, values in counts.items()
    ]


def _metric(name: str, metric_type: str, labels: dict[str, str], samples: list[Sample]) -> Metric:
    if metric_type == "histogram":
        ends = {sample.name.removeprefix(name): sample.value for sample in samples}
        buckets = {s.labels["le"]: int(s.value) for s in samples if "le" in s.labels}
        return Histogram(name, labels, int(ends["_count"]), ends["_sum"], buckets)
    if metric_type == "counter":
        value = samples[0].value
        return Counter(name, labels, int(value) if value == int(value) else value)
    return Gauge(name, labels, samples[0].value)
