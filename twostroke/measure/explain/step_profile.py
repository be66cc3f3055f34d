"""A running server's steps taken apart by its own profiler, as a table, a page and a timeline."""

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
from twostroke.measure.report.html import bullets, footing, ledger, page, section, stacked, table
from twostroke.measure.report.tables import milliseconds

MAX_SECONDS = 60.0
STOP_TIMEOUT_S = 120.0  # torch's profiler takes its time to sum up
SHOWN_KERNELS = 8
DEFINITIONS = {
    "step": "on a CPU from the beginning of its plan to the end of its commit, on torch the "
    "device's time; steps that only prefill, only decode, or do both (mixed) are told apart",
    "share": "of all the phase's steps; a step is the mean, median the step in the middle",
    "GFLOP/s, GB/s": "what the stage computes and must read at the least, over its time",
    "of roof": "the least time that this takes at the machine's measured ceilings, over its time",
    "between steps": "not part of a step: messages, and having nothing to do",
}
Json = dict[str, Any]


async def profile_server(url: str, api_key: str | None, seconds: float) -> tuple[Json, Json]:
    """The profile of the next seconds, and the step and request records of them."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError("--seconds: give a number up to 60; a longer profile ends by itself")
    connections = Connections(Endpoint(url, api_key))
    try:
        try:
            await connections.fetch("/start_profile", {})
        except ServerError as error:
            if error.status in (404, 405):
                raise ServerError(
                    f"{url} cannot be profiled: it is not a twostroke server (of this version)"
                ) from None
            raise
        try:
            await asyncio.sleep(seconds)
        finally:  # also if it is interrupted: nobody else would stop it
            found = await connections.fetch_json("/stop_profile", {}, STOP_TIMEOUT_S)
        records = await connections.fetch_json(f"/records?seconds={seconds + 1:g}")
    finally:
        connections.close()
    return found | {"definitions": DEFINITIONS, "environment": environment()}, records


def perfetto(found: Json, records: Json) -> Json:
    if found["kind"] == "stages":
        return timeline(records, found)
    return {"traceEvents": found["events"], "displayTimeUnit": "ms", "otherData": found["server"]}


# ── as people read it ───────────────────────────────────────────────────────────────────────────


def headline(name: str, phase: Json) -> str:
    steps = phase["steps"]
    tokens = [
        f"{phase[f'{kind}_tokens'] / steps:,.1f} tokens of {kind}"
        for kind in ("prefill", "decode")
        if phase[f"{kind}_tokens"]
    ]
    return (
        f"{name}: {steps:,} {'step' if steps == 1 else 'steps'} of "
        f"{milliseconds(1e3 * phase['step_s'] / steps)}, {' and '.join(tokens)} in each"
    )


def medians(found: Json, phase: str) -> dict[str, float]:
    """Of each stage and of the step, where every step is known."""
    steps = [seconds for _, name, _, *seconds in found.get("steps", ()) if name == phase]
    if not steps:
        return {}
    stages = {name: median(row[n] for row in steps) for n, name in enumerate(found["stage_names"])}
    return stages | {"step": median(map(sum, steps))}


def stage_rows(phase: Json, server: Json, middle: dict[str, float]) -> list[list[str]]:
    """A row a stage and one for the step: mean and median time, share, rates, share of the roof."""
    steps, total = phase["steps"], phase["step_s"]
    rows = []
    for name, stage in phase["stages"].items():
        seconds, flops, num_bytes = stage["seconds"], stage["flops"], stage["num_bytes"]
        rows.append(
            [
                name,
                _per_step(seconds, steps),
                _per_step(middle[name], 1) if name in middle else "",
                f"{seconds / total:.1%}",
                f"{flops / seconds / 1e9:,.1f}" if flops and seconds else "",
                f"{num_bytes / seconds / 1e9:,.1f}" if num_bytes and seconds else "",
                _roof(stage, server),
            ]
        )
    whole = _per_step(middle["step"], 1) if middle else ""
    rows.append(["step", _per_step(total, steps), whole, "100.0%", "", "", ""])
    beside = {"between steps": phase["between_s"]} if "host_s" not in phase else phase["host_s"]
    return rows + [[name, _per_step(s, steps), *[""] * 5] for name, s in beside.items()]


def _per_step(seconds: float, steps: int) -> str:
    value = 1e3 * seconds / steps
    return f"{value:.3f} ms" if abs(value) < 10 else milliseconds(value)


def _roof(stage: Json, server: Json) -> str:
    """The least time that the machine needs for it, over what it took."""
    floors = [
        stage[work] / server[rate]
        for work, rate in (("flops", "ops_per_s"), ("num_bytes", "read_bytes_per_s"))
        if server[rate]
    ]
    floor = max(floors, default=0.0)
    return f"{floor / stage['seconds']:.0%}" if floor and stage["seconds"] else ""


HEAD = ["", "a step", "median", "share", "GFLOP/s", "GB/s", "of roof"]
KERNEL_HEAD = ["kernel", "part", "calls", "in all", "share"]


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


def notes(found: Json) -> list[str]:
    said = []
    if not found["phases"]:
        said.append("no step ran meanwhile: send requests while it profiles")
    if found["ended_by"] != "stop":
        said.append(f"ended by itself after {found['seconds']:.1f} s ({found['ended_by']})")
    if found["kind"] == "stages" and not found["server"]["read_bytes_per_s"]:
        said.append("of roof: known if the server is started with --measure-ceilings")
    return said


def title(found: Json) -> str:
    server = found["server"]
    return f"{server['model']} on {server['device']}, {found['seconds']:.1f} s"


def show_profile(console: Console, found: Json) -> None:
    console.print(Text(title(found), style="bold"))
    for name, phase in found["phases"].items():
        console.print()
        console.print(Text(headline(name, phase), style="bold"))
        _show(console, HEAD, stage_rows(phase, found["server"], medians(found, name)))
        if phase.get("kernels"):
            _show(console, KERNEL_HEAD, kernel_rows(phase, SHOWN_KERNELS))
    for note in notes(found):
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


COLORS = {"prefill": "prefill", "decode": "decode", "mixed": "queue"}
STAGE_COLORS = {  # beside prefill's and decode's: what belongs to neither
    **dict.fromkeys(("plan", "commit", "call", "inputs", "unaccounted"), "host"),
    "sampling": "preemption",
}


def profile_page(found: Json) -> str:
    phases = found["phases"]
    total = sum(phase["step_s"] for phase in phases.values()) or 1.0
    shares = [
        (f"{name} ({phase['steps']:,} steps)", phase["step_s"] / total, COLORS.get(name, "queue"))
        for name, phase in phases.items()
    ]
    body = [section("Time in steps, by phase", stacked(shares))] if phases else []
    for name, phase in phases.items():
        rows = stage_rows(phase, found["server"], medians(found, name))
        content = ledger(_stage_bars(name, phase)) + table(HEAD, rows)
        if phase.get("kernels"):
            content += table(KERNEL_HEAD, kernel_rows(phase))
        body.append(section(headline(name, phase), content))
    if said := notes(found):
        body.append(section("Notes", bullets(said)))
    kept = {key: value for key, value in found.items() if key not in ("steps", "events")}
    facts = (
        f"{sum(phase['steps'] for phase in phases.values()):,} steps in {found['seconds']:.1f} s"
    )
    return page("profile", title(found), facts, [*body, footing(kept)], kept)


def _stage_bars(name: str, phase: Json) -> list[tuple[str, float, str, str, str]]:
    """Those that took a share of the step that can be seen, the longest first."""
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
