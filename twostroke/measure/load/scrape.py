"""A server's own figures: `/metrics` (vLLM's, SGLang's, llama-server's or ours) and who it is."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from twostroke.measure.load.http_client import Connections, ServerError

# What the servers call the same thing, most telling first.
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


class Metrics:
    """One scrape: the sum over the labels of every series, by name; of a histogram's buckets, by
    their upper bounds, too."""

    def __init__(self, text: str) -> None:
        self.series: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {}  # by name, then by upper bound
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.series[sample.name] = self.series.get(sample.name, 0.0) + sample.value
                if sample.name.endswith("_bucket") and "le" in sample.labels:
                    bound = float(sample.labels["le"])
                    of = self.buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                    of[bound] = of.get(bound, 0.0) + sample.value

    def get(self, what: str) -> float | None:
        """A figure of `NAMES`; None where the server does not have it."""
        for name in NAMES[what]:
            if name in self.series:
                return self.series[name]
        return None


async def scrape(connections: Connections) -> Metrics | None:
    """None where the server has no /metrics, or none that can be read."""
    try:
        text = await connections.fetch("/metrics", timeout_s=10.0)
        return Metrics(text.decode(errors="replace"))
    except (ServerError, ValueError):
        return None


async def identify(connections: Connections) -> dict[str, Any]:
    """Which server this is, as far as it says."""
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
        said = await connections.fetch_json("/version", timeout_s=10.0)
        found["version"] = said.get("version") if isinstance(said, dict) else None
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


def change(before: Metrics | None, after: Metrics | None, what: str) -> float | None:
    """How much a counter grew; None where it is not known."""
    if before is None or after is None:
        return None
    end = after.get(what)
    return None if end is None else end - (before.get(what) or 0.0)
