"""A running server's steps taken apart by its own profiler, as a table, a page and a timeline."""

from __future__ import annotations

import asyncio
from html import escape
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.errors import ConfigError
from twostroke.measure.html import page, table
from twostroke.measure.http import Connections, Endpoint, ServerError
from twostroke.measure.result import environment
from twostroke.measure.tables import milliseconds
from twostroke.measure.timeline import timeline

MAX_SECONDS = 60.0
STOP_TIMEOUT_S = 120.0  # torch's profiler takes its time to sum up
SHOWN_KERNELS = 8
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
    return found | {"environment": environment()}, records


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


def profile_page(found: Json) -> str:
    body = [f"<h1>{escape(title(found))}</h1>"]
    for name, phase in found["phases"].items():
        body += [f"<h2>{escape(headline(name, phase))}</h2>"]
        body += [table(HEAD, stage_rows(phase, found["server"], medians(found, name)))]
        if phase.get("kernels"):
            body += [table(KERNEL_HEAD, kernel_rows(phase))]
    body += [f'<p class="dim">{escape(note)}</p>' for note in notes(found)]
    kept = {key: value for key, value in found.items() if key not in ("steps", "events")}
    return page(f"twostroke profile: {found['server']['model']}", body, kept)
