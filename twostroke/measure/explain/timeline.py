"""Converts step and request records to a timeline in the format of Perfetto and chrome://tracing.

Each engine is a process with lanes for scheduler, prefill, decode and host, and with counters for
the queue, the tokens of a step and the KV cache. One more process has a track for each request,
with flows to the steps that served the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

ENGINE, REQUESTS = 1, 2
FIRST_ENGINE = 10  # process id of the first of several engines
SCHEDULER, PREFILL, DECODE, HOST, STAGES = 1, 2, 3, 4, 5
LANES = {SCHEDULER: "scheduler", PREFILL: "prefill", DECODE: "decode", HOST: "host (idle device)"}
STAGE_LANE = "stages (of all layers together)"
Event = dict[str, Any]


def timeline(records: dict[str, Any], profile: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the timeline of `/records` and optionally of a stage profile of `/stop_profile`."""
    steps, requests = records["steps"], records["requests"]
    starts = [step["planned_s"] for step in steps] + [one["received_s"] for one in requests]
    starts += [] if profile is None else [began for _, _, began, *_ in profile["steps"][:1]]
    begin = min(starts, default=0.0)
    pids = _pids(steps)
    events = [*_names(pids, requests), *_steps(steps, begin, pids)]
    events += _requests(requests, steps, begin, pids)
    if profile is not None:
        events += _stages(profile, begin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": records["model"],
            "device": records["device"],
            "begin_s": begin,
            "attributed": "in a mixed step, decode has the time that its slots take alone, prefill "
            "the rest",
        },
    }


def _pids(steps: list[Any]) -> dict[str, int]:
    """Return the process id of each engine by name."""
    names = sorted({step["engine"] for step in steps})
    return {name: n for n, name in enumerate(names, FIRST_ENGINE)} if any(names) else {"": ENGINE}


def _names(pids: dict[str, int], requests: list[Any]) -> Iterable[Event]:
    for pid, name in (
        *((pid, name or "engine") for name, pid in pids.items()),
        (REQUESTS, "requests"),
    ):
        yield _meta("process_name", pid, 0, name=name)
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    for pid in pids.values():
        for tid, name in LANES.items():
            yield _meta("thread_name", pid, tid, name=name)
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)
    for tid, request in enumerate(requests, 1):
        yield _meta("thread_name", REQUESTS, tid, name=request["request_id"])


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _steps(steps: list[Any], begin: float, pids: dict[str, int]) -> Iterable[Event]:
    for step in steps:
        pid = pids[step["engine"]]
        committed = _us(step["committed_s"] - begin)
        work = 1e6 * step["device_s"]
        started = committed - work
        planned, launched = _us(step["planned_s"] - begin), _us(step["launched_s"] - begin)
        name = f"step {step['step']}"
        yield _slice(pid, SCHEDULER, f"plan {step['step']}", planned, launched - planned, {
            "waiting": step["waiting"], "running": step["running"], "preempted": step["preempted"],
        })  # fmt: skip
        share = _prefill_share(step)
        for lane, phase, size in (
            (PREFILL, "prefill", work * share),
            (DECODE, "decode", work * (1 - share)),
        ):
            done = step[phase]
            if not done["tokens"]:
                continue
            at = started if phase == "prefill" else committed - size
            args = {"step": step["step"], "predicted_ms": _ms(step["predicted_s"]), **done}
            yield _slice(pid, lane, name, at, size, args)
        if step["host_gap_s"] > 0:
            gap = 1e6 * step["host_gap_s"]
            yield _slice(pid, HOST, "idle", started - gap, gap, {"step": step["step"]})
        tokens = {"prefill": step["prefill"]["tokens"], "decode": step["decode"]["tokens"]}
        yield _counter(pid, "tokens in a step", started, tokens)
        yield _counter(
            pid, "requests", planned, {"running": step["running"], "waiting": step["waiting"]}
        )
        yield _counter(pid, "KV tokens", committed, {
            name: step["kv"][name] for name in ("used", "fragmented", "cached", "free")
        })  # fmt: skip


