"""Profiles the steps of a running server, and shows the profile as a table, an HTML page and a
timeline.

A profile has one of two kinds: "stages" (of the native decoder) or "kernels" (of torch).
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.errors import ConfigError
from twostroke.measure.explain.timeline import timeline
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.result import environment
from twostroke.measure.report.html import bullets, footer, ledger, page, section, stacked, table
from twostroke.measure.report.tables import milliseconds

MAX_SECONDS = 60.0
STOP_TIMEOUT_S = 120.0  # torch's profiler takes long to summarise
SHOWN_KERNELS = 8
DEFINITIONS = {
    "step": "with the native kernels the time from the start of the plan to the end of the commit, "
    "with torch the time on the device; steps with prefill, with decode and with both (mixed) are "
    "separate",
    "mean, median": "time of the stage in a step",
    "share": "part of the stage in the time of all steps of the phase",
    "GFLOP/s, GB/s": "operations of the stage and the bytes it must read, divided by its time",
    "of roofline": "the shortest possible time at the machine's measured ceilings, divided by the "
    "time",
    "between steps": "time outside steps: messages and idle time",
}
Json = dict[str, Any]


async def profile_server(url: str, api_key: str | None, seconds: float) -> tuple[Json, Json]:
    """Return the profile of the next seconds, and the step and request records of that time."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError("--seconds must be above 0 and at most 60")
    connections = Connections(Endpoint(url, api_key))
    try:
        try:
            await connections.fetch("/start_profile", {})
        except ServerError as error:
            if error.status in (404, 405):
                raise ServerError(
                    f"{url} cannot be profiled: the server is not twostroke, or has another version"
                ) from None
            raise
        try:
            await asyncio.sleep(seconds)
        finally:  # an interruption must stop the profile, too
            profile = await connections.fetch_json("/stop_profile", {}, STOP_TIMEOUT_S)
        records = await connections.fetch_json(f"/records?seconds={seconds + 1:g}")
    finally:
        connections.close()
    return profile | {"definitions": DEFINITIONS, "environment": environment()}, records


def perfetto_trace(profile: Json, records: Json) -> Json:
    """Return the timeline. A profile of kernels has its own events; a profile of stages is drawn
    over the step and request records."""
    if profile["kind"] == "stages":
        return timeline(records, profile)
    return {
        "traceEvents": profile["events"],
        "displayTimeUnit": "ms",
        "otherData": profile["server"],
    }


# ── reports ─────────────────────────────────────────────────────────────────────────────────────


def headline(name: str, phase: Json) -> str:
    steps = phase["steps"]
    tokens = [
        f"{phase[f'{kind}_tokens'] / steps:,.1f} {kind} tokens"
        for kind in ("prefill", "decode")
        if phase[f"{kind}_tokens"]
    ]
    return (
        f"{name}: {steps:,} {'step' if steps == 1 else 'steps'} of "
        f"{milliseconds(1e3 * phase['step_s'] / steps)}, {' and '.join(tokens)} a step"
    )


def medians(profile: Json, phase: str) -> dict[str, float]:
    """Return the median seconds of each stage and of the step; {} if the profile has only sums."""
    # A row: number, phase, start, and the seconds of each stage.
    steps = [seconds for _, name, _, *seconds in profile.get("steps", ()) if name == phase]
    if not steps:
        return {}
    stages = {
        name: median(row[n] for row in steps) for n, name in enumerate(profile["stage_names"])
    }
    return stages | {"step": median(map(sum, steps))}


def stage_rows(phase: Json, server: Json, step_medians: dict[str, float]) -> list[list[str]]:
    """Return a row for each stage, a row for the step, and rows for the time outside the stages,
    with the columns of `HEAD`."""
    steps, total = phase["steps"], phase["step_s"]
    rows = []
    for name, stage in phase["stages"].items():
        seconds, flops, num_bytes = stage["seconds"], stage["flops"], stage["num_bytes"]
        rows.append(
            [
                name,
                _per_step(seconds, steps),
                _per_step(step_medians[name], 1) if name in step_medians else "",
                f"{seconds / total:.1%}",
                f"{flops / seconds / 1e9:,.1f}" if flops and seconds else "",
                f"{num_bytes / seconds / 1e9:,.1f}" if num_bytes and seconds else "",
                _roof(stage, server),
            ]
        )
    whole = _per_step(step_medians["step"], 1) if step_medians else ""
    rows.append(["step", _per_step(total, steps), whole, "100.0%", "", "", ""])
    # A profile of kernels has several times of the host, which may overlap with the device's time.
    outside = phase["host_s"] if "host_s" in phase else {"between steps": phase["between_s"]}
    return rows + [[name, _per_step(s, steps), *[""] * 5] for name, s in outside.items()]


