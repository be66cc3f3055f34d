"""`Board`: what the dashboard shows, as plain data, from the records the engine's client mirrors
and the totals `/metrics` shows. Times are in milliseconds here: people read them."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from time import monotonic
from uuid import uuid4

from twostroke import __version__
from twostroke.engine.api import EngineClient
from twostroke.observe.recent import Recent, Spread, Window
from twostroke.observe.record import Causes, RequestRecord, StepRecord
from twostroke.observe.totals import Totals
from twostroke.serve.parts import Json

STEPS = 400  # on the timeline
SLOWEST = 8
QUANTILES = (0.5, 0.95, 0.99)
WINDOWS: dict[str, float | None] = {"10": 10.0, "60": 60.0, "all": None}
STEP_FIELDS = (
    "ended_s",
    "decode",
    "prefill",
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
)


def _total_s(record: RequestRecord) -> float:
    return record.finished_s - record.received_s


def _ttft_s(record: RequestRecord) -> float:
    return record.ttft_s if record.token_s else _total_s(record)


def _worst_s(record: RequestRecord) -> float:
    return record.worst_gap_s


SLOW_BY = {"total": _total_s, "first": _ttft_s, "gap": _worst_s}


class Board:
    def __init__(self, client: EngineClient, totals: Totals) -> None:
        self._client = client
        self._records = client.records
        self._totals = totals
        self._id = uuid4().hex[:8]  # another after the server was started again
        self._recent = Recent(totals, monotonic())
        listeners = client.records.listeners
        listeners.insert(listeners.index(totals), self._recent)

    def tell(self, model: str, since: int, window: str, slow_by: str) -> Json:
        """`since`: the `num_steps` of the last answer; steps told then are not told again."""
        client, recent, now = self._client, self._recent, monotonic()
        load, info = client.load(), client.info
        seconds = WINDOWS[window]
        newest = self._records.steps[-1] if self._records.steps else None
        return {
            "server": {
                "id": self._id,
                "version": __version__,
                "model": model,
                "device": info.device,
                "dtype": info.dtype,
                "up": client.healthy,
                "up_s": now - recent.started_s,
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
            "window": _told_window(recent.window(now, seconds)),
            "totals": {
                "prompt_tokens": self._totals.prompt_tokens,
                "generation_tokens": self._totals.generation_tokens,
                "requests": self._totals.ended,
            },
            "roof": {"flops": info.ops_per_s or None, "bytes": info.read_bytes_per_s or None},
            "series": [[round(value, 2) for value in point] for point in recent.series(now)],
            "num_steps": recent.num_steps,
            "step_fields": STEP_FIELDS,
            "steps": self._steps(since),
            "slowest": self._slowest(now, seconds, slow_by),
        }

    def _steps(self, since: int) -> list[list[float]]:
        """Those that are new, oldest first, as `STEP_FIELDS` has them."""
        new = self._recent.num_steps - since
        new = STEPS if new < 0 else min(new, STEPS)  # below 0: another server's number
        newest = list(islice(reversed(self._records.steps), new))
        return [_told_step(record, self._recent.started_s) for record in reversed(newest)]

    def _slowest(self, now: float, seconds: float | None, slow_by: str) -> list[Json]:
        from_s = 0.0 if seconds is None else now - seconds
        ended = [record for record in list(self._records.requests) if record.finished_s >= from_s]
        return [_told_request(one, now) for one in nlargest(SLOWEST, ended, SLOW_BY[slow_by])]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _told_window(window: Window) -> Json:
    return {
        "seconds": window.seconds,
        **window.work._asdict(),
        "gap": _told_spread(window.gaps),
        "first": _told_spread(window.firsts),
    }


def _told_spread(spread: Spread) -> Json:
    found = spread.quantiles(QUANTILES)
    told = [None if one is None else _ms(one) for one in found]
    return {"count": spread.count, "p50": told[0], "p95": told[1], "p99": told[2]}


def _told_step(record: StepRecord, zero_s: float) -> list[float]:
    since, host_s = record.since_s, record.since_s.host
    if not (record.regular or record.late):
        # Nobody waited for its next token. Before the planning began there was nothing to do.
        host_s = record.committed_s - record.planned_s - record.device_s
        host_s = min(max(host_s, 0.0), since.host)
    return [
        round(record.committed_s - zero_s, 4),
        _ms(since.decode),
        _ms(since.prefill),
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
    ]


def _told_request(record: RequestRecord, now: float) -> Json:
    """Queue, prefill and decode time, of one that ended early as far as it came."""
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
        "causes": None if worst is None else _told_causes(worst),
    }


def _told_causes(causes: Causes) -> Json:
    return {name: _ms(seconds) for name, seconds in causes._asdict().items()}
