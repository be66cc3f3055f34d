"""What `phases` found, as a table and as a page."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.explain.phases import LEVELS, Phases
from twostroke.measure.report.charts import Series, chart
from twostroke.measure.report.html import (
    footing,
    page,
    plots,
    section,
    stacked,
    table,
    tiles,
    verdict,
)
from twostroke.measure.report.tables import milliseconds, server_name


def rows(found: Phases) -> list[tuple[str, str, str]]:
    """Name, time, and what it is."""
    sample = found.sample
    found_rows = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s), "sent → first token"),
        ("  queue", _ms(found.queue_s), "before the first step"),
        ("  prefill", _ms(found.prefill_s), f"{sample.prompt_tokens:,} tokens"),
        ("  outside", _ms(found.outside_s), "client, network, HTTP"),
        ("TPOT", _ms(sample.tpot_s), "per token after the first"),
        ("  worst gap", _ms(max(sample.itls_s, default=0.0)), "between two tokens"),
        ("  decode", _ms(found.decode_s), f"{sample.output_tokens:,} tokens"),
        ("in all", milliseconds(1e3 * sample.e2el_s), "sent → last token"),
    ]
    return [row for row in found_rows if row[1] != "–"]


def rates(found: Phases) -> str:
    sample = found.sample
    start = found.prefill_s or sample.ttft_s
    words = f"prefill {sample.prompt_tokens / start:,.0f} tokens a second"
    if sample.tpot_s:
        words += f", decode {1 / sample.tpot_s:,.1f}"
    return words


def show_phases(console: Console, found: Phases) -> None:
    console.print(Text(found.sentence(), style="bold"))
    console.print(Text(f"{found.model} on {server_name(found.server)}; {rates(found)}"))
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_column(style="dim")
    for row in rows(found):
        shown.add_row(*row)
    console.print(shown)
    if found.steps:
        steps = found.steps
        console.print(
            Text(
                f"steps: {steps['prefill_steps']:,} with prefill, {steps['decode_steps']:,} of "
                f"decode at {milliseconds(steps['decode_step_ms'])}, host beside each "
                f"{milliseconds(steps['host_gap_ms'])}"
            )
        )
    console.print(Text(found.kv_sentence()))
    if found.gpu:
        gpu = found.gpu
        console.print(
            Text(
                f"GPU: {gpu['gpu_utilisation_percent']:.0f}% busy, "
                f"{gpu['memory_used_bytes'] / 2**30:.1f} GiB taken"
            )
        )
    level = LEVELS.index(found.evidence) + 1
    console.print(Text(f"evidence: {found.evidence} (level {level} of {len(LEVELS)})", style="dim"))
    for problem in found.problems:
        console.print(Padding(Text(f"· {problem}", style="red"), (0, 0, 0, 2), expand=False))


def phases_page(found: Phases) -> str:
    data = found.as_json()
    sample = found.sample
    start = sample.scheduled_s
    written = [(1e3 * (at - start), float(n)) for n, at in enumerate(sample.content_s, 1)]
    gaps = [(float(n), 1e3 * gap) for n, gap in enumerate(sample.itls_s, 2)]
    figures = [
        chart(
            "Tokens by when they came",
            [Series("", [(0.0, 0.0), (written[0][0], 0.0), *written], "decode", "area")],
            "after the request was sent",
            "events with content so far",
            x_unit="ms",
            marks=[(1e3 * sample.ttft_s, f"first token {milliseconds(1e3 * sample.ttft_s)}")],
        ),
        chart(
            "Gap before each token",
            [Series("", gaps, "decode", "dots")],
            "number of the token",
            "time since the token before",
            y_unit="ms",
        ),
    ]
    tile_row = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s), "prefill"),
        ("TPOT", _ms(sample.tpot_s), "decode"),
        ("in all", milliseconds(1e3 * sample.e2el_s), "queue"),
        (f"evidence, level {LEVELS.index(found.evidence) + 1} of 4", found.evidence, "queue"),
    ]
    cells = [[name.replace("  ", "\u2003"), time, what] for name, time, what in rows(found)]
    body = [
        verdict(data),
        tiles(tile_row),
        section("Where the time went", stacked(parts(found)), found.sentence()),
        section("The request in the middle", table(["", "time", ""], cells, 2), rates(found)),
        plots(figures),
        section("Memory", f"<p>{escape(found.kv_sentence())}</p>"),
        footing(data),
    ]
    facts = (
        f"{sample.prompt_tokens:,} prompt tokens, {sample.output_tokens:,} written, "
        f"{len(found.samples)} times, nobody else served"
    )
    who = server_name(found.server)
    return page("phases", f"{found.model} on {who}: {found.verdict}", facts, body, data)


def parts(found: Phases) -> list[tuple[str, float, str]]:
    """Shares of the request's time: as far as the evidence goes."""
    total, first = found.sample.e2el_s, found.ttft_s
    after = ("decode, after the first token", (total - first) / total, "decode")
    if found.prefill_s is None:
        return [("up to the first token", first / total, "prefill"), after]
    queue = min(found.queue_s or 0.0, first)
    prefill = min(found.prefill_s, first - queue)
    before = [("queue", queue, "queue"), ("prefill", prefill, "prefill")]
    before.append(("client, network, HTTP", first - queue - prefill, "host"))
    return [(name, took / total, color) for name, took, color in before if took > 0] + [after]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(1e3 * seconds)
