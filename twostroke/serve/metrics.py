"""`/metrics` for Prometheus, under the names vLLM's dashboards know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.engine.api import EngineClient
from twostroke.serve.parts import Counts


class Metrics:
    """Owns its registry, so that several servers may live in one process."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry.register(_Load(client, model_name))
        names = ("model_name",)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens read.", names)
        self._written = self._counter("vllm:generation_tokens", "Tokens written.", names)
        self._cached = self._counter("vllm:prefix_cache_hits", "Prompt tokens not computed.", names)
        reasons = (*names, "finished_reason")
        self._success = self._counter("vllm:request_success", "Finished sequences.", reasons)
        self._http = self._counter("http_requests", "Answers, by route.", ("handler", "status"))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def finished(self, counts: Counts, reasons: Sequence[str]) -> None:
        self._prompt.labels(self._model).inc(counts.prompt)
        self._written.labels(self._model).inc(counts.completion)
        self._cached.labels(self._model).inc(counts.cached)
        for reason in reasons:
            self._success.labels(self._model, reason).inc()

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Load(Collector):
    """What the engine says of itself at the moment of asking."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        load = self._client.load()
        kv = load.kv
        taken = (kv.used + kv.fragmented) / kv.reserved if kv.reserved else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batch.", load.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a place.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", taken),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
