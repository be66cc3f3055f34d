"""`LLM.get_metrics`: the series of /metrics as objects, under vLLM's names."""

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
    value: float  # an int, except of seconds


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    """vLLM has one for speculative decoding; there is none here yet."""

    values: list[int]


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper limit → values up to it; the last is +Inf


def metric_objects(families: Iterable[Family]) -> list[Metric]:
    """Prometheus' families as one object for each set of labels."""
    found: list[Metric] = []
    for family in families:
        samples: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
        for sample in family.samples:
            labels = tuple(item for item in sample.labels.items() if item[0] != "le")
            samples.setdefault(labels, []).append(sample)
        for labels, group in samples.items():
            found.append(_one(family.name, family.type, dict(labels), group))
    return found


def _one(name: str, kind: str, labels: dict[str, str], samples: list[Sample]) -> Metric:
    if kind == "histogram":
        ends = {sample.name.removeprefix(name): sample.value for sample in samples}
        buckets = {s.labels["le"]: int(s.value) for s in samples if "le" in s.labels}
        return Histogram(name, labels, int(ends["_count"]), ends["_sum"], buckets)
    if kind == "counter":
        value = samples[0].value
        return Counter(name, labels, int(value) if value == int(value) else value)
    return Gauge(name, labels, samples[0].value)
