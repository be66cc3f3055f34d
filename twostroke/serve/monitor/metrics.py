"""`/metrics` for Prometheus: the totals of all records (`observe/totals.py`), which `prometheus.py`
names, the counts of HTTP responses, and the GPU's figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.engine.api import EngineClient
from twostroke.observe.recent import Recent
from twostroke.observe.totals import Totals
from twostroke.serve.monitor.gpu import gpu_figures
from twostroke.serve.monitor.prometheus import Families

TOO_MANY = 429
CLIENT_GONE = 499  # nginx's status; no answer was sent


class ServerMetrics:
    """The metrics of one server. Each server of a process has a registry of its own."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.totals = Totals(client.info.max_model_len)
        self.recent = Recent(self.totals, monotonic())
        client.records.listeners += [self.recent, self.totals]  # in this order
        self.registry.register(_Engines(client, self.totals, model_name))
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
        """Create the series of all routes at 0, so that `increase()` counts the first response."""
        for route in routes:
            self._http.labels(route, "200")

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()
        if status == TOO_MANY:
            self._rejected.inc()
        if status >= 400 and status != CLIENT_GONE and not route.startswith("/dash"):
            self.recent.before_change(monotonic())
            self.totals.add_answer(status)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """The series of every engine. `totals`: the totals over all engines."""

    def __init__(self, client: EngineClient, totals: Totals, model_name: str) -> None:
        self._client, self._totals, self._model_name = client, totals, model_name

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for name, engine in self._client.engines_by_name().items():
            families = Families(self._model_name, name)
            for family in families.all(engine, engine.totals or self._totals):
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()
        if self._client.info.device.startswith("cuda"):
            yield from gpu_families(self._client.info.device)


def gpu_families(device: str) -> Iterator[Metric]:
    """Yield the figures of the GPU."""
    figures = gpu_figures(device)
    if figures is None:
        return
    for name, text, value in (
        ("memory_used_bytes", "Memory that all processes use.", figures.memory_used_bytes),
        ("memory_total_bytes", "Memory of the GPU.", figures.memory_total_bytes),
        ("utilisation", "Share of time in which any kernel ran.", figures.utilisation),
        ("power_watts", "Power that the GPU draws.", figures.power_w),
    ):
        if value is not None:
            family = GaugeMetricFamily(f"twostroke:gpu_{name}", text, labels=["gpu"])
            family.add_metric([device.partition(":")[2] or "0"], value)
            yield family
