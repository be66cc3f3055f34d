"""Reports of `phases`: a table and an HTML page."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.explain.phases import LEVELS, Phases
from twostroke.measure.report.charts import Axis, Series, chart
from twostroke.measure.report.html import (
    certificate,
    footer,
    page,
    plots,
    section,
    stacked,
    table,
    tiles,
)
from twostroke.measure.report.tables import milliseconds, server_name


def rows(phases: Phases) -> list[tuple[str, str, str]]:
    """Return the name, the time and a description of each row."""
    sample = phases.sample
    all_rows = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s), "sent → first token"),
        ("  queue", _ms(phases.queue_s), "before the first step"),
        ("  prefill", _ms(phases.prefill_s), f"{sample.prompt_tokens:,} tokens"),
        ("  outside", _ms(phases.outside_s), "client, network, HTTP"),
        ("TPOT", _ms(sample.tpot_s), "per token after the first"),
        ("  worst gap", _ms(max(sample.itls_s, default=0.0)), "between two tokens"),
        ("  decode", _ms(phases.decode_s), f"{sample.output_tokens:,} tokens"),
        ("end to end", milliseconds(1e3 * sample.e2el_s), "sent → last token"),
    ]
    return [row for row in all_rows if row[1] != "–"]


def rates(phases: Phases) -> str:
    sample = phases.sample
    start = phases.prefill_s or sample.ttft_s
    words = f"prefill {sample.prompt_tokens / start:,.0f} tokens a second"
    if sample.tpot_s:
        words += f", decode {1 / sample.tpot_s:,.1f}"
    return words


def show_phases(console: Console, phases: Phases) -> None:
    console.print(Text(phases.sentence(), style="bold"))
    console.print(Text(f"{phases.model} on {server_name(phases.server)}; {rates(phases)}"))
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_column(style="dim")
    for row in rows(phases):
        shown.add_row(*row)
    console.print(shown)
    if phases.steps:
        steps = phases.steps
        console.print(
            Text(
                f"steps: {steps['prefill_steps']:,} with prefill, {steps['decode_steps']:,} of "
                f"decode at {milliseconds(steps['decode_step_ms'])}, host time between steps "
                f"{milliseconds(steps['host_gap_ms'])}"
            )
        )
    console.print(Text(phases.kv_sentence()))
    if phases.gpu:
        gpu = phases.gpu
        console.print(
            Text(
                f"GPU: {gpu['gpu_utilisation_percent']:.0f}% busy, "
                f"{gpu['memory_used_bytes'] / 2**30:.1f} GiB used"
            )
        )
    level = LEVELS.index(phases.evidence) + 1
    console.print(
        Text(f"evidence: {phases.evidence} (level {level} of {len(LEVELS)})", style="dim")
    )
    for problem in phases.problems:
        console.print(Padding(Text(f"· {problem}", style="red"), (0, 0, 0, 2), expand=False))


def phases_page(phases: Phases) -> str:
    data = phases.as_json()
    sample = phases.sample
    start = sample.scheduled_s
    written = [(1e3 * (at - start), float(n)) for n, at in enumerate(sample.content_s, 1)]
    gaps = [(float(n), 1e3 * gap) for n, gap in enumerate(sample.itls_s, 2)]
    figures = [
        chart(
            "Tokens over time",
            [Series("", [(0.0, 0.0), (written[0][0], 0.0), *written], "decode", "area")],
            Axis("after the request was sent", "ms"),
            Axis("events with content so far"),
            marks=[(1e3 * sample.ttft_s, f"first token {milliseconds(1e3 * sample.ttft_s)}")],
        ),
        chart(
            "Gap before each token",
            [Series("", gaps, "decode", "dots")],
            Axis("index of the token"),
            Axis("time since the previous token", "ms"),
        ),
    ]
    tile_row = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s), "prefill"),
        ("TPOT", _ms(sample.tpot_s), "decode"),
        ("end to end", milliseconds(1e3 * sample.e2el_s), "queue"),
        (f"evidence, level {LEVELS.index(phases.evidence) + 1} of 4", phases.evidence, "queue"),
    ]
    cells = [[name.replace("  ", "\u2003"), time, note] for name, time, note in rows(phases)]
    body = [
        certificate(data),
        tiles(tile_row),
        section("Where the time went", stacked(parts(phases)), phases.sentence()),
        section("The median request", table(["", "time", ""], cells, 2), rates(phases)),
        plots(figures),
        section("Memory", f"<p>{escape(phases.kv_sentence())}</p>"),
        footer(data),
    ]
    facts = (
        f"{sample.prompt_tokens:,} prompt tokens, {sample.output_tokens:,} output tokens, "
        f"{len(phases.samples)} requests, no other traffic"
    )
    name = server_name(phases.server)
    return page("phases", f"{phases.model} on {name}: {phases.verdict}", facts, body, data)


def parts(phases: Phases) -> list[tuple[str, float, str]]:
    """Return the shares of the request's time, as detailed as the evidence allows."""
    total, first = phases.sample.e2el_s, phases.ttft_s
    after = ("decode, after the first token", (total - first) / total, "decode")
    if phases.prefill_s is None:
        return [("up to the first token", first / total, "prefill"), after]
    queue = min(phases.queue_s or 0.0, first)
    prefill = min(phases.prefill_s, first - queue)
    before = [("queue", queue, "queue"), ("prefill", prefill, "prefill")]
    before.append(("client, network, HTTP", first - queue - prefill, "host"))
    return [(name, took / total, color) for name, took, color in before if took > 0] + [after]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(1e3 * seconds)
