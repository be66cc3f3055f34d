"""`/metrics` for Prometheus: what the records add up to (`observe/totals.py`), as `families.py`
names it, and what HTTP was answered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.engine.api import EngineClient
from twostroke.observe.totals import Totals
from twostroke.serve.families import Families

log = logging.getLogger(__name__)
TOO_MANY = 429


class Metrics:
    """Owns its registry, so that several servers may live in one process."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.totals = Totals(client.info.max_model_len)
        client.records.listeners.append(self.totals)
        self.registry.register(_Engine(client, self.totals, model_name))
        labels = ("handler", "status")
        self._http = Counter("http_requests", "Answers, by route.", labels, registry=self.registry)
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests that were answered 429, because a queue was full.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejected = rejections.labels(model_name, "max_num_queued_reqs")

    def expect_routes(self, routes: Iterable[str]) -> None:
        """Routes that will be counted: a series that begins at one hides its first answer."""
        for route in routes:
            self._http.labels(route, "200")

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()
        if status == TOO_MANY:
            self._rejected.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    def __init__(self, client: EngineClient, totals: Totals, model_name: str) -> None:
        self._client, self._totals = client, totals
        self._families = Families(model_name)

    def collect(self) -> Iterable[Metric]:
        yield from self._families.all(self._client, self._totals)
        if self._client.info.device.startswith("cuda"):
            yield from gpu_families(self._client.info.device)


@cache
def _nvml() -> Any:
    """`pynvml`, initialised; None if it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        log.info("no figures of the GPU in /metrics: %s", error)
        return None
    return pynvml


def gpu_families(device: str) -> Iterator[Metric]:
    """What the driver says of the GPU."""
    nvml = _nvml()
    if nvml is None:
        return
    index = int(device.partition(":")[2] or 0)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError as error:
        log.info("the driver does not answer for GPU %d: %s", index, error)
        return
    for name, text, value in (
        ("memory_used_bytes", "Memory in use, by all processes.", memory.used),
        ("memory_total_bytes", "Memory there is.", memory.total),
        (
            "utilisation",
            "Share of time in which any kernel ran; not how much of it was used.",
            busy,
        ),
    ):
        family = GaugeMetricFamily(f"twostroke:gpu_{name}", text, labels=["gpu"])
        family.add_metric([str(index)], value)
        yield family
