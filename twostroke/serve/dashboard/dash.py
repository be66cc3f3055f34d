"""The dashboard: the page `/dash`, and its data (`/dash/feed`).

The page loads nothing from other hosts. It contains no data and needs no key; the feed needs a key,
as `/metrics` does. A visible page reads the feed once a second, a hidden page does not. If all
pages together ask more than `MAX_ANSWERS_PER_S` times a second, the feed answers 429.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from hashlib import sha256
from heapq import nlargest
from importlib.resources import files
from itertools import islice
from time import monotonic
from urllib.parse import parse_qs
from uuid import uuid4

from twostroke import __version__
from twostroke.engine.api import EngineClient
from twostroke.observe.recent import HOUR_S, MINUTE_S, Point, Spread, Window
from twostroke.observe.record import Causes, RequestRecord, StepRecord
from twostroke.serve.error_responses import ApiError, retry_after
from twostroke.serve.fields.response_json import Json
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import JSON, Headers, HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.monitor.ceilings_probe import IDLE_S, CeilingsProbe
from twostroke.serve.monitor.gpu import gpu_figures
from twostroke.serve.monitor.metrics import ServerMetrics

MAX_ANSWERS_PER_S = 20.0
NO_STORE = (b"cache-control", b"no-store")
STEPS = 400  # the number of steps on the timeline
SLOWEST = 8  # the number of slow requests in the list
ENGINES_S = 10.0  # the time over which each engine's work is averaged
QUANTILES = (0.5, 0.95, 0.99)
WINDOWS: dict[str, float | None] = {
    "10": 10.0,
    "60": MINUTE_S,
    "600": 600.0,
    "3600": HOUR_S,
    "all": None,
}
STEP_FIELDS = (
    "ended_s",
    "decode",
    "prefill",
    "communication",
    "drafting",
    "host",
    "idle",
    "prefill_rows",
    "prefill_tokens",
    "decode_rows",
    "written",
    "waiting",
    "running",
    "preempted",
    "kv_used",
    "engine",
)


def _total_s(record: RequestRecord) -> float:
    return record.finished_s - record.received_s


def _ttft_s(record: RequestRecord) -> float:
    return record.ttft_s if record.token_s else _total_s(record)


def _worst_s(record: RequestRecord) -> float:
    return record.worst_gap_s


SLOW_BY = {"total": _total_s, "first": _ttft_s, "gap": _worst_s}


class DashRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._data = DashData(service.client, service.metrics, service.ceilings_probe)
        self._page = files("twostroke.serve.dashboard").joinpath("dash.html").read_bytes()
        self._headers = page_headers(self._page.decode())
        # A token bucket that limits the rate of answers, and the time of its last update.
        self._tokens, self._tokens_s = MAX_ANSWERS_PER_S, 0.0

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/dash", self.page, "A page that shows the engine live.", open=True),
            Route("GET", "/dash/feed", self.feed, "The data of /dash, as JSON."),
        ]

    async def page(self, http: HttpRequest) -> None:
        await http.respond(200, self._page, self._headers)

    async def feed(self, http: HttpRequest) -> None:
        since, window, slow_by = _query(http)
        self._limit_rate()
        model = self._service.models[0]
        data = self._data.snapshot(model, since, window, slow_by, http.may_see)
        data["server"]["draining"] = self._service.admission.draining
        await http.respond_json(data, (*JSON, NO_STORE))

    def _limit_rate(self) -> None:
        now = monotonic()
        left = self._tokens + (now - self._tokens_s) * MAX_ANSWERS_PER_S
        self._tokens, self._tokens_s = min(left, MAX_ANSWERS_PER_S), now
        if self._tokens < 1.0:
            message = "too many clients read the dashboard's data; ask less often"
            raise ApiError(429, message, code="too_many_watchers", headers=retry_after(2))
        self._tokens -= 1.0


def page_headers(page: str) -> Headers:
    """Return headers that allow only the page's own script and style, and this server."""
    script, style = (_hash_of(tag, page) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        NO_STORE,
    )


