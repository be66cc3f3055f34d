"""A roofline as a table and as a picture: both phases under one roof."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.report.charts import Series, chart
from twostroke.measure.report.html import bullets, footing, page, plots, section, table, tiles
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
    console: Console, model: str, found: Roofline, measured: Sequence[MeasuredPhase]
) -> None:
    console.print(
        f"[bold]{escape(model)}[/bold] on {machine_name(found)}: {rate_words(found.rate)}, "
        f"{found.bandwidth / 1e9:,.0f} GB/s, "
        + ("measured" if found.hardware.measured else "data sheet"),
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
    if found.spec.has_experts:
        used, of = found.experts_in_use(settings.batch)
        lines.append(
            f"parameters: {found.parameters / 1e9:,.2f}e9, of which a token goes through "
            f"{found.active_parameters / 1e9:,.2f}e9; decode at batch {settings.batch} reads "
            f"{used:,.1f} of a layer's {of:,.0f} experts"
        )
    kv = found.kv_bytes_per_token
    held = f"KV cache: {kv:,.0f} bytes a token ({kv / 1e6:.3f} MB)"
    if found.spec.has_latents:
        plain = found.expanded_kv_bytes_per_token
        held += f" of latents; keys and values of all heads would take {plain:,.0f}"
    lines.append(held)
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
    tpot = [(float(batch), 1e3 * one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)]
    per_s = [
        (float(batch), batch / one.floor_s) for batch, one in zip(BATCHES, batches, strict=True)
    ]
    figures = [
        _roof(found, batches, measured),
        chart(
            "Tokens a second by batch, at most",
            [Series("", per_s, "decode", "area")],
            "streams that decode together",
            "tokens a second",
            x_log=True,
            y_log=True,
        ),
        chart(
            "TPOT by batch, at least",
            [Series("", tpot, "decode", "area")],
            "streams that decode together",
            "time per output token",
            y_unit="ms",
            x_log=True,
        ),
    ]
    batch, prompt = found.settings.batch, found.settings.prompt
    tile_row = [
        (f"TTFT of {prompt:,} tokens, floor", milliseconds(1e3 * prefill.floor_s), "prefill"),
        (f"TPOT at batch {batch}, floor", milliseconds(1e3 * decode.floor_s), "decode"),
        ("KV bytes a token", f"{found.kv_bytes_per_token:,.0f}", "queue"),
        ("ridge, FLOPs a byte", f"{found.ridge:,.0f}", "queue"),
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
        said = bullets([_measured(one, found) for one in measured])
        body.append(section("Measured", said, "of a running server's last minute"))
    body += [
        section("Floors", table(head, rows), f"context {found.settings.context:,}"),
        section("Notes", bullets([*facts(found), *found.notes()])),
    ]
    data = roofline_json(model, found, measured)
    said = f"{rate_words(found.rate)}, {found.bandwidth / 1e9:,.0f} GB/s, "
    said += "measured" if found.hardware.measured else "by the data sheet"
    subject = f"{model} on {machine_name(found)}"
    return page("roofline", subject, said, [*body, footing(data)], data)


def _roof(found: Roofline, batches: Sequence[Floor], measured: Sequence[MeasuredPhase]) -> str:
    prefill = found.prefill()
    floors = [_point(one) for one in (prefill, *batches)]
    spots = {one.name: (one.intensity, one.flops_per_s) for one in measured}
    reach = [x for x, _ in (*floors, *spots.values())]
    low, high = min(reach) / 2, 3 * max(found.ridge, *reach)
    roof = [(low, low * found.bandwidth), (found.ridge, found.rate), (high, found.rate)]
    return chart(
        "Both phases under one roof",
        [
            Series("roof", roof, "soft"),
            Series(f"{prefill.name}, floor", floors[:1], "prefill", "dots"),
            Series("decode, floors by batch", floors[1:], "decode", "dots"),
            *(Series(f"{name}, measured", [at], name, "rings") for name, at in spots.items()),
        ],
        "FLOPs a byte",
        "FLOP/s",
        x_log=True,
        y_log=True,
        marks=[(found.ridge, f"ridge {found.ridge:,.0f}")],
        wide=True,
    )


def machine_name(found: Roofline) -> str:
    ranks = found.settings.tensor_parallel
    return found.hardware.name + (f" × {ranks}" if ranks > 1 else "")


def _point(floor: Floor) -> tuple[float, float]:
    """Where the work lies on the roof: at its floor."""
    return floor.intensity, floor.flops / max(floor.compute_s, floor.memory_s)


def _measured(one: MeasuredPhase, found: Roofline) -> str:
    compute, memory = one.flops_per_s / found.rate, one.num_bytes / one.seconds / found.bandwidth
    return (
        f"measured, {one.name}: {rate_words(one.flops_per_s)} ({compute:.0%} of the roof), "
        f"{one.num_bytes / one.seconds / 1e9:,.1f} GB/s ({memory:.0%}), over {one.steps:,} steps"
    )


def _count(value: float) -> str:
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:,.2f} {unit}"
    return f"{value:,.0f}"
