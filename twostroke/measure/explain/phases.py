"""Measures the phases of one request with a fixed prompt and a fixed output on an idle server.

The detail depends on the evidence that the server gives:

    client only      the times of sending and of each token
    /metrics         the growth of the server's counters: queue, prefill, decode
    per request      times that the server sends with the answer
    step records     every step that the engine ran for the request (twostroke only)
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import threading
from dataclasses import dataclass, field
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.load.definitions import DEFINITIONS, Sample
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.result import environment
from twostroke.measure.load.sample_client import CHAT, OpenAIClient, first_model, send_first
from twostroke.measure.load.scrape import MetricsScrape, change, identify, scrape
from twostroke.measure.load.workload import PlannedRequest, PromptGenerator
from twostroke.measure.report.tables import duration

LEVELS = ("client only", "/metrics", "per request", "step records")
QUIET_S = 5.0  # time to wait until the server is idle


@dataclass
class Phases:
    """The times of a request's phases in seconds; None: not known."""

    samples: list[Sample]
    server: dict[str, Any]
    model: str
    evidence: str = "client only"
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    alone: bool | None = None  # the server ran no other requests; None: not reported
    problems: list[str] = field(default_factory=list)
    kv: dict[str, float] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, float] = field(default_factory=dict)

    @property
    def sample(self) -> Sample:
        """The request with the median end-to-end latency."""
        ordered = sorted(self.samples, key=lambda sample: sample.e2el_s)
        return ordered[len(ordered) // 2]

    @property
    def ttft_s(self) -> float:
        return self.sample.ttft_s

    @property
    def stream_s(self) -> float:
        return self.sample.e2el_s - self.sample.ttft_s

    @property
    def verdict(self) -> str:
        """The part of the request that took the most time."""
        return "slow to start" if self.ttft_s > self.stream_s else "slow to stream"

    def sentence(self) -> str:
        sample, total = self.sample, self.sample.e2el_s
        tpot = sample.tpot_s
        start = f"{self.ttft_s / total:.0%} of {duration(total)} passed before the first token"
        if self.verdict == "slow to start":
            where = ""
            if self.queue_s is not None and self.queue_s > 0.5 * self.ttft_s:
                where = f", {duration(self.queue_s)} of it in the queue"
            elif self.prefill_s is not None:
                where = (
                    f", {duration(self.prefill_s)} of it prefill of {sample.prompt_tokens:,} tokens"
                )
            return f"Slow to start: {start}{where}."
        each = f", {duration(tpot)} a token" if tpot is not None else ""
        share = 1 - self.ttft_s / total
        return f"Slow to stream: {share:.0%} of {duration(total)} went into the later tokens{each}."

    def as_json(self) -> dict[str, Any]:
        sample = self.sample
        return {
            "schema_version": 1,
            "server": self.server,
            "model_id": self.model,
            "evidence": self.evidence,
            "verdict": self.verdict,
            "sentence": self.sentence(),
            "certified": not self.problems,
            "problems": self.problems,
            "prompt_tokens": sample.prompt_tokens,
            "output_tokens": sample.output_tokens,
            "cached_tokens": sample.cached_tokens,
            "ttft_ms": 1e3 * sample.ttft_s,
            "tpot_ms": None if sample.tpot_s is None else 1e3 * sample.tpot_s,
            "worst_itl_ms": 1e3 * max(sample.itls_s, default=0.0),
            "e2el_ms": 1e3 * sample.e2el_s,
            "queue_ms": _ms(self.queue_s),
            "prefill_ms": _ms(self.prefill_s),
            "decode_ms": _ms(self.decode_s),
            "outside_ms": _ms(self.outside_s),
            "kv": self.kv,
            "steps": self.steps,
            "gpu": self.gpu,
            "ttfts_ms": [1e3 * one.ttft_s for one in self.samples],
            "definitions": DEFINITIONS,
            "environment": environment(),
        }

    @property
    def outside_s(self) -> float | None:
        """The time to the first token outside queue and prefill: client, network, HTTP,
        tokenizer."""
        if self.prefill_s is None:
            return None
        return max(0.0, self.ttft_s - self.prefill_s - (self.queue_s or 0.0))

    def kv_sentence(self) -> str:
        """Return a sentence that compares the reserved with the used KV cache."""
        kv = self.kv
        if "reserved" in kv:
            return (
                f"The KV cache reserves {kv['reserved']:,.0f} tokens at the start; this request "
                f"used at most {kv['request']:,.0f} of them "
                f"({kv['request'] / kv['reserved']:.1%}). Free reserved memory is room for more "
                "requests, not a leak."
            )
        if "usage" in kv:
            return (
                f"The server reports that {kv['usage']:.1%} of its KV cache is in use while idle."
            )
        return "The server does not report its KV cache."


async def measure_phases(
    url: str,
    api_key: str | None = None,
    model: str | None = None,
    prompt_tokens: int = 512,
    output_tokens: int = 64,
    repeat: int = 3,
    route: str = "/v1/completions",
) -> Phases:
    if min(prompt_tokens, repeat) < 1 or output_tokens < 2:
        raise ConfigError(
            "the prompt needs at least 1 token, the output at least 2, and there must be at least "
            "1 repetition"
        )
    connections = Connections(Endpoint(url, api_key))
    try:
        server = await identify(connections)
        name = model or str((await first_model(connections))["id"])
        client = OpenAIClient(connections, name, route)
        prompts = PromptGenerator(0, secrets.token_hex(4), as_text=route == CHAT)

        def planned(number: int) -> PlannedRequest:
            prompt = prompts.unique(number, prompt_tokens)
            return PlannedRequest(0.0, prompt, prompt_tokens, output_tokens)

        await send_first(client, planned(-1))  # warm-up: connects, compiles, fills caches
        problems = []
        if not await _quiet(connections):
            problems.append("other clients use the server, and their requests affect these figures")
        before = await scrape(connections)
        with GpuSamples() as gpu:
            samples = [await send_first(client, planned(n)) for n in range(repeat)]
        after = await _settled(connections, before, repeat)
        phases = Phases(samples, server, name, problems=problems, gpu=gpu.summary())
        _from_metrics(phases, before, after, repeat)
        _from_request(phases)
        await _from_records(phases, connections)
        _check(phases, output_tokens)
        return phases
    finally:
        connections.close()


async def _quiet(connections: Connections) -> bool:
    """Wait until the server is idle. Return False if other requests run after `QUIET_S`."""
    for _ in range(int(QUIET_S / 0.25)):
        metrics = await scrape(connections)
        if metrics is None:
            return True  # the server has no metrics
        if not (metrics.get("running") or metrics.get("waiting")):
            return True
        await asyncio.sleep(0.25)
    return False


async def _settled(
    connections: Connections, before: MetricsScrape | None, count: int
) -> MetricsScrape | None:
    """Return the metrics after the server has counted the requests."""
    after = None
    for _ in range(20):
        after = await scrape(connections)
        grown = change(before, after, "requests")
        if grown is None or grown >= count:
            break
        await asyncio.sleep(0.1)
    return after


def _from_metrics(
    phases: Phases, before: MetricsScrape | None, after: MetricsScrape | None, count: int
) -> None:
    if before is None or after is None:
        return
    served = change(before, after, "requests")
    if served is not None:
        phases.alone = served == count
        if not phases.alone:
            phases.problems.append(
                f"the server served {served:.0f} requests during the measurement, and only {count} "
                "of them are measured"
            )
    parts = {name: change(before, after, name) for name in ("queue_s", "prefill_s", "decode_s")}
    if parts["prefill_s"] is not None:
        phases.evidence = "/metrics"
        each = {name: None if value is None else value / count for name, value in parts.items()}
        phases.queue_s, phases.prefill_s = each["queue_s"], each["prefill_s"]
        phases.decode_s = each["decode_s"]
    usage = after.get("kv_usage")
    if usage is not None:
        phases.kv["usage"] = usage
    reserved = after.series.get("twostroke:kv_cache_reserved_tokens")
    if reserved:
        sample = phases.sample
        phases.kv |= {"reserved": reserved, "request": sample.prompt_tokens + sample.output_tokens}


def _from_request(phases: Phases) -> None:
    timings = phases.sample.timings
    if timings is None or "prompt_ms" not in timings:
        return
    phases.evidence = "per request"
    phases.prefill_s, phases.decode_s = timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3
    if "queue_ms" in timings:
        phases.queue_s = timings["queue_ms"] / 1e3


async def _from_records(phases: Phases, connections: Connections) -> None:
    if phases.server["kind"] != "twostroke":
        return
    seconds = min(600.0, 5.0 + sum(sample.e2el_s for sample in phases.samples))
    try:
        records = await connections.fetch_json(f"/records?seconds={seconds:.0f}")
    except ServerError:
        return
    # The records also contain the warm-up and earlier requests.
    own = {sample.request_id for sample in phases.samples}
    numbers: set[int] = set()
    for request in records["requests"]:
        if request["request_id"].rsplit("-", 1)[0] in own:
            numbers.update(request["token_step"], (step for _, step, _, _ in request["chunks"]))
    steps = [step for step in records["steps"] if step["step"] in numbers]
    if not steps:
        return
    phases.evidence = "step records"
    decode = [step for step in steps if step["decode"]["tokens"] and not step["prefill"]["tokens"]]
    prefill = [step for step in steps if step["prefill"]["tokens"]]
    phases.steps = {
        "prefill_steps": len(prefill),
        "decode_steps": len(decode),
        "decode_step_ms": 1e3 * statistics.median(s["device_s"] for s in decode)
        if decode
        else None,
        "host_gap_ms": 1e3 * statistics.median(s["host_gap_s"] for s in decode) if decode else None,
    }


def _check(phases: Phases, output_tokens: int) -> None:
    sample = phases.sample
    if sample.cached_tokens and sample.cached_tokens > 0.05 * sample.prompt_tokens:
        phases.problems.append(
            f"{sample.cached_tokens} of {sample.prompt_tokens} prompt tokens came from the prefix "
            "cache"
        )
    if sample.output_tokens < output_tokens:
        phases.problems.append(
            f"the model stopped after {sample.output_tokens} of {output_tokens} tokens: the server "
            "does not support ignore_eos"
        )


class GpuSamples:
    """Samples of the utilisation and memory of the first NVIDIA GPU of this machine. Without a
    GPU or pynvml there are no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuSamples:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            return self

        def watch() -> None:
            while not self._stop.wait(0.05):
                used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
                busy = pynvml.nvmlDeviceGetUtilizationRates(handle)
                self._samples.append((busy.gpu, busy.memory, used))

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> dict[str, float]:
        if not self._samples:
            return {}
        busy, memory, used = zip(*self._samples, strict=True)
        return {
            "gpu_utilisation_percent": statistics.fmean(busy),
            "memory_utilisation_percent": statistics.fmean(memory),
            "memory_used_bytes": max(used),
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
