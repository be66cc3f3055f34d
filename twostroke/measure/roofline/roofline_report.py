"""Reports of a roofline: a table, and an HTML page with both phases under one roof."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.report.charts import Axis, Series, chart
from twostroke.measure.report.html import bullets, footer, page, plots, section, table, tiles
from twostroke.measure.report.tables import milliseconds
from twostroke.measure.roofline.roofline import (
    Floor,
    MeasuredPhase,
    Roofline,
    rate_words,
    roofline_json,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def show_roofline(
    console: Console, model: str, roofline: Roofline, measured: Sequence[MeasuredPhase]
) -> None:
    console.print(
        f"[bold]{escape(model)}[/bold] on {machine_name(roofline)}: {rate_words(roofline.rate)}, "
        f"{roofline.bandwidth / 1e9:,.0f} GB/s, "
        + ("measured" if roofline.hardware.measured else "data sheet"),
        highlight=False,
    )
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("", no_wrap=True)
    for name in ("floor", "estimate", "bound by"):
        rows.add_column(name, justify="right", no_wrap=True)
    if console.width >= 70:
        for name in ("FLOPs", "bytes", "FLOPs/byte"):
            rows.add_column(name, justify="right", no_wrap=True)
    for floor in (roofline.prefill(), roofline.decode()):
        cells = [floor.name, milliseconds(1e3 * floor.floor_s)]
        cells += [milliseconds(1e3 * floor.estimate_s), floor.bound]
        if console.width >= 70:
            cells += [_count(floor.flops), _count(floor.num_bytes), f"{floor.intensity:,.1f}"]
        rows.add_row(*cells)
    console.print(rows)
    for line in facts(roofline):
        console.print(Text(line))
    for one in measured:
        console.print(Text(_measured(one, roofline)))
    console.print(Text("notes", style="bold"))
    for note in roofline.notes():
        console.print(Padding(Text(f"· {note}"), (0, 0, 0, 2), expand=False))


def facts(roofline: Roofline) -> list[str]:
    settings = roofline.settings
    lines = [
        f"ridge: {roofline.ridge:,.0f} FLOPs a byte; below it a step is memory-bound, above it "
        "compute-bound",
    ]
    if roofline.spec is None:
        return lines
    if roofline.spec.has_experts:
        used, total = roofline.experts_in_use(settings.batch)
        lines.append(
            f"parameters: {roofline.parameters / 1e9:,.2f}e9, of them "
            f"{roofline.active_parameters / 1e9:,.2f}e9 active for a token; decode at batch "
            f"{settings.batch} reads {used:,.1f} of a layer's {total:,.0f} experts"
        )
    kv = roofline.kv_bytes_per_token
    line = f"KV cache: {kv:,.0f} bytes a token ({kv / 1e6:.3f} MB)"
    if roofline.spec.has_latents:
        plain = roofline.expanded_kv_bytes_per_token
        line += f" of latents; keys and values of all heads would take {plain:,.0f}"
    lines.append(line)
    tokens = roofline.kv_tokens or 0.0
    if tokens <= 0:
        lines.append(
            f"the weights ({roofline.weight_bytes / 1e9:,.1f} GB) do not fit: use more devices, "
            "or weights of fewer bits"
        )
    else:
        lines.append(
            f"fits: {tokens:,.0f} tokens beside {roofline.weight_bytes / 1e9:,.1f} GB of weights, "
            f"or {tokens / (settings.context + 1):,.0f} requests of {settings.context:,} tokens"
        )
    compute = roofline.compute_bound_batch
    bound = f"at batch {compute:,.0f}" if math.isfinite(compute) else "at no batch"
    lines.append(
        f"batching: KV reads equal the weights at batch {roofline.kv_bound_batch:,.0f}; decode "
        f"becomes compute-bound {bound}"
    )
    return lines


def roofline_page(model: str, roofline: Roofline, measured: Sequence[MeasuredPhase]) -> str:
    prefill, decode = roofline.prefill(), roofline.decode()
    batches = [roofline.decode(batch) for batch in BATCHES]
    tpot = [(float(batch), 1e3 * one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)]
    per_s = [
        (float(batch), batch / one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)
    ]
    figures = [
        _roof(roofline, batches, measured),
        chart(
            "Tokens a second by batch, upper bound",
            [Series("", per_s, "decode", "area")],
            Axis("streams in the batch", log=True),
            Axis("tokens a second", log=True),
        ),
        chart(
            "TPOT by batch, lower bound",
            [Series("", tpot, "decode", "area")],
            Axis("streams in the batch", log=True),
            Axis("time per output token", "ms"),
        ),
    ]
    batch, prompt = roofline.settings.batch, roofline.settings.prompt
    tile_row = [
        (f"TTFT of {prompt:,} tokens, floor", milliseconds(1e3 * prefill.floor_s), "prefill"),
        (f"TPOT at batch {batch}, floor", milliseconds(1e3 * decode.floor_s), "decode"),
        ("KV bytes a token", f"{roofline.kv_bytes_per_token:,.0f}", "queue"),
        ("ridge, FLOPs a byte", f"{roofline.ridge:,.0f}", "queue"),
    ]
    head = ["", "floor", "estimate", "bound by", "FLOPs", "bytes", "FLOPs a byte"]
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
    body = [tiles(tile_row), plots(figures)]
    if measured:
        lines = bullets([_measured(one, roofline) for one in measured])
        body.append(section("Measured", lines, "last minute of a running server"))
    body += [
        section("Floors", table(head, rows), f"context {roofline.settings.context:,}"),
        section("Notes", bullets([*facts(roofline), *roofline.notes()])),
    ]
    data = roofline_json(model, roofline, measured)
    rates = f"{rate_words(roofline.rate)}, {roofline.bandwidth / 1e9:,.0f} GB/s, "
    rates += "measured" if roofline.hardware.measured else "data sheet"
    subject = f"{model} on {machine_name(roofline)}"
    return page("roofline", subject, rates, [*body, footer(data)], data)


def _roof(roofline: Roofline, batches: Sequence[Floor], measured: Sequence[MeasuredPhase]) -> str:
    prefill = roofline.prefill()
    floors = [_point(one) for one in (prefill, *batches)]
    spots = {one.name: (one.intensity, one.flops_per_s) for one in measured}
    reach = [x for x, _ in (*floors, *spots.values())]
    low, high = min(reach) / 2, 3 * max(roofline.ridge, *reach)
    roof = [(low, low * roofline.bandwidth), (roofline.ridge, roofline.rate), (high, roofline.rate)]
    return chart(
        "Both phases under one roof",
        [
            Series("roof", roof, "soft"),
            Series(f"{prefill.name}, floor", floors[:1], "prefill", "dots"),
            Series("decode, floors by batch", floors[1:], "decode", "dots"),
            *(Series(f"{name}, measured", [at], name, "rings") for name, at in spots.items()),
        ],
        Axis("FLOPs a byte", log=True),
        Axis("FLOP/s", log=True),
        marks=[(roofline.ridge, f"ridge {roofline.ridge:,.0f}")],
        wide=True,
    )


def machine_name(roofline: Roofline) -> str:
    ranks = roofline.settings.tensor_parallel
    return roofline.hardware.name + (f" × {ranks}" if ranks > 1 else "")


def _point(floor: Floor) -> tuple[float, float]:
    """Return the point of a floor on the roof."""
    return floor.intensity, floor.flops / max(floor.compute_s, floor.memory_s)


def _measured(one: MeasuredPhase, roofline: Roofline) -> str:
    compute, memory = (
        one.flops_per_s / roofline.rate,
        one.num_bytes / one.seconds / roofline.bandwidth,
    )
    return (
        f"measured, {one.name}: {rate_words(one.flops_per_s)} ({compute:.0%} of the roof), "
        f"{one.num_bytes / one.seconds / 1e9:,.1f} GB/s ({memory:.0%}), over {one.steps:,} steps"
    )


def _count(value: float) -> str:
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:,.2f} {unit}"
    return f"{value:,.0f}"
