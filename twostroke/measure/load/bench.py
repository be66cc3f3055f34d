"""`bench serve`: a workload against a server, once or at the rates of a search."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.load.arrivals import arrival_times, check_rate, ramp_times
from twostroke.measure.load.causes import CausedGap, caused_gaps, summary
from twostroke.measure.load.definitions import Goals, Sample
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.load_run import Run, run_closed_loop, run_open_loop
from twostroke.measure.load.result import result
from twostroke.measure.load.sample_client import (
    CHAT,
    COMPLETIONS,
    OpenAIClient,
    first_model,
    send_first,
)
from twostroke.measure.load.scrape import Metrics, change, identify, scrape
from twostroke.measure.load.traces import read_trace, scaled
from twostroke.measure.load.workload import Planned, Prompts, random_lengths, read_custom, replayed

PROBE_WORDS = 64
ROUTES = {"openai": COMPLETIONS, "openai-chat": CHAT, "vllm": COMPLETIONS}
SEARCH_STEPS = 6
Tell = Callable[[Sample], None]


@dataclass(frozen=True)
class ServeOptions:
    """What `bench serve` was asked for; the names are vLLM's where it has one."""

    url: str
    api_key: str | None = None
    model: str | None = None
    backend: str = "openai"
    endpoint: str | None = None
    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 100
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    custom_output_len: int | None = 256
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    trace_start_s: float = 0.0
    trace_seconds: float | None = None
    trace_speed: float = 1.0
    trace_shrink: float = 1.0
    trace_keep: int = 1
    num_warmups: int = 1
    seed: int = 0
    salt: str = ""  # of prompts; "": as no run before had it
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    metric_percentiles: Sequence[float] = (99.0,)
    goals: Goals = field(default_factory=Goals)
    save_detailed: bool = False

    @property
    def route(self) -> str:
        return self.endpoint or ROUTES[self.backend]

    @property
    def closed_loop(self) -> bool:
        """Users who wait for an answer before they ask again: a limit, and nothing that is due."""
        return (
            self.max_concurrency is not None
            and math.isinf(self.request_rate)
            and self.ramp_up_strategy is None
            and self.dataset_name != "trace"
        )


