"""`watch`: observes a running server for some seconds. `diagnosis.py` judges the observations.

/health    every half second: the server is up, and the round-trip time
/metrics   every half second: the gauges; before and after the watch: the counters
/records   every few seconds: all steps and requests (twostroke only)
probes     short requests that the doctor sends and times as a client
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from twostroke.errors import ConfigError
from twostroke.measure.explain.why import Record
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.sample_client import CHAT, COMPLETIONS, OpenAIClient, first_model
from twostroke.measure.load.scrape import MetricsScrape, change, identify, scrape
from twostroke.measure.load.workload import PlannedRequest, PromptGenerator
from twostroke.observe.machine import MachineReader, listening_process

GAUGE_INTERVAL_S = 0.5
RECORDS_INTERVAL_S = 4.0  # short, because the server keeps only its last 2,048 steps
# Age of the oldest records to fetch. The best step times before the watch are the baseline.
HISTORY_S = 600.0
TRAFFIC_CHECK_S = 1.0  # seconds until the doctor looks for traffic of other clients
LAST_PROBE_S = 15.0  # how long the last probe may run after the end of the watch
READY_POLL_S = 0.1
PROBE_PROMPT, PROBE_OUTPUT = 24, 16  # tokens
# If the server has records of requests of other clients, the doctor sends only a few short probes.
LIGHT_PROBES, LIGHT_OUTPUT = 3, 8  # number of probes, tokens
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROBE_NAME = "doctor"  # in the request ids of probes


@dataclass(frozen=True, slots=True)
class GaugeReading:
    """The gauges at one moment; None if the server does not export the gauge."""

    running: float | None
    waiting: float | None
    kv_usage: float | None


@dataclass(slots=True)
class Observations:
    """Everything that the doctor saw. Times in records are on the server's clock."""

    server: dict[str, Any]
    seconds: float = 0.0
    before: MetricsScrape | None = None  # /metrics at the start of the watch
    after: MetricsScrape | None = None  # /metrics at its end
    gauges: list[GaugeReading] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)  # round trips of /health
    unready_s: float = 0.0  # time without an answer or with the engine down
    probes: list[Sample] = field(default_factory=list)
    probe_names: list[str] = field(default_factory=list)  # request ids of the probes
    unanswered_s: list[float] = field(default_factory=list)  # waits of probes that got no answer
    max_num_seqs: int | None = None  # largest number of running requests
    since_s: float = 0.0  # start of the watch, on the server's clock
    steps: list[Record] | None = None  # includes earlier steps; None: no step records
    requests: list[Record] = field(default_factory=list)
    # `prefix_marks` (digests of the first 64, 128, … prompt tokens) of requests before the watch.
    known_marks: set[str] = field(default_factory=set)
    limits: dict[str, Any] = field(default_factory=dict)  # settings and sizes from /records
    has_traffic: bool = False  # there were requests of other clients
    # Counters of the server's machine at the start and the end of the watch; None: not reported.
    machine_before: Record | None = None
    machine_after: Record | None = None


def _local_machine(url: str, observed: Observations) -> MachineReader | None:
    """Return a reader of machine counters, if the server runs on this machine and /records has no
    machine counters."""
    parts = urlsplit(url)
    if observed.machine_before is not None or parts.hostname not in LOOPBACK or not parts.port:
        return None
    pid = listening_process(parts.port)
    return None if pid is None else MachineReader(on_gpu=True, pid=pid)


def is_probe(request: Record) -> bool:
    return f"-{PROBE_NAME}-" in request["request_id"]


async def watch(
    url: str,
    api_key: str | None = None,
    seconds: float = 20.0,
    probe: bool = True,
    wait_s: float = 0.0,
    model: str | None = None,
) -> Observations:
    """Watch a server. `probe`: send probes. `wait_s`: time to wait for a starting server."""
    if not 2 <= seconds <= 600:
        raise ConfigError("--for must be 2 to 600 seconds")
    connections = Connections(Endpoint(url, api_key))
    try:
        return await _Watch(connections, seconds, probe, wait_s, model).run()
    finally:
        connections.close()


