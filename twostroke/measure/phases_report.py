"""What `phases` found, as a table and as a page."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.measure.charts import Series, chart
from twostroke.measure.html import definitions, page, table, tiles, verdict
from twostroke.measure.phases import LEVELS, Phases
from twostroke.measure.tables import milliseconds


def rows(found: Phases) -> list[tuple[str, str, str]]:
    """Name, time, and what it is."""
    sample = found.sample
    parts = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s), "sent → first token"),
        ("  queue", _ms(found.queue_s), "before the first step"),
        ("  prefill", _ms(found.prefill_s), f"{sample.prompt_tokens:,} tokens"),
        ("  outside", _ms(found.outside_s), "client, network, HTTP"),
        ("TPOT", _ms(sample.tpot_s), "per token after the first"),
        ("  worst gap", _ms(max(sample.itls_s, default=0.0)), "between two tokens"),
        ("  decode", _ms(found.decode_s), f"{sample.output_tokens:,} tokens"),
        ("in all", milliseconds(1e3 * sample.e2el_s), "sent → last token"),
    ]
    return [row for row in parts if row[1] != "–"]


def rates(found: Phases) -> str:
    sample = found.sample
    start = found.prefill_s or sample.ttft_s
    words = f"prefill {sample.prompt_tokens / start:,.0f} tokens a second"
    if sample.tpot_s:
        words += f", decode {1 / sample.tpot_s:,.1f}"
    return words


def show_phases(console: Console, found: Phases) -> None:
    console.print(Text(found.sentence(), style="bold"))
    who = " ".join(filter(None, (found.server["kind"], found.server.get("version"))))
    console.print(Text(f"{found.model} on {who}; {rates(found)}"))
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
    plots = [
        chart(
            "Tokens by when they came",
            [Series("", [(0.0, 0.0), (written[0][0], 0.0), *written], "decode")],
            "ms after the request was sent",
            "events with content",
            marks=[(1e3 * sample.ttft_s, "first token")],
        ),
        chart("Gap before each token", [Series("", gaps, "decode", dots=True)], "token", "ms"),
    ]
    figures = [
        ("TTFT", milliseconds(1e3 * sample.ttft_s)),
        ("TPOT", _ms(sample.tpot_s)),
        ("evidence", found.evidence),
        ("verdict", found.verdict),
    ]
    body = [
        f"<h1>{escape(found.model)}: {escape(found.verdict)}</h1>",
        f"<p>{escape(found.sentence())}</p>",
        verdict(data),
        tiles(figures),
        table(["", "time", ""], [[name.strip(), time, what] for name, time, what in rows(found)]),
        f'<h2>The request</h2><div class="plots">{"".join(plots)}</div>',
        f"<h2>Memory</h2><p>{escape(found.kv_sentence())}</p>",
        definitions(data),
    ]
    return page(f"twostroke phases: {found.model}", body, data)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else milliseconds(1e3 * seconds)
