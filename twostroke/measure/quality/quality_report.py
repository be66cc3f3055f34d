"""What `twostroke quality` found, as a table and as a page."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from twostroke.measure.report.charts import Series, chart
from twostroke.measure.report.html import footing, page, plots, section, table, tiles
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


def quality_rows(found: Json) -> list[list[str]]:
    """The base first; it has nothing to be compared with."""
    rows = []
    for one in (found["base"], *found["formats"]):
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


def quality_facts(found: Json) -> str:
    return f"{found['scored']:,} tokens scored, in windows of {found['context']:,}"


def phase_lines(found: Json) -> list[str]:
    """Of rows whose phases have formats of their own."""
    return [
        f"{one['name']}: a token's log-probability in decode differs from that in prefill by "
        f"{phases['mean']:.4f} on average, {phases['max']:.4f} at the most, over "
        f"{phases['tokens']:,} tokens that it wrote; the figures above are prefill's"
        for one in (found["base"], *found["formats"])
        if (phases := one.get("phases"))
    ]


def show_quality(console: Console, found: Json) -> None:
    base = found["base"]
    console.print(Text(f"{base['model']} on {base['device']}", style="bold"))
    console.print(Text(quality_facts(found)))
    rows = quality_rows(found)
    if console.width >= 110:
        show_rows(console, HEAD, rows)
    else:  # a block a format, where a line of eight columns would break
        for cells in rows:
            console.print(Text(cells[0], style="bold"))
            pairs = zip(HEAD[1:], cells[1:], strict=True)
            show_rows(console, ("", ""), [list(pair) for pair in pairs])
    for line in phase_lines(found):
        console.print(Text(line))


def quality_page(found: Json) -> str:
    formats = found["formats"]
    curves = [
        Series(one["name"], [(max(kl, 1e-9), share) for share, kl in one["kl_percentiles"]], color)
        for one, color in zip(formats, COLORS, strict=False)
    ]
    figure = chart(
        "KL from the base, by token",
        curves,
        "nats, so far or nearer",
        "share of tokens",
        y_unit="%",
        x_log=True,
        wide=True,
        note="" if len(formats) <= len(COLORS) else f"the first {len(COLORS)} formats",
    )
    shown = [("perplexity of the base", f"{found['base']['perplexity']:.3f}", "queue")]
    for one, color in zip(formats[:3], COLORS, strict=False):
        shown.append((f"mean KL, {one['name']}", f"{one['kl_mean']:.5f}", color))
    rows = table(HEAD, quality_rows(found))
    body = [
        tiles(shown),
        section("By format", rows, "; ".join(phase_lines(found))),
        plots([figure] if curves else []),
    ]
    base = found["base"]
    subject = f"{base['model']} on {base['device']}"
    return page("quality", subject, quality_facts(found), [*body, footing(found)], found)