class _Watch:
    """One watch of a server."""

    def __init__(
        self,
        connections: Connections,
        seconds: float,
        probe: bool,
        wait_s: float,
        model: str | None,
    ) -> None:
        self._connections = connections
        self._seconds, self._probe, self._wait_s, self._model = seconds, probe, wait_s, model
        # The key is the commit time, because a restarted engine counts its steps from 0 again.
        self._steps: dict[float, Record] = {}
        self._requests: dict[str, Record] = {}
        self.observations = Observations({})

    async def run(self) -> Observations:
        observed = self.observations
        observed.unready_s = await self._ready()
        observed.server = await identify(self._connections)
        model = self._model
        if self._probe and model is None:
            model = str((await first_model(self._connections))["id"])
        await self._fetch_first_records()
        local = _local_machine(self._connections.endpoint.url, observed)
        if local is not None:
            observed.machine_before = local.read().as_json()
        await self._find_max_num_seqs()
        observed.before = await scrape(self._connections)
        began = perf_counter()
        async with (
            _in_background(self._read_gauges()),
            _in_background(self._fetch_records_regularly()),
        ):
            await asyncio.sleep(min(TRAFFIC_CHECK_S, self._seconds / 4))
            observed.has_traffic = await self._has_traffic()
            if self._probe:
                await self._send_probes(model, began)
            left = began + self._seconds - perf_counter()
            await asyncio.sleep(max(0.0, left))
        observed.seconds = perf_counter() - began
        observed.after = await scrape(self._connections)
        await self._fetch_records()
        if local is not None:
            observed.machine_after = local.read().as_json()
        if observed.steps is not None:
            observed.steps = [self._steps[at] for at in sorted(self._steps)]
            observed.requests = sorted(
                self._requests.values(), key=lambda request: request["finished_s"]
            )
            # The doctor sends one probe at a time. If a step has two requests, at least one of them
            # belongs to another client.
            observed.has_traffic = (
                observed.has_traffic
                or any(not is_probe(request) for request in observed.requests)
                or any(step["running"] + step["waiting"] > 1 for step in observed.steps)
            )
        return observed

    # ── readiness ───────────────────────────────────────────────────────────────────────────

    async def _ready(self) -> float:
        """Wait for the server, and return how long the server was not ready."""
        began = perf_counter()
        was_unready = False
        while True:
            try:
                await self._connections.fetch("/health", timeout_s=max(10.0, self._wait_s))
                break
            except ServerError as error:
                if error.status not in (None, 503):
                    break  # the server is up, but has no /health
                if perf_counter() - began >= self._wait_s:
                    raise
                was_unready = True
                await asyncio.sleep(READY_POLL_S)
        # If the server was ready at once, the time since `began` is only a round trip.
        return perf_counter() - began if was_unready else 0.0

    async def _find_max_num_seqs(self) -> None:
        observed = self.observations
        if "max_num_seqs" in observed.limits:
            observed.max_num_seqs = observed.limits["max_num_seqs"]
            return
        with suppress(ServerError, TypeError, ValueError):
            props = await self._connections.fetch_json("/props", timeout_s=10.0)
            observed.max_num_seqs = int(props["total_slots"]) if "total_slots" in props else None

    # ── in the background ───────────────────────────────────────────────────────────────────

    async def _read_gauges(self) -> None:
        """Read /health and /metrics every half second."""
        last = perf_counter()
        while True:
            await asyncio.sleep(GAUGE_INTERVAL_S)
            sent = perf_counter()
            up = True
            try:
                await self._connections.fetch("/health", timeout_s=5.0)
                self.observations.pings_s.append(perf_counter() - sent)
            except ServerError as error:
                up = error.status not in (None, 503)
            metrics = await scrape(self._connections)
            if metrics is not None:
                up = up and metrics.series.get("twostroke:engine_up", 1.0) > 0
                names = ("running", "waiting", "kv_usage")
                self.observations.gauges.append(
                    GaugeReading(*(metrics.get(name) for name in names))
                )
            now = perf_counter()
            if not up:
                self.observations.unready_s += now - last
            last = now

    async def _fetch_records_regularly(self) -> None:
        while self.observations.steps is not None:
            await asyncio.sleep(RECORDS_INTERVAL_S)
            await self._fetch_records()

    async def _fetch_first_records(self) -> None:
        """Fetch the records from before the watch, and the settings of the server."""
        if self.observations.server["kind"] != "twostroke":
            return
        with suppress(ServerError):
            # Earlier steps explain the waits of the first requests.
            found = await self._connections.fetch_json(f"/records?seconds={HISTORY_S:g}")
            self.observations.since_s = found["now_s"]
            self.observations.machine_before = found.pop("machine", None)
            self.observations.steps = []
            self._steps = {step["committed_s"]: step for step in found["steps"]}
            for request in found["requests"]:
                self.observations.known_marks.update(request["prefix_marks"])
            self.observations.limits = {
                name: value
                for name, value in found.items()
                if name not in ("steps", "requests", "now_s", "unix_s")
            }

    async def _fetch_records(self) -> None:
        if self.observations.steps is None:
            return
        with suppress(ServerError):
            found = await self._connections.fetch_json(
                f"/records?seconds={2 * RECORDS_INTERVAL_S:g}"
            )
            self.observations.machine_after = found.get("machine")
            for step in found["steps"]:
                self._steps[step["committed_s"]] = step
            for request in found["requests"]:
                if request["finished_s"] >= self.observations.since_s:
                    self._requests[request["request_id"]] = request

    async def _has_traffic(self) -> bool:
        """Return True if there are requests of other clients. Called before the first probe."""
        observed = self.observations
        if any((reading.running or 0) + (reading.waiting or 0) for reading in observed.gauges):
            return True
        now = await scrape(self._connections)
        if now is not None and (now.get("running") or now.get("waiting")):
            return True
        return bool(change(observed.before, now, "output_tokens"))

    # ── probes ──────────────────────────────────────────────────────────────────────────────

    async def _send_probes(self, model: str | None, began: float) -> None:
        """Send one probe at a time until the watch ends. With records of other clients' requests,
        send only LIGHT_PROBES probes."""
        observed = self.observations
        end = began + self._seconds
        light = observed.has_traffic and observed.steps is not None
        salt = secrets.token_hex(4)
        prompts = PromptGenerator(0, salt, as_text=True)
        client = OpenAIClient(self._connections, model, CHAT)
        number = 0
        while perf_counter() < end - 0.5 and not (light and number >= LIGHT_PROBES):
            output = LIGHT_OUTPUT if light else PROBE_OUTPUT
            name = f"{PROBE_NAME}-{salt}-{number}"
            extra = {"request_id": name} if observed.steps is not None else None
            planned = PlannedRequest(0.0, prompts.unique(number, PROBE_PROMPT), 0, output, extra)
            started = perf_counter()
            task = asyncio.create_task(client.send(planned, started))
            done, _ = await asyncio.wait({task}, timeout=end + LAST_PROBE_S - started)
            if not done:
                task.cancel()
                observed.unanswered_s.append(perf_counter() - started)
                return
            sample = task.result()
            if not sample.ok and client.route == CHAT and not observed.probes:
                client.route = COMPLETIONS  # the model has no chat template
                sample = await client.send(planned, perf_counter())
            observed.probes.append(sample)
            observed.probe_names.append(name)
            number += 1
            # Spread the remaining light probes evenly over the rest of the watch.
            pause = (end - perf_counter()) / (LIGHT_PROBES - number + 1) if light else 0.5
            await asyncio.sleep(max(0.1, pause) if perf_counter() < end else 0.0)


@asynccontextmanager
async def _in_background(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
