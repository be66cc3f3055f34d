"""A roofline as a table and as a picture: both phases under one roof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.charts import Series, chart
from twostroke.measure.html import page, table, tiles
from twostroke.measure.result import environment
from twostroke.measure.roofline import Floor, MeasuredPhase, Roofline
from twostroke.measure.tables import milliseconds

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def show_roofline(
    console: Console, model: str, found: Roofline, measured: Sequence[MeasuredPhase]
) -> None:
    hardware, settings = found.hardware, found.settings
    console.print(
        f"[bold]{escape(model)}[/bold] on {hardware.name}"
        + (f" × {settings.tensor_parallel}" if settings.tensor_parallel > 1 else "")
        + f": {_rate(found.rate)}, {found.bandwidth / 1e9:,.0f} GB/s, "
        + ("measured" if hardware.measured else "data sheet"),
        highlight=False,
    )
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("", no_wrap=True)
    for name in ("floor", "estimate", "bound by"):
        rows.add_column(name, justify="right", no_wrap=True)
    if console.width >= 70:
        for name in ("FLOPs", "bytes", "FLOPs/byte"):
            rows.add_column(name, justify="right", no_wrap=True)
    for floor in (found.prefill(), found.decode()):
        cells = [floor.name, milliseconds(1e3 * floor.floor_s)]
        cells += [milliseconds(1e3 * floor.estimate_s), floor.bound]
        if console.width >= 70:
            cells += [_count(floor.flops), _count(floor.num_bytes), f"{floor.intensity:,.1f}"]
        rows.add_row(*cells)
    console.print(rows)
    for line in facts(found):
        console.print(Text(line))
    for one in measured:
        console.print(Text(_measured(one, found)))
    console.print(Text("notes", style="bold"))
    for note in found.notes():
        console.print(Padding(Text(f"· {note}"), (0, 0, 0, 2), expand=False))


def facts(found: Roofline) -> list[str]:
    settings = found.settings
    lines = [
        f"ridge: {found.ridge:,.0f} FLOPs a byte; below it memory decides, above it products",
    ]
    if found.spec is None:
        return lines
    kv = found.kv_bytes_per_token
    lines.append(f"KV cache: {kv:,.0f} bytes a token ({kv / 1e6:.3f} MB)")
    tokens = found.kv_tokens or 0.0
    if tokens <= 0:
        lines.append(
            f"the weights ({found.weight_bytes / 1e9:,.1f} GB) do not fit: take more devices, or "
            "fewer bits"
        )
    else:
        lines.append(
            f"fits: {tokens:,.0f} tokens beside {found.weight_bytes / 1e9:,.1f} GB of weights, or "
            f"{tokens / (settings.context + 1):,.0f} requests of {settings.context:,} tokens"
        )
    compute = found.compute_bound_batch
    when = f"at batch {compute:,.0f}" if math.isfinite(compute) else "at no batch"
    lines.append(
        f"batching: KV reads equal the weights at batch {found.kv_bound_batch:,.0f}; decode "
        f"becomes compute-bound {when}"
    )
    return lines


def roofline_page(model: str, found: Roofline, measured: Sequence[MeasuredPhase]) -> str:
    prefill, decode = found.prefill(), found.decode()
    batches = [found.decode(batch) for batch in BATCHES]
    points = [_point(one) for one in (prefill, decode, *batches)]
    points += [(one.intensity, one.flops_per_s) for one in measured]
    low = min(point[0] for point in points) / 2
    high = max(found.ridge, *(point[0] for point in points)) * 3
    roof = [(low, low * found.bandwidth), (found.ridge, found.rate), (high, found.rate)]
    series = [
        Series("roof", roof, "dim"),
        Series(f"{prefill.name}, floor", [points[0]], "prefill", dots=True),
        Series("decode, floors by batch", [_point(one) for one in batches], "decode", dots=True),
    ]
    if measured:
        spots = [(one.intensity, one.flops_per_s) for one in measured]
        series.append(Series("measured", spots, "good", dots=True))
    picture = chart(
        "Both phases under one roof",
        series,
        "FLOPs a byte",
        "FLOP/s",
        x_log=True,
        y_log=True,
        marks=[(found.ridge, f"ridge {found.ridge:,.0f}")],
    )
    per_s = [
        (float(batch), batch / one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)
    ]
    tpot = [(float(batch), 1e3 * one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)]
    plots = [
        picture,
        chart(
            "Tokens a second by batch, at most",
            [Series("", per_s, "decode")],
            "streams",
            "tokens a second",
            x_log=True,
            y_log=True,
        ),
        chart("TPOT by batch, at least", [Series("", tpot, "decode")], "streams", "ms", x_log=True),
    ]
    figures = [
        (f"TTFT of {found.settings.prompt:,} tokens, floor", milliseconds(1e3 * prefill.floor_s)),
        (f"TPOT, batch {found.settings.batch}, floor", milliseconds(1e3 * decode.floor_s)),
        ("KV bytes a token", f"{found.kv_bytes_per_token:,.0f}"),
        ("ridge, FLOPs a byte", f"{found.ridge:,.0f}"),
    ]
    head = ["", "floor", "estimate", "bound by", "FLOPs", "bytes", "FLOPs/byte"]
    rows = [
        [
            one.name,
            milliseconds(1e3 * one.floor_s),
            milliseconds(1e3 * one.estimate_s),
            one.bound,
            _count(one.flops),
            _count(one.num_bytes),
            f"{one.intensity:,.1f}",
        ]
        for one in (prefill, *batches)
    ]
    said = [*facts(found), *(_measured(one, found) for one in measured), *found.notes()]
    body = [
        f"<h1>{escape(model)} on {escape(found.hardware.name)}</h1>",
        tiles(figures),
        f'<div class="plots">{"".join(plots)}</div>',
        "<h2>Floors</h2>",
        table(head, rows),
        "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>",
    ]
    data = found.as_json() | {"environment": environment()}
    return page(f"twostroke roofline: {model}", body, data)


def _point(floor: Floor) -> tuple[float, float]:
    """Where the work lies on the roof: at its floor."""
    return floor.intensity, floor.flops / max(floor.compute_s, floor.memory_s)


def _measured(one: MeasuredPhase, found: Roofline) -> str:
    compute, memory = one.flops_per_s / found.rate, one.num_bytes / one.seconds / found.bandwidth
    return (
        f"measured, {one.name}: {_rate(one.flops_per_s)} ({compute:.0%} of the roof), "
        f"{one.num_bytes / one.seconds / 1e9:,.1f} GB/s ({memory:.0%}), over {one.steps:,} steps"
    )


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def _count(value: float) -> str:
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:,.2f} {unit}"
    return f"{value:,.0f}"
