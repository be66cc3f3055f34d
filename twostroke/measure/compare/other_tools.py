"""Readers of result files of benchmark tools, which convert the figures to twostroke's definitions.

vllm bench serve      one JSON object with mean_ttft_ms …; also the format of twostroke bench serve
sglang bench_serving  one JSON object on each line, with nearly the same names
guidellm              benchmarks[].metrics.time_to_first_token_ms …
aiperf, genai-perf    records with time_to_first_token.avg …
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError

FIELDS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")


def import_result(path: str) -> dict[str, Any]:
    """Return the figures of a file under twostroke's names. `differences`: sentences about figures
    with other definitions."""
    text = _text(path)
    for line in (text, text.splitlines()[-1] if text.strip() else ""):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        for name, (knows, read) in READERS.items():
            if isinstance(content, dict) and knows(content):
                return {"schema_version": 1, "tool": name, "file": path, **read(content)}
    raise ConfigError(f"{path} has an unknown format; there are readers for {', '.join(READERS)}")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


# ── vLLM, SGLang, twostroke ─────────────────────────────────────────────────────────────────


def _flat(content: dict[str, Any], source: str, differences: list[str]) -> dict[str, Any]:
    metrics = {
        field: {
            name: content[key]
            for name in STATISTICS
            if isinstance(content.get(key := f"{name}_{field}_ms"), int | float)
        }
        for field in FIELDS
    }
    if source == "sglang":
        metrics["e2el"] = {
            name: content[key]
            for name in STATISTICS
            if isinstance(content.get(key := f"{name}_e2e_latency_ms"), int | float)
        }
    return {
        "requests": content.get("completed"),
        "failed": content.get("failed", 0),
        "duration_s": content.get("duration"),
        "request_throughput": content.get("request_throughput"),
        "output_throughput": content.get("output_throughput"),
        "metrics": metrics,
        "differences": differences,
    }


def _vllm(content: dict[str, Any]) -> dict[str, Any]:
    return _flat(
        content,
        "vllm",
        [
            "latency starts when the client sends the request, not at the scheduled time, so a "
            "client that falls behind looks faster",
            "TTFT ends at the first event of the stream, which for a chat may have no content",
        ],
    )


def _sglang(content: dict[str, Any]) -> dict[str, Any]:
    return _flat(
        content,
        "sglang",
        [
            "latency starts when the client sends the request, not at the scheduled time",
            "output tokens may be counted again by the client's tokenizer (…_retokenized)",
        ],
    )


def _own(content: dict[str, Any]) -> dict[str, Any]:
    return _flat(content, "twostroke", [])


# ── guidellm ────────────────────────────────────────────────────────────────────────────────

_GUIDELLM = {
    "ttft": "time_to_first_token_ms",
    "tpot": "time_per_output_token_ms",
    "itl": "inter_token_latency_ms",
    "e2el": "request_latency",
}


def _guidellm(content: dict[str, Any]) -> dict[str, Any]:
    found = content["benchmarks"][0]
    metrics = found["metrics"]
    read: dict[str, dict[str, float]] = {}
    for field, name in _GUIDELLM.items():
        summary = metrics.get(name, {}).get("successful") or {}
        scale = 1e3 if name == "request_latency" else 1.0  # guidellm has this metric in seconds
        values = {"mean": summary.get("mean"), "median": summary.get("median")}
        values |= {p: summary.get("percentiles", {}).get(p) for p in ("p90", "p95", "p99")}
        read[field] = {k: scale * v for k, v in values.items() if isinstance(v, int | float)}
    # guidellm's TPOT divides the whole latency by all tokens; its ITL is twostroke's TPOT.
    read["tpot"], theirs = read["itl"], read["tpot"]
    read["itl"] = {}
    requests = metrics.get("request_totals") or found.get("run_stats", {}).get("requests_made", {})
    rate = metrics.get("requests_per_second", {}).get("successful", {}).get("mean")
    tokens = metrics.get("output_tokens_per_second", {}).get("successful", {}).get("mean")
    return {
        "requests": requests.get("successful"),
        "failed": requests.get("errored", 0),
        "duration_s": found.get("duration"),
        "request_throughput": rate,
        "output_throughput": tokens,
        "metrics": read,
        "theirs": {"time_per_output_token_ms": theirs},
        "differences": [
            "guidellm's inter_token_latency is (last - first token) / (tokens - 1) for each "
            "request, which is our TPOT and is shown as TPOT; the gaps between single tokens (our "
            "ITL) are not in the file",
            "guidellm's time_per_output_token divides the request's whole latency by all its "
            "tokens, so it includes the TTFT: kept under `theirs`, not comparable",
            "guidellm's latency starts when the request is sent (request_dispatch_delay is the "
            "delay of sending) and ends with the stream, not with the last token",
        ],
    }


# ── aiperf and genai-perf ───────────────────────────────────────────────────────────────────

_AIPERF = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}


def _aiperf(content: dict[str, Any]) -> dict[str, Any]:
    records = content.get("records", content)
    read: dict[str, dict[str, float]] = {}
    for field, name in _AIPERF.items():
        entry = records.get(name) or {}
        scale = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}.get(
            str(entry.get("unit", "ms")), 1.0
        )
        values = {"mean": entry.get("avg"), "median": entry.get("p50")}
        values |= {p: entry.get(p) for p in ("p90", "p95", "p99")}
        read[field] = {k: scale * v for k, v in values.items() if isinstance(v, int | float)}
    count = records.get("request_count") or {}
    return {
        "requests": count.get("avg"),
        "failed": (records.get("error_request_count") or {}).get("avg", 0),
        "duration_s": (records.get("benchmark_duration") or {}).get("avg"),
        "request_throughput": (records.get("request_throughput") or {}).get("avg"),
        "output_throughput": (records.get("output_token_throughput") or {}).get("avg"),
        "metrics": read,
        "differences": [
            "aiperf's inter_token_latency is (latency - TTFT) / (tokens - 1) for each request, "
            "which is our TPOT and is shown as TPOT; its inter_chunk_latency is our ITL",
            "aiperf's latency starts when the client sends the request, not at the scheduled time",
        ],
    }


Reader = tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], dict[str, Any]]]
READERS: dict[str, Reader] = {
    "twostroke": (lambda c: "schema_version" in c and "mean_ttft_ms" in c, _own),
    "sglang": (lambda c: "mean_ttft_ms" in c and "mean_e2e_latency_ms" in c, _sglang),
    "vllm": (lambda c: "mean_ttft_ms" in c, _vllm),
    "guidellm": (
        lambda c: bool(c.get("benchmarks")) and "metrics" in c["benchmarks"][0],
        _guidellm,
    ),
    "aiperf": (
        lambda c: "avg" in (c.get("records", c).get("time_to_first_token") or {}),
        _aiperf,
    ),
}