def _hash_of(tag: str, page: str) -> str:
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _query(http: HttpRequest) -> tuple[int, str, str]:
    query = parse_qs(http.scope.get("query_string", b"").decode("latin-1"))
    since = query.get("since", ["0"])[-1]
    window, slow_by = query.get("window", ["60"])[-1], query.get("slow", ["total"])[-1]
    if not (since.isascii() and since.isdigit() and len(since) < 16):
        raise ApiError(400, "since must be the num_steps of the last answer", param="since")
    for name, value, known in (("window", window, WINDOWS), ("slow", slow_by, SLOW_BY)):
        if value not in known:
            raise ApiError(400, f"{name} must be one of {', '.join(known)}", param=name)
    return int(since), window, slow_by


# ── the data ────────────────────────────────────────────────────────────────────────────────────


class DashData:
    """Makes the data of the page, from the records of the engine and the totals of `/metrics`. Most
    times are in milliseconds, because people read them."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, probe: CeilingsProbe) -> None:
        self._client = client
        self._records = client.records
        self._totals, self._recent = metrics.totals, metrics.recent
        self._id = uuid4().hex[:8]  # changes when the server restarts
        self._probe = probe

    def snapshot(
        self,
        model: str,
        since: int,
        window: str,
        slow_by: str,
        may_see: Callable[[RequestRecord], bool],
    ) -> Json:
        """Return the data. `since`: the `num_steps` of the previous answer; only later steps are
        included. `may_see`: returns whether the client may see a request."""
        client, recent, now = self._client, self._recent, monotonic()
        load, info = client.load(), client.info
        seconds = WINDOWS[window]
        up_s = now - recent.started_s
        span_s = max(min(seconds or HOUR_S, up_s), MINUTE_S)  # the time that the curves show
        newest = self._records.steps[-1] if self._records.steps else None
        if not (load.running or load.waiting):
            self._probe.measure_if_idle(
                now - (recent.started_s if newest is None else newest.committed_s)
            )
        return {
            "server": {
                "id": self._id,
                "version": __version__,
                "model": model,
                "device": info.device,
                "weights": info.weights or info.dtype,
                "weight_bytes": info.weight_bytes,
                "up": client.healthy,
                "up_s": up_s,
                "restarts": client.num_restarts,
            },
            "load": {
                "waiting": load.waiting,
                "running": load.running,
                "reading": newest.prefill.rows if newest is not None and load.running else 0,
                "max_running": info.max_num_seqs,
            },
            "kv": load.kv._asdict(),
            "kv_token_bytes": info.kv_bytes / info.kv_tokens if info.kv_tokens else 0.0,
            "window": _window_json(recent.window(now, seconds)),
            "totals": {
                "prompt_tokens": self._totals.prompt_tokens,
                "generation_tokens": self._totals.generation_tokens,
                "requests": self._totals.ended,
            },
            "engines": self._engines(now),
            "transfers": self._transfers(),
            "roof": self._roof_json(),
            "gpu": _gpu_json(info.device),
            "series_s": span_s,
            "series": [_point_json(point) for point in recent.series(now, span_s)],
            "num_steps": recent.num_steps,
            "step_fields": STEP_FIELDS,
            "steps": self._steps(since),
            "slowest": self._slowest(now, seconds, slow_by, may_see),
        }

    def _engines(self, now: float) -> list[Json]:
        """Return the load and the recent work of each engine; [] if there is only one engine."""
        engines = self._client.engines_by_name()
        if len(engines) < 2:
            return []
        seconds = max(1e-9, min(ENGINES_S, now - self._recent.started_s))
        work = {name: [0, 0, 0.0] for name in engines}
        for record in reversed(self._records.steps):
            if record.committed_s < now - seconds:
                break
            if record.engine in work:
                of_engine = work[record.engine]
                of_engine[0] += record.prefill.tokens
                of_engine[1] += record.num_written
                of_engine[2] += record.device_s
        found = []
        for name, engine in engines.items():
            load, (prefilled, written, device_s) = engine.load(), work[name]
            found.append(
                {
                    "name": name,
                    "phase": engine.phase,
                    "up": engine.healthy,
                    "restarts": engine.num_restarts,
                    "waiting": load.waiting,
                    "running": load.running,
                    "kv_taken": load.kv.taken,
                    "prefill_rate": prefilled / seconds,
                    "written_rate": written / seconds,
                    "busy": min(1.0, device_s / seconds),
                }
            )
        return found

    def _transfers(self) -> list[Json]:
        """Return the KV transfers since the start, by sender and receiver."""
        return [
            {
                "sender": sender,
                "receiver": receiver,
                "fetched": totals.fetched,
                "failed": totals.failed,
                "bytes": totals.num_bytes,
                "ms": _ms(totals.seconds),
            }
            for (sender, receiver), totals in self._client.transfers_by_engine_pair().items()
        ]

    def _roof_json(self) -> Json:
        ceilings = self._probe.ceilings
        return {
            "flops": ceilings.ops_per_s or None,
            "bytes": ceilings.read_bytes_per_s or None,
            # The idle time after which the ceilings will be measured; None: they will not be.
            "idle_s": IDLE_S if self._probe.is_pending else None,
        }

    def _steps(self, since: int) -> list[list[float | str]]:
        """Return the steps after `since`, oldest first, with the fields of `STEP_FIELDS`."""
        new = self._recent.num_steps - since
        # If the number is negative, `since` is from another process of the server.
        new = STEPS if new < 0 else min(new, STEPS)
        newest = list(islice(reversed(self._records.steps), new))
        return [_step_row(record, self._recent.started_s) for record in reversed(newest)]

    def _slowest(
        self,
        now: float,
        seconds: float | None,
        slow_by: str,
        may_see: Callable[[RequestRecord], bool],
    ) -> list[Json]:
        from_s = 0.0 if seconds is None else now - seconds
        records = list(self._records.requests)
        ended = [each for each in records if each.finished_s >= from_s and may_see(each)]
        return [_request_json(each, now) for each in nlargest(SLOWEST, ended, SLOW_BY[slow_by])]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _point_json(point: Point) -> list[float | None]:
    """Return age, rates per second and load, then quantiles in milliseconds."""
    return [
        *(None if value is None else round(value, 4) for value in point[:9]),
        *(None if value is None else _ms(value) for value in point[9:]),
    ]


def _gpu_json(device: str) -> Json | None:
    figures = gpu_figures(device) if device.startswith("cuda") else None
    return None if figures is None else figures._asdict()


def _window_json(window: Window) -> Json:
    return {
        "seconds": window.seconds,
        **window.work._asdict(),
        "gap": _spread_json(window.gaps),
        "first": _spread_json(window.ttfts),
    }


def _spread_json(spread: Spread) -> Json:
    values = [None if each is None else _ms(each) for each in spread.quantiles(QUANTILES)]
    return {"count": spread.count, "p50": values[0], "p95": values[1], "p99": values[2]}


def _step_row(record: StepRecord, zero_s: float) -> list[float | str]:
    since, host_s = record.since_s, record.since_s.host
    if not (record.regular or record.late):
        # No stream waited for this step. The time before its planning is idle time, not host time.
        host_s = record.committed_s - record.planned_s - record.device_s - since.drafting
        host_s = min(max(host_s, 0.0), since.host)
    return [
        round(record.committed_s - zero_s, 4),
        _ms(since.decode),
        _ms(since.prefill),
        _ms(since.communication),
        _ms(since.drafting),
        _ms(host_s),
        _ms(since.host - host_s),
        record.prefill.rows,
        record.prefill.tokens,
        record.decode.rows,
        record.num_written,
        record.waiting,
        record.running,
        record.preempted,
        record.kv.used,
        record.engine,
    ]


def _request_json(record: RequestRecord, now: float) -> Json:
    """Return the figures of an ended request. A phase that it did not reach lasts until its end."""
    scheduled_s = record.scheduled_s or record.finished_s
    first_s = record.first_token_s or record.finished_s
    worst = record.worst_gap
    return {
        "id": record.request_id,
        "ago_s": round(now - record.finished_s, 1),
        "reason": str(record.finish_reason),
        "prompt": record.num_prompt,
        "cached": record.num_cached,
        "written": len(record.token_s),
        "preempted": len(record.preempted),
        "total": _ms(record.finished_s - record.received_s),
        "queue": _ms(scheduled_s - record.received_s),
        "prefill": _ms(first_s - scheduled_s),
        "decode": _ms(record.decode_s),
        "worst_gap": _ms(record.worst_gap_s),
        "route": record.route,
        "causes": None if worst is None else _causes_json(worst),
    }


def _causes_json(causes: Causes) -> Json:
    return {name: _ms(seconds) for name, seconds in causes._asdict().items()}
