"""`GET /pools/advice`: the planner's advice for the pools. `autoscale`: follows the advice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from subprocess import PIPE, Popen, TimeoutExpired
from time import monotonic
from typing import Any
from urllib.parse import parse_qs

import msgspec

from twostroke import child_process
from twostroke.engine.api import EngineClient
from twostroke.errors import ConfigError, EngineError, RequestError
from twostroke.log_lines import WORK
from twostroke.observe.record import StepRecord
from twostroke.route.autoscale import Autoscaler, Bounds
from twostroke.route.pool_settings import MAX_ENGINES
from twostroke.serve.error_responses import ApiError
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.routes.record_routes import pacing_of
from twostroke.serve.settings import ServeSettings

SECONDS, MAX_SECONDS = 300.0, 3600.0  # of records; the ring buffers may hold less
TARGET = 0.95  # share of requests that must meet the goals
PROCESS_S = 300.0  # time limit of the planner
DRAIN_S = 120.0  # time for the requests of an engine that leaves
log = logging.getLogger(WORK)
Json = dict[str, Any]


class PoolAdvisor:
    """Runs the planner in a process of its own, for one advice at a time."""

    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self._client, self._settings = client, settings
        self._lock = asyncio.Lock()

    async def advise(
        self,
        seconds: float = SECONDS,
        target: float = TARGET,
        max_engines: int = MAX_ENGINES,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
    ) -> Json:
        """Return the advice for the requests of the last seconds. Without `ttft_s` and `tpot_s`,
        the goals of the server count. Raise `RequestError` if there is no advice."""
        counts = self._client.pools().counts
        if ttft_s is None and tpot_s is None:
            ttft_s, tpot_s = goals_of(self._settings)
        if ttft_s is None and tpot_s is None:
            raise RequestError(
                "an advice needs a goal: start the server with --ttft-slo-ms or --itl-slo-ms, or "
                "give ttft_slo_ms or itl_slo_ms here"
            )
        async with self._lock:
            question = self._records(seconds) | {
                "counts": counts,
                "goals": {"ttft_s": ttft_s, "tpot_s": tpot_s},
                "target": target,
                "max_engines": max(max_engines, *counts.values()),
            }
            advice: Json = await asyncio.to_thread(_run_planner, question)
        if "error" in advice:
            raise RequestError(f"no advice: {advice['error']}")
        return advice

    def _records(self, seconds: float) -> Json:
        """Return the requests and steps of the last seconds, and the properties of an engine."""
        client = self._client
        since = monotonic() - seconds
        ended = client.records.requests
        if len(ended) == ended.maxlen:  # the ring buffer has dropped older requests
            since = max(since, min(record.received_s for record in ended))
        engines = client.engines_by_name().values()
        info = next(engine.info for engine in engines if engine.phase != "prefill")
        requests: list[tuple[Any, ...]] = [
            (record.received_s, record.num_prompt, len(record.token_s), record.prefix_marks)
            for record in ended
            if record.received_s >= since and len(record.token_s)
        ]
        requests += [
            (request.received_s, len(request.prompt_token_ids), None, request.prefix_marks)
            for request in client.open_requests()
        ]
        transfers = [each for each in client.transfers_by_engine_pair().values() if each.seconds]
        copied_s = sum(totals.seconds for totals in transfers)
        num_bytes = sum(totals.num_bytes for totals in transfers)
        return {
            "requests": requests,
            "bytes_per_s": num_bytes / copied_s if copied_s else None,
            "records": {
                "kv_tokens": info.kv_tokens,
                "kv_bytes": info.kv_bytes,
                "block_size": info.block_size,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_model_len": info.max_model_len,
                "kv_groups": [group._asdict() for group in info.kv_groups],
                "pacing": pacing_of(self._settings.engine, info.device != "cpu"),
                "device": info.device,
                "requests": [
                    {"received_s": record.received_s, "queued_s": record.queued_s}
                    for record in ended
                ],
                # A copy, because the buffer changes; `_run_planner` encodes it in a thread.
                "steps": [step for step in client.records.steps if step.committed_s >= since],
            },
        }


def goals_of(settings: ServeSettings) -> tuple[float | None, float | None]:
    """Return the goals of the server for TTFT and ITL in seconds."""
    config = settings.engine
    if config is None:
        return None, None
    ttft_ms, itl_ms = config.ttft_slo_ms, config.itl_slo_ms
    return ttft_ms and ttft_ms / 1e3, itl_ms and itl_ms / 1e3


def _step(record: StepRecord) -> Json:
    return {
        "device_s": record.device_s,
        "prefill": record.prefill._asdict(),
        "decode": record.decode._asdict(),
        "since_s": {"host": record.since_s.host},
        "regular": record.regular,
        "drafts": record.drafts,
    }


def _run_planner(question: Json) -> Json:
    """Return the advice of `twostroke.planner.advice`, or {"error": …}. Called in a thread."""
    question["records"]["steps"] = [_step(step) for step in question["records"]["steps"]]
    process: Popen[bytes] = child_process.start(
        "twostroke.planner.advice", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        out, err = process.communicate(msgspec.json.encode(question), timeout=PROCESS_S)
    except TimeoutExpired:
        process.kill()
        return {"error": f"the planner took more than {PROCESS_S:g} s; ask for fewer seconds"}
    if process.returncode:
        reason = err.decode(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"the planner failed: {reason}"}
    advice: Json = msgspec.json.decode(out)
    return advice


# ── the route ───────────────────────────────────────────────────────────────────────────────────


def advice_routes(service: Service) -> list[Route]:
    route = AdviceRoute(service)
    summary = "The number of engines that the planner would choose."
    return [Route("GET", "/pools/advice", route, summary, acts=True)]


class AdviceRoute:
    def __init__(self, service: Service) -> None:
        self._advisor = PoolAdvisor(service.client, service.settings)

    async def __call__(self, http: HttpRequest) -> None:
        seconds = _number(http, "seconds", SECONDS, 10.0, MAX_SECONDS)
        target = _number(http, "target", TARGET, 0.01, 1.0)
        max_engines = int(_number(http, "max_engines", MAX_ENGINES, 1, MAX_ENGINES))
        ttft_ms, itl_ms = (
            _number(http, name, 0.0, 0.001, 1e9) for name in ("ttft_slo_ms", "itl_slo_ms")
        )
        goals = (ms / 1e3 if ms else None for ms in (ttft_ms, itl_ms))
        await http.respond_json(await self._advisor.advise(seconds, target, max_engines, *goals))


def _number(http: HttpRequest, name: str, default: float, low: float, high: float) -> float:
    query = parse_qs(http.scope.get("query_string", b"").decode("latin-1"))
    if name not in query:
        return default
    with suppress(ValueError):
        if low <= (number := float(query[name][-1])) <= high:
            return number
    raise ApiError(400, f"{name} is a number from {low:g} to {high:g}", param=name)


# ── autoscaling ─────────────────────────────────────────────────────────────────────────────────


async def autoscale(
    client: EngineClient, settings: ServeSettings, clock: Callable[[], float] = monotonic
) -> None:
    """Follow the planner's advice within the bounds, until the task is cancelled."""
    assert settings.autoscale is not None
    bounds = Bounds.read(settings.autoscale)
    scaler, advisor = Autoscaler(bounds), PoolAdvisor(client, settings)
    while True:
        await asyncio.sleep(settings.autoscale_interval_s)
        await autoscale_once(client, scaler, advisor, bounds, clock)


async def autoscale_once(
    client: EngineClient,
    scaler: Autoscaler,
    advisor: PoolAdvisor,
    bounds: Bounds,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Ask for an advice, and change the pools if `scaler` decides so. Log the reason."""
    pools = client.pools()
    if pools.scaling:
        return
    try:
        found = await advisor.advise(max_engines=bounds.high)
    except RequestError as error:  # for example, too few requests: advise the present numbers
        log.debug("autoscale: %s", error)
        found = {"advice": pools.counts, "why": str(error)}
    decision = scaler.decide(clock(), client.pools().counts, found["advice"], found["why"])
    if decision is None:
        return
    changes = ", ".join(
        f"{name} {pools.counts[name]} → {count}" for name, count in decision.counts.items()
    )
    log.info("autoscale: %s: %s", changes, decision.why)
    try:
        await client.scale(decision.counts, DRAIN_S)
    except (ConfigError, EngineError, RequestError) as error:
        log.warning("autoscale: the pools stay as they were: %s", error)