class ServeBench:
    """A connection to one server, and the runs against it."""

    def __init__(self, options: ServeOptions) -> None:
        check_rate(options.request_rate, options.burstiness)
        self.options = options
        self.connections = Connections(Endpoint(options.url, options.api_key))
        self.server: dict[str, Any] = {}
        self.model = options.model
        self._runs = 0
        self._words_per_token = 1.0
        self._template_tokens = 0  # of every chat: the same in all of them

    async def connect(self) -> None:
        """Find out who is there, and try one request before many are sent."""
        options = self.options
        if self.model is None:
            self.model = str((await first_model(self.connections))["id"])
        self.server = await identify(self.connections)
        if options.route == CHAT:
            await self._fit_words()
        client = self._client()
        for planned in self._random(max(1, options.num_warmups), "warm up"):
            await send_first(client, planned)

    async def run(self, tell: Tell = lambda sample: None, rate: float | None = None) -> Outcome:
        """`rate`: instead of the one that was asked for."""
        options = self.options if rate is None else replace(self.options, request_rate=rate)
        planned = self.plan(options)
        client = self._client()
        before = await scrape(self.connections)
        if options.closed_loop:
            assert options.max_concurrency is not None
            run = await run_closed_loop(client, planned, options.max_concurrency, tell)
        else:
            run = await run_open_loop(client, planned, options.max_concurrency, tell)
        after = await scrape(self.connections)
        gaps = caused_gaps(run.samples, await self._records(run))
        found = self._result(options, run, before, after) | {"gap_causes": summary(gaps)}
        return Outcome(run, found, gaps)

    def close(self) -> None:
        self.connections.close()

    def plan(self, options: ServeOptions) -> list[Planned]:
        """The requests of one run, with prompts that no run before has sent."""
        self._runs += 1
        if options.dataset_name == "trace":
            if options.dataset_path is None:
                raise ConfigError("--dataset-name trace needs the file: --dataset-path FILE")
            found = read_trace(options.dataset_path, options.trace_start_s, options.trace_seconds)
            found = scaled(found, options.trace_speed, options.trace_shrink, options.trace_keep)
            return replayed(found, self._prompts("trace"), options.trace_shrink)
        if options.dataset_name == "custom":
            if options.dataset_path is None:
                raise ConfigError("--dataset-name custom needs the file: --dataset-path FILE")
            planned = read_custom(options.dataset_path, options.custom_output_len)
            planned = planned[: options.num_prompts]
        else:
            planned = self._random(options.num_prompts, "run")
        times = self._times(options, len(planned))
        return [replace(one, at_s=at) for one, at in zip(planned, times, strict=True)]

    # ── parts of it ─────────────────────────────────────────────────────────────────────────

    async def _records(self, run: Run) -> dict[str, Any] | None:
        """Of the run's steps and requests, as far back as the server has them."""
        if self.server["kind"] != "twostroke":
            return None
        seconds = min(600.0, run.duration_s + 1)
        try:
            found: dict[str, Any] = await self.connections.fetch_json(f"/records?seconds={seconds}")
        except ServerError:
            return None
        return found

    def _client(self) -> OpenAIClient:
        options = self.options
        return OpenAIClient(
            self.connections,
            self.model,
            options.route,
            options.extra_body,
            options.ignore_eos,
            options.save_detailed,
        )

    def _prompts(self, what: str) -> Prompts:
        # Another run's prompts may still be in the server's prefix cache: each run has its own.
        salt = f"{what} {self._runs} {self.options.salt or secrets.token_hex(4)}"
        as_text = self.options.route == CHAT
        return Prompts(self.options.seed, salt, as_text, self._words_per_token)

    def _random(self, count: int, what: str) -> list[Planned]:
        options = self.options
        lengths = random_lengths(
            count,
            options.random_input_len,
            options.random_output_len,
            options.random_range_ratio,
            options.seed,
        )
        prompts = self._prompts(what)
        prefix = options.random_prefix_len
        return [
            Planned(0.0, prompts.unique(n, prefix + size, prefix), prefix + size, output)
            for n, (size, output) in enumerate(lengths)
        ]

    def _times(self, options: ServeOptions, count: int) -> list[float]:
        if options.closed_loop:
            return [0.0] * count
        if options.ramp_up_strategy is not None:
            start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
            if start is None or end is None or min(start, end) <= 0:
                raise ConfigError(
                    "--ramp-up-strategy needs rates above 0: --ramp-up-start-rps and "
                    "--ramp-up-end-rps"
                )
            return ramp_times(count, start, end, options.ramp_up_strategy, options.seed)
        return arrival_times(count, options.request_rate, options.burstiness, options.seed)

    async def _fit_words(self) -> None:
        """How many words make a token here: the difference between two prompts of words."""
        client = OpenAIClient(self.connections, self.model, CHAT, self.options.extra_body)
        prompts = Prompts(0, secrets.token_hex(4), as_text=True)
        counts = []
        for words in (PROBE_WORDS, 3 * PROBE_WORDS):
            sample = await send_first(client, Planned(0.0, prompts.unique(words, words), 0, 1))
            counts.append(sample.prompt_tokens)
        tokens = counts[1] - counts[0]
        if tokens > 0:
            self._words_per_token = 2 * PROBE_WORDS / tokens
            self._template_tokens = max(0, counts[0] - tokens // 2)

    def _result(
        self, options: ServeOptions, run: Run, before: Metrics | None, after: Metrics | None
    ) -> dict[str, Any]:
        rate = options.request_rate
        expected: float | None = None
        if options.dataset_name == "random":
            shared = options.random_prefix_len + self._template_tokens
            expected = shared / (shared + options.random_input_len)
        settings = {
            "backend": options.backend,
            "endpoint_type": options.backend,
            "endpoint": options.route,
            "model_id": self.model,
            "tokenizer_id": self.model,
            "num_prompts": len(run.samples),
            "dataset_name": options.dataset_name,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": options.burstiness,
            "max_concurrency": options.max_concurrency,
            "seed": options.seed,
        }
        found = result(
            run,
            percentiles=options.metric_percentiles,
            goals=options.goals,
            settings=settings,
            cached_expected=expected,
            detailed=options.save_detailed,
        )
        found["server"] = self.server
        found["server_says"] = {
            name: grown
            for name in ("prompt_tokens", "output_tokens", "prefix_hits", "preemptions", "queue_s")
            if (grown := change(before, after, name)) is not None
        }
        return found


@dataclass(frozen=True)
class Outcome:
    run: Run
    result: dict[str, Any]
    gaps: list[CausedGap]


async def search_rate(
    bench: ServeBench,
    share: float,
    tell: Tell = lambda sample: None,
    tried: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The highest rate at which `share` of the requests meet the goals: the rate is doubled until
    they do not, then halved in between. The last outcome that met them, and what was tried."""
    goals, rows = bench.options.goals, []

    async def attempt(rate: float) -> tuple[Outcome, bool]:
        outcome = await bench.run(tell, rate)
        met = sum(map(goals.met, outcome.run.samples)) / len(outcome.run.samples)
        row = {
            "request_rate": rate,
            "share": met,
            "goodput": outcome.result["request_goodput"],
            "median_ttft_ms": outcome.result["median_ttft_ms"],
            "median_tpot_ms": outcome.result["median_tpot_ms"],
            "met": met >= share,
        }
        rows.append(row)
        tried(row)
        return outcome, met >= share

    low, high, best = 0.0, math.inf, None
    rate = bench.options.request_rate
    rate = 1.0 if math.isinf(rate) else rate
    for _ in range(4 * SEARCH_STEPS):
        outcome, met = await attempt(rate)
        if met:
            low, best = rate, outcome
        else:
            high = rate
        if high < math.inf and ((low and high / low < 1.1) or rate < 1e-2):
            break
        rate = 2 * rate if math.isinf(high) else (math.sqrt(low * high) if low else rate / 2)
    if best is None:
        raise ConfigError(
            f"not even {high:g} requests a second meet the goals for {share:.0%} of the requests; "
            "give goals that one request alone can meet"
        )
    return best, rows


def run_serve(
    options: ServeOptions, tell: Tell, share: float | None, tried: Callable[[dict[str, Any]], None]
) -> tuple[Outcome, list[dict[str, Any]]]:
    """`share`: search for the highest rate at which so many requests meet the goals."""

    async def work() -> tuple[Outcome, list[dict[str, Any]]]:
        bench = ServeBench(options)
        try:
            await bench.connect()
            if share is not None:
                return await search_rate(bench, share, tell, tried)
            return await bench.run(tell), []
        finally:
            bench.close()

    return asyncio.run(work())
