"""Reads `/metrics` of vLLM, SGLang, llama-server or twostroke, and identifies the server."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from twostroke.measure.load.http_client import Connections, ServerError

# The names of each figure in the metrics of different servers, the most precise first.
NAMES = {
    "prefix_hits": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "prompt_tokens": (
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
        "llamacpp:prompt_tokens_total",
    ),
    "output_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum", "llamacpp:prompt_seconds_total"),
    "decode_s": (
        "vllm:request_decode_time_seconds_sum",
        "llamacpp:tokens_predicted_seconds_total",
    ),
    "queue_s": ("vllm:request_queue_time_seconds_sum", "sglang:queue_time_seconds_sum"),
    "ttft_s": (
        "vllm:time_to_first_token_seconds_sum",
        "sglang:time_to_first_token_seconds_sum",
    ),
    "requests": (
        "vllm:time_to_first_token_seconds_count",
        "sglang:time_to_first_token_seconds_count",
    ),
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
    ),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    "preemptions": ("vllm:num_preemptions_total",),
}


class MetricsScrape:
    """One scrape of /metrics, summed over the labels of each series and of each bucket."""

    def __init__(self, text: str) -> None:
        self.series: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {}  # by name, then by upper bound
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.series[sample.name] = self.series.get(sample.name, 0.0) + sample.value
                if sample.name.endswith("_bucket") and "le" in sample.labels:
                    bound = float(sample.labels["le"])
                    counts = self.buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                    counts[bound] = counts.get(bound, 0.0) + sample.value

    def get(self, figure: str) -> float | None:
        """Return a figure of `NAMES`, or None if the server does not export the figure."""
        for name in NAMES[figure]:
            if name in self.series:
                return self.series[name]
        return None


async def scrape(connections: Connections) -> MetricsScrape | None:
    """Scrape /metrics. Return None if the server has no readable /metrics."""
    try:
        text = await connections.fetch("/metrics", timeout_s=10.0)
        return MetricsScrape(text.decode(errors="replace"))
    except (ServerError, ValueError):
        return None


async def identify(connections: Connections) -> dict[str, Any]:
    """Return the URL, the kind and the version of the server, as far as they are known."""
    metrics = await scrape(connections)
    names = " ".join(metrics.series) if metrics is not None else ""
    kind = "unknown"
    for prefix, name in (
        ("twostroke:", "twostroke"),
        ("sglang:", "sglang"),
        ("llamacpp:", "llama-server"),
        ("vllm:", "vllm"),
    ):
        if prefix in names:
            kind = name
            break
    found: dict[str, Any] = {"url": connections.endpoint.url, "kind": kind}
    try:
        answer = await connections.fetch_json("/version", timeout_s=10.0)
        found["version"] = answer.get("version") if isinstance(answer, dict) else None
    except ServerError:
        pass
    if kind == "unknown":
        try:
            props = await connections.fetch_json("/props", timeout_s=10.0)
            if isinstance(props, dict) and "default_generation_settings" in props:
                found["kind"] = "llama-server"
                found["version"] = props.get("build_info")
        except ServerError:
            pass
    return found


def change(before: MetricsScrape | None, after: MetricsScrape | None, figure: str) -> float | None:
    """Return the growth of a counter between two scrapes, or None if it is not known."""
    if before is None or after is None:
        return None
    end = after.get(figure)
    return None if end is None else end - (before.get(figure) or 0.0)