def _stages(profile: dict[str, Any], begin: float) -> Iterable[Event]:
    yield _meta("thread_name", ENGINE, STAGES, name=STAGE_LANE)
    yield _meta("thread_sort_index", ENGINE, STAGES, sort_index=STAGES)
    for number, phase, began_s, *seconds in profile["steps"]:
        at, args = _us(began_s - begin), {"step": number, "phase": phase}
        for name, size_s in zip(profile["stage_names"], seconds, strict=True):
            yield _slice(ENGINE, STAGES, name, at, _us(size_s), args)
            at += max(0.0, _us(size_s))


def _prefill_share(step: Any) -> float:
    """Return prefill's share of a step's time. For a mixed step the causes of its gap decide."""
    prefill, decode = step["prefill"]["tokens"], step["decode"]["tokens"]
    if not prefill or not decode:
        return float(bool(prefill))
    causes = step["since_s"]
    both = causes["prefill"] + causes["decode"]
    return causes["prefill"] / both if both else prefill / (prefill + decode)


def _requests(
    requests: list[Any], steps: list[Any], begin: float, pids: dict[str, int]
) -> Iterable[Event]:
    known = {step["step"]: step for step in steps}
    flow = 0
    for tid, one in enumerate(requests, 1):
        spans = [
            ("queued", one["received_s"], one["scheduled_s"]),
            ("prefill", one["scheduled_s"], one["first_token_s"]),
            ("decode", one["first_token_s"], (one["token_s"] or [0.0])[-1]),
        ]
        args = {
            "prompt_tokens": one["num_prompt"],
            "cached_tokens": one["num_cached"],
            "tokens": len(one["token_s"]),
            "finish_reason": one["finish_reason"],
        }
        if one["stays"]:
            args["route"] = one["route"]
        for name, start, end in (*spans, *_transfers(one)):
            if start and end > start:
                at = _us(start - begin)
                yield _slice(REQUESTS, tid, name, at, 1e6 * (end - start), args)
        for when, tokens in one["preempted"]:
            yield {
                "ph": "i", "s": "t", "name": "preempted", "pid": REQUESTS, "tid": tid,
                "ts": _us(when - begin), "args": {"tokens_to_recompute": tokens},
            }  # fmt: skip
        served = [(number, PREFILL) for _, number, _, _ in one["chunks"]]
        served += [(number, DECODE) for number in one["token_step"][1:]]
        for number, lane in served:
            step = known.get(number)
            if step is None:
                continue
            flow += 1
            at = _us(step["committed_s"] - begin) - 0.5 * 1e6 * step["device_s"]
            begun = max(at, _us(one["scheduled_s"] - begin))
            yield _flow("s", flow, REQUESTS, tid, begun)
            yield _flow("f", flow, pids[step["engine"]], lane, max(at, begun))


def _transfers(request: Any) -> Iterable[tuple[str, float, float]]:
    """Yield the name, start and end of each transfer of a request between engines."""
    for before, stay in pairwise(request["stays"]):
        ended_s = stay["fetched_s"] or stay["began_s"]
        yield f"{before['engine']} → {stay['engine']}", stay["began_s"], ended_s


def _flow(kind: str, number: int, pid: int, tid: int, at: float) -> Event:
    event: Event = {
        "ph": kind, "id": number, "name": "served by", "cat": "flow",
        "pid": pid, "tid": tid, "ts": at,
    }  # fmt: skip
    return event | ({"bp": "e"} if kind == "f" else {})


def _slice(pid: int, tid: int, name: str, at: float, size: float, args: Event) -> Event:
    return {
        "ph": "X", "name": name, "cat": "twostroke", "pid": pid, "tid": tid,
        "ts": at, "dur": max(0.0, size), "args": args,
    }  # fmt: skip


def _counter(pid: int, name: str, at: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": values}


def _us(seconds: float) -> float:
    return 1e6 * seconds


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
