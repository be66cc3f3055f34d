"""`/metrics` for Prometheus: what the records add up to (`observe/totals.py`), as `families.py`
names it, and what HTTP was answered."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from twostroke.engine.api import EngineClient
from twostroke.observe.totals import Totals
from twostroke.serve.families import Families
from twostroke.serve.gpu import gpu_families


class Metrics:
    """Owns its registry, so that several servers may live in one process."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.totals = Totals(client.info.max_model_len)
        client.records.listeners.append(self.totals)
        self.registry.register(_Engine(client, self.totals, model_name))
        labels = ("handler", "status")
        self._http = Counter("http_requests", "Answers, by route.", labels, registry=self.registry)

    def expect(self, routes: Iterable[str]) -> None:
        """Routes that will be counted: a series that begins at one hides its first answer."""
        for route in routes:
            self._http.labels(route, "200")

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

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
