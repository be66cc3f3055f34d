"""`watch`: what a doctor sees of a running server in a while. `diagnosis.py` says what it means.

/health    every half second: is it there, and how far away is it?
/metrics   every half second: the gauges; before and after: what the counters grew by
/records   every few seconds: all steps and requests (twostroke)
probes     short requests of its own, whose tokens are timed here: what a client sees
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.explain.why import Record
from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.sample_client import CHAT, COMPLETIONS, OpenAIClient, first_model
from twostroke.measure.load.scrape import Metrics, change, identify, scrape
from twostroke.measure.load.workload import Planned, Prompts

LOOK_S = 0.5  # between two looks at the gauges
RECORDS_S = 4.0  # between two fetches: the server keeps the last 2,048 steps
EARLIER_S = 30.0  # of records, before the watch began
DECIDE_S = 1.0  # after which it is known whether there is traffic
GRACE_S = 15.0  # for a probe that has not ended when the time is over
READY_POLL_S = 0.1
PROBE_PROMPT, PROBE_OUTPUT, LIGHT_OUTPUT = 24, 16, 8  # tokens
LIGHT_PROBES = 3  # where others' requests are seen: as few as tell something
NAME = "doctor"  # of the probes


@dataclass(frozen=True, slots=True)
class Look:
    """The gauges at one moment; None: the server does not say."""

    running: float | None
    waiting: float | None
    kv_usage: float | None


@dataclass(slots=True)
class Seen:
    """What was there to see. Times of `records` are on the server's clock."""

    server: dict[str, Any]
    seconds: float = 0.0
    before: Metrics | None = None
    after: Metrics | None = None
    looks: list[Look] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)  # of /health, answered
    unready_s: float = 0.0  # in which nobody answered, or the engine was not up
    probes: list[Sample] = field(default_factory=list)
    probe_names: list[str] = field(default_factory=list)  # as the server's records have them
    stuck_s: list[float] = field(default_factory=list)  # probes without a token at the end
    seats: int | None = None  # how many requests may run at one time
    since_s: float = 0.0  # when the watch began, on the server's clock
    steps: list[Record] | None = None  # earlier ones, too; None: the server keeps none
    requests: list[Record] = field(default_factory=list)
    known_marks: set[str] = field(default_factory=set)  # of prompts that were there before
    limits: dict[str, Any] = field(default_factory=dict)  # as /records has them
    traffic: bool = False  # of others


def is_probe(request: Record) -> bool:
    return f"-{NAME}-" in request["request_id"]


async def watch(
    url: str,
    api_key: str | None = None,
    seconds: float = 20.0,
    probe: bool = True,
    wait_s: float = 0.0,
    model: str | None = None,
) -> Seen:
    """`probe`: send requests of its own. `wait_s`: how long to wait for a server to be there."""
    if not 2 <= seconds <= 600:
        raise ConfigError("--for: give 2 to 600 seconds")
    connections = Connections(Endpoint(url, api_key))
    try:
        return await _Watch(connections, seconds, probe, wait_s, model).run()
    finally:
        connections.close()