def _per_step(seconds: float, steps: int) -> str:
    value = 1e3 * seconds / steps
    return f"{value:.3f} ms" if abs(value) < 10 else milliseconds(value)


def _roof(stage: Json, server: Json) -> str:
    """Return the shortest possible time of the stage, divided by its time."""
    floors = [
        stage[work] / server[rate]
        for work, rate in (("flops", "ops_per_s"), ("num_bytes", "read_bytes_per_s"))
        if server[rate]
    ]
    floor = max(floors, default=0.0)
    return f"{floor / stage['seconds']:.0%}" if floor and stage["seconds"] else ""


HEAD = ["", "mean", "median", "share", "GFLOP/s", "GB/s", "of roofline"]
KERNEL_HEAD = ["kernel", "stage", "calls", "total", "share"]


def kernel_rows(phase: Json, count: int | None = None) -> list[list[str]]:
    return [
        [
            one["name"],
            one["stage"],
            f"{one['calls']:,}",
            milliseconds(1e3 * one["seconds"]),
            f"{one['seconds'] / phase['step_s']:.1%}",
        ]
        for one in phase.get("kernels", [])[:count]
    ]


def notes(profile: Json) -> list[str]:
    lines = []
    if not profile["phases"]:
        lines.append("no step ran: send requests during the profile")
    if profile["ended_by"] != "stop":
        lines.append(
            f"the profile ended by itself after {profile['seconds']:.1f} s ({profile['ended_by']})"
        )
    if profile["kind"] == "stages" and not profile["server"]["read_bytes_per_s"]:
        lines.append("no share of the roofline: start the server with --measure-ceilings")
    return lines


def title(profile: Json) -> str:
    server = profile["server"]
    return f"{server['model']} on {server['device']}, {profile['seconds']:.1f} s"


def show_profile(console: Console, profile: Json) -> None:
    console.print(Text(title(profile), style="bold"))
    for name, phase in profile["phases"].items():
        console.print()
        console.print(Text(headline(name, phase), style="bold"))
        _show(console, HEAD, stage_rows(phase, profile["server"], medians(profile, name)))
        if phase.get("kernels"):
            _show(console, KERNEL_HEAD, kernel_rows(phase, SHOWN_KERNELS))
    for note in notes(profile):
        console.print(Text(f"· {note}", style="dim"))


def _show(console: Console, head: list[str], rows: list[list[str]]) -> None:
    used = [n for n in range(1, len(head)) if any(row[n] for row in rows)]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(head[0], no_wrap=True, max_width=max(16, console.width - 44))
    for n in used:
        shown.add_column(head[n], no_wrap=True, justify="right")
    for row in rows:
        shown.add_row(*(Text(row[n]) for n in (0, *used)))
    console.print(shown)


# Phase → name of a color in `report/html.py`.
COLORS = {"prefill": "prefill", "decode": "decode", "mixed": "queue"}
# These stages have the same color in all phases. All other stages have the color of the phase.
STAGE_COLORS = {
    **dict.fromkeys(("plan", "commit", "call", "inputs", "unaccounted"), "host"),
    "sampling": "preemption",
}


def profile_page(profile: Json) -> str:
    phases = profile["phases"]
    total = sum(phase["step_s"] for phase in phases.values()) or 1.0
    shares = [
        (f"{name} ({phase['steps']:,} steps)", phase["step_s"] / total, COLORS.get(name, "queue"))
        for name, phase in phases.items()
    ]
    body = [section("Time in steps, by phase", stacked(shares))] if phases else []
    for name, phase in phases.items():
        rows = stage_rows(phase, profile["server"], medians(profile, name))
        content = ledger(_stage_bars(name, phase)) + table(HEAD, rows)
        if phase.get("kernels"):
            content += table(KERNEL_HEAD, kernel_rows(phase))
        body.append(section(headline(name, phase), content))
    if lines := notes(profile):
        body.append(section("Notes", bullets(lines)))
    kept = {key: value for key, value in profile.items() if key not in ("steps", "events")}
    facts = (
        f"{sum(phase['steps'] for phase in phases.values()):,} steps in {profile['seconds']:.1f} s"
    )
    return page("profile", title(profile), facts, [*body, footer(kept)], kept)


def _stage_bars(name: str, phase: Json) -> list[tuple[str, float, str, str, str]]:
    """Return a bar for each stage with at least 1% of the time, the longest first."""
    stages = sorted(phase["stages"].items(), key=lambda pair: -pair[1]["seconds"])
    return [
        (
            stage,
            one["seconds"] / phase["step_s"],
            STAGE_COLORS.get(stage, COLORS.get(name, "queue")),
            _per_step(one["seconds"], phase["steps"]),
            "",
        )
        for stage, one in stages
        if one["seconds"] >= 0.01 * phase["step_s"]
    ]
