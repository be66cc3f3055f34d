"""Reports of `twostroke quality`: a table and an HTML page."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from twostroke.measure.report.charts import Axis, Series, chart
from twostroke.measure.report.html import footer, page, plots, section, table, tiles
from twostroke.measure.report.tables import show_rows

Json = dict[str, Any]
HEAD = (
    "",
    "weights",
    "KV bytes a token",
    "perplexity",
    "ratio",
    "KL, mean",
    "KL, p99",
    "same token",
)
COLORS = ("decode", "prefill", "preemption", "good", "bad", "queue", "host")


def quality_rows(result: Json) -> list[list[str]]:
    """Return one row for each setup. The base is first, without a comparison."""
    rows = []
    for one in (result["base"], *result["formats"]):
        cells = [one["name"], f"{one['weight_bytes'] / 1e6:,.1f} MB"]
        cells += [f"{one['kv_bytes_per_token']:,.0f}", f"{one['perplexity']:.4f}"]
        if "kl_mean" in one:
            cells += [
                f"{one['perplexity_ratio']:.5f} ± {one['perplexity_ratio_error']:.5f}",
                f"{one['kl_mean']:.6f}",
                f"{one['kl_p99']:.5f}",
                f"{one['same_token']:.2%}",
            ]
        else:
            cells += ["base", "–", "–", "–"]
        rows.append(cells)
    return rows


def quality_facts(result: Json) -> str:
    return f"{result['scored']:,} tokens scored, in windows of {result['context']:,}"


def phase_lines(result: Json) -> list[str]:
    """Return a sentence for each setup with different formats in prefill and decode."""
    return [
        f"{one['name']}: the log-probability of a token in decode differs from prefill by "
        f"{phases['mean']:.4f} on average and {phases['max']:.4f} at most, over "
        f"{phases['tokens']:,} generated tokens; the figures above are figures of prefill"
        for one in (result["base"], *result["formats"])
        if (phases := one.get("phases"))
    ]


def show_quality(console: Console, result: Json) -> None:
    base = result["base"]
    console.print(Text(f"{base['model']} on {base['device']}", style="bold"))
    console.print(Text(quality_facts(result)))
    rows = quality_rows(result)
    if console.width >= 110:
        show_rows(console, HEAD, rows)
    else:  # a narrow terminal: one block for each format
        for cells in rows:
            console.print(Text(cells[0], style="bold"))
            pairs = zip(HEAD[1:], cells[1:], strict=True)
            show_rows(console, ("", ""), [list(pair) for pair in pairs])
    for line in phase_lines(result):
        console.print(Text(line))


def quality_page(result: Json) -> str:
    formats = result["formats"]
    curves = [
        Series(one["name"], [(max(kl, 1e-9), share) for share, kl in one["kl_percentiles"]], color)
        for one, color in zip(formats, COLORS, strict=False)
    ]
    figure = chart(
        "KL from the base, by token",
        curves,
        Axis("nats, at most", log=True),
        Axis("share of tokens", "%"),
        wide=True,
        note="" if len(formats) <= len(COLORS) else f"the first {len(COLORS)} formats",
    )
    shown = [("perplexity of the base", f"{result['base']['perplexity']:.3f}", "queue")]
    for one, color in zip(formats[:3], COLORS, strict=False):
        shown.append((f"mean KL, {one['name']}", f"{one['kl_mean']:.5f}", color))
    rows = table(HEAD, quality_rows(result))
    body = [
        tiles(shown),
        section("By format", rows, "; ".join(phase_lines(result))),
        plots([figure] if curves else []),
    ]
    base = result["base"]
    subject = f"{base['model']} on {base['device']}"
    return page("quality", subject, quality_facts(result), [*body, footer(result)], result)