class _Watch:
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
        # By when they were committed: an engine that is started again counts from 0.
        self._steps: dict[float, Record] = {}
        self._requests: dict[str, Record] = {}
        self.seen = Seen({})

    async def run(self) -> Seen:
        seen = self.seen
        seen.unready_s = await self._ready()
        seen.server = await identify(self._connections)
        model = self._model
        if self._probe and model is None:
            model = str((await first_model(self._connections))["id"])
        await self._begin_records()
        await self._find_seats()
        seen.before = await scrape(self._connections)
        began = perf_counter()
        async with _in_background(self._look()), _in_background(self._keep_records()):
            await asyncio.sleep(min(DECIDE_S, self._seconds / 4))
            seen.traffic = await self._has_traffic()
            if self._probe:
                await self._send_probes(model, began)
            left = began + self._seconds - perf_counter()
            await asyncio.sleep(max(0.0, left))
        seen.seconds = perf_counter() - began
        seen.after = await scrape(self._connections)
        await self._take_records()
        if seen.steps is not None:
            seen.steps = [self._steps[at] for at in sorted(self._steps)]
            seen.requests = sorted(self._requests.values(), key=lambda one: one["finished_s"])
            # Probes come one after the other: where two requests are, one is somebody else's.
            seen.traffic = (
                seen.traffic
                or any(not is_probe(one) for one in seen.requests)
                or any(one["running"] + one["waiting"] > 1 for one in seen.steps)
            )
        return seen

    # ── is it there? ────────────────────────────────────────────────────────────────────────

    async def _ready(self) -> float:
        """How long the server was not there yet."""
        began = perf_counter()
        refused = False
        while True:
            try:
                await self._connections.fetch("/health", timeout_s=max(10.0, self._wait_s))
                break
            except ServerError as error:
                if error.status not in (None, 503):
                    break  # it answers; it only has no /health
                if perf_counter() - began >= self._wait_s:
                    raise
                refused = True
                await asyncio.sleep(READY_POLL_S)
        return perf_counter() - began if refused else 0.0  # else it is only far away

    async def _find_seats(self) -> None:
        seen = self.seen
        if "max_num_seqs" in seen.limits:
            seen.seats = seen.limits["max_num_seqs"]
            return
        with suppress(ServerError, TypeError, ValueError):
            props = await self._connections.fetch_json("/props", timeout_s=10.0)
            seen.seats = int(props["total_slots"]) if "total_slots" in props else None

    # ── in the background ───────────────────────────────────────────────────────────────────

    async def _look(self) -> None:
        last = perf_counter()
        while True:
            await asyncio.sleep(LOOK_S)
            sent = perf_counter()
            up = True
            try:
                await self._connections.fetch("/health", timeout_s=5.0)
                self.seen.pings_s.append(perf_counter() - sent)
            except ServerError as error:
                up = error.status not in (None, 503)
            metrics = await scrape(self._connections)
            if metrics is not None:
                up = up and metrics.series.get("twostroke:engine_up", 1.0) > 0
                names = ("running", "waiting", "kv_usage")
                self.seen.looks.append(Look(*(metrics.get(name) for name in names)))
            now = perf_counter()
            if not up:
                self.seen.unready_s += now - last
            last = now

    async def _keep_records(self) -> None:
        while self.seen.steps is not None:
            await asyncio.sleep(RECORDS_S)
            await self._take_records()

    async def _begin_records(self) -> None:
        if self.seen.server["kind"] != "twostroke":
            return
        with suppress(ServerError):
            # What ran before tells what the first requests waited for.
            found = await self._connections.fetch_json(f"/records?seconds={EARLIER_S:g}")
            self.seen.since_s = found["now_s"]
            self.seen.steps = []
            self._steps = {step["committed_s"]: step for step in found["steps"]}
            for request in found["requests"]:
                self.seen.known_marks.update(request["prefix_marks"])
            self.seen.limits = {
                name: value
                for name, value in found.items()
                if name not in ("steps", "requests", "now_s", "unix_s")
            }

    async def _take_records(self) -> None:
        if self.seen.steps is None:
            return
        with suppress(ServerError):
            found = await self._connections.fetch_json(f"/records?seconds={2 * RECORDS_S:g}")
            for step in found["steps"]:
                self._steps[step["committed_s"]] = step
            for request in found["requests"]:
                if request["finished_s"] >= self.seen.since_s:
                    self._requests[request["request_id"]] = request

    async def _has_traffic(self) -> bool:
        """Whether requests of others were seen, before there are any of its own."""
        seen = self.seen
        if any((look.running or 0) + (look.waiting or 0) for look in seen.looks):
            return True
        now = await scrape(self._connections)
        if now is not None and (now.get("running") or now.get("waiting")):
            return True
        return bool(change(seen.before, now, "output_tokens"))

    # ── probes ──────────────────────────────────────────────────────────────────────────────

    async def _send_probes(self, model: str | None, began: float) -> None:
        """One after the other: all the time where nothing else would be seen, else few."""
        seen = self.seen
        end = began + self._seconds
        light = seen.traffic and seen.steps is not None
        salt = secrets.token_hex(4)
        prompts = Prompts(0, salt, as_text=True)
        client = OpenAIClient(self._connections, model, CHAT)
        number = 0
        while perf_counter() < end - 0.5 and not (light and number >= LIGHT_PROBES):
            output = LIGHT_OUTPUT if light else PROBE_OUTPUT
            name = f"{NAME}-{salt}-{number}"
            extra = {"request_id": name} if seen.steps is not None else None
            planned = Planned(0.0, prompts.unique(number, PROBE_PROMPT), 0, output, extra)
            started = perf_counter()
            task = asyncio.create_task(client.send(planned, started))
            done, _ = await asyncio.wait({task}, timeout=end + GRACE_S - started)
            if not done:
                task.cancel()
                seen.stuck_s.append(perf_counter() - started)
                return
            sample = task.result()
            if not sample.ok and client.route == CHAT and not seen.probes:
                client.route = COMPLETIONS  # a model without a chat template
                sample = await client.send(planned, perf_counter())
            seen.probes.append(sample)
            seen.probe_names.append(name)
            number += 1
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
