"""One controlled request to a server, taken apart into its phases.

Fixed prompt, fixed output, nobody else about, /metrics before and after. How much can be told
depends on the server; the evidence is named with the result:

    client only      when the request was sent and each token came
    /metrics         what the server's counters grew by: queue, prefill, decode
    per request      the request's own times, sent with its answer
    step records     every step the engine ran for it (twostroke)
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
from twostroke.measure.load.scrape import Metrics, change, identify, scrape
from twostroke.measure.load.workload import Planned, Prompts
from twostroke.measure.report.tables import duration

LEVELS = ("client only", "/metrics", "per request", "step records")
QUIET_S = 5.0  # how long others are waited for


@dataclass
class Phases:
    """What a request took and where, in seconds; None: not known."""

    samples: list[Sample]
    server: dict[str, Any]
    model: str
    evidence: str = "client only"
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    alone: bool | None = None  # None: the server does not say
    problems: list[str] = field(default_factory=list)
    kv: dict[str, float] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, float] = field(default_factory=dict)

    @property
    def sample(self) -> Sample:
        """The request in the middle, by its time."""
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
        """Where most of the request's time went."""
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
        """Of the time to the first token, what was neither queue nor prefill: client, network,
        HTTP, tokenising."""
        if self.prefill_s is None:
            return None
        return max(0.0, self.ttft_s - self.prefill_s - (self.queue_s or 0.0))

    def kv_sentence(self) -> str:
        """What is reserved against what is used, for people who see a full GPU."""
        kv = self.kv
        if "reserved" in kv:
            return (
                f"The KV cache reserves {kv['reserved']:,.0f} tokens from the start, whatever is "
                f"asked; this request used at most {kv['request']:,.0f} of them "
                f"({kv['request'] / kv['reserved']:.1%}). Memory that is reserved and free is room "
                "for more requests, not a leak."
            )
        if "usage" in kv:
            return f"The server says that {kv['usage']:.1%} of its KV cache is in use while idle."
        return "The server does not say how much KV cache it reserves or uses."


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
            "give a prompt of at least 1 token, an output of at least 2, 1 repetition"
        )
    connections = Connections(Endpoint(url, api_key))
    try:
        server = await identify(connections)
        name = model or str((await first_model(connections))["id"])
        client = OpenAIClient(connections, name, route)
        prompts = Prompts(0, secrets.token_hex(4), as_text=route == CHAT)

        def planned(number: int) -> Planned:
            prompt = prompts.unique(number, prompt_tokens)
            return Planned(0.0, prompt, prompt_tokens, output_tokens)

        await send_first(client, planned(-1))  # a first one compiles, fills caches and connects
        problems = []
        if not await _quiet(connections):
            problems.append("others use the server: their requests are in these figures")
        before = await scrape(connections)
        with GpuSamples() as gpu:
            samples = [await send_first(client, planned(n)) for n in range(repeat)]
        after = await _settled(connections, before, repeat)
        found = Phases(samples, server, name, problems=problems, gpu=gpu.summary())
        _from_metrics(found, before, after, repeat)
        _from_request(found)
        await _from_records(found, connections)
        _check(found, output_tokens)
        return found
    finally:
        connections.close()


async def _quiet(connections: Connections) -> bool:
    """Whether nobody else is served, after a moment's wait."""
    for _ in range(int(QUIET_S / 0.25)):
        metrics = await scrape(connections)
        if metrics is None:
            return True  # nobody can say
        if not (metrics.get("running") or metrics.get("waiting")):
            return True
        await asyncio.sleep(0.25)
    return False


async def _settled(connections: Connections, before: Metrics | None, count: int) -> Metrics | None:
    """The metrics, once they have counted the requests."""
    after = None
    for _ in range(20):
        after = await scrape(connections)
        grown = change(before, after, "requests")
        if grown is None or grown >= count:
            break
        await asyncio.sleep(0.1)
    return after


def _from_metrics(found: Phases, before: Metrics | None, after: Metrics | None, count: int) -> None:
    if before is None or after is None:
        return
    served = change(before, after, "requests")
    if served is not None:
        found.alone = served == count
        if not found.alone:
            found.problems.append(
                f"the server served {served:.0f} requests meanwhile, and {count} of them were ours"
            )
    parts = {name: change(before, after, name) for name in ("queue_s", "prefill_s", "decode_s")}
    if parts["prefill_s"] is not None:
        found.evidence = "/metrics"
        each = {name: None if value is None else value / count for name, value in parts.items()}
        found.queue_s, found.prefill_s = each["queue_s"], each["prefill_s"]
        found.decode_s = each["decode_s"]
    usage = after.get("kv_usage")
    if usage is not None:
        found.kv["usage"] = usage
    reserved = after.series.get("twostroke:kv_cache_reserved_tokens")
    if reserved:
        sample = found.sample
        found.kv |= {"reserved": reserved, "request": sample.prompt_tokens + sample.output_tokens}


def _from_request(found: Phases) -> None:
    timings = found.sample.timings
    if timings is None or "prompt_ms" not in timings:
        return
    found.evidence = "per request"
    found.prefill_s, found.decode_s = timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3
    if "queue_ms" in timings:
        found.queue_s = timings["queue_ms"] / 1e3


async def _from_records(found: Phases, connections: Connections) -> None:
    if found.server["kind"] != "twostroke":
        return
    seconds = min(600.0, 5.0 + sum(sample.e2el_s for sample in found.samples))
    try:
        records = await connections.fetch_json(f"/records?seconds={seconds:.0f}")
    except ServerError:
        return
    # The warm-up, and whoever was there before, are in the records as well.
    own = {sample.request_id for sample in found.samples}
    numbers: set[int] = set()
    for request in records["requests"]:
        if request["request_id"].rsplit("-", 1)[0] in own:
            numbers.update(request["token_step"], (step for _, step, _, _ in request["chunks"]))
    steps = [step for step in records["steps"] if step["step"] in numbers]
    if not steps:
        return
    found.evidence = "step records"
    decode = [step for step in steps if step["decode"]["tokens"] and not step["prefill"]["tokens"]]
    prefill = [step for step in steps if step["prefill"]["tokens"]]
    found.steps = {
        "prefill_steps": len(prefill),
        "decode_steps": len(decode),
        "decode_step_ms": 1e3 * statistics.median(s["device_s"] for s in decode)
        if decode
        else None,
        "host_gap_ms": 1e3 * statistics.median(s["host_gap_s"] for s in decode) if decode else None,
    }


def _check(found: Phases, output_tokens: int) -> None:
    sample = found.sample
    if sample.cached_tokens and sample.cached_tokens > 0.05 * sample.prompt_tokens:
        found.problems.append(
            f"{sample.cached_tokens} of {sample.prompt_tokens} prompt tokens came from the prefix "
            "cache"
        )
    if sample.output_tokens < output_tokens:
        found.problems.append(
            f"the model stopped after {sample.output_tokens} of {output_tokens} tokens: the server "
            "does not know ignore_eos"
        )


class GpuSamples:
    """Utilisation and memory of this machine's first NVIDIA GPU while it is open; nothing where
    there is none, or no pynvml."""

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
