"""HTML report of `bench serve`: distributions, the run over time, and the rates of a search."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from twostroke.measure.load.causes import CAUSES, UNKNOWN, CausedGap
from twostroke.measure.load.result import values_ms
from twostroke.measure.report.charts import Axis, Series, chart, cumulative, thinned
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
from twostroke.measure.report.tables import (
    CAUSE_NAMES,
    NAMES,
    SEARCH_HEAD,
    SHORT,
    milliseconds,
    search_rows,
    server_name,
)

if TYPE_CHECKING:
    from twostroke.measure.load.bench import BenchOutcome

COLORS = ("decode", "prefill", "preemption", "host", "communication", "drafting", "queue")
CAUSE_COLORS = dict(zip(CAUSES, COLORS, strict=True))


def serve_page(outcome: BenchOutcome) -> str:
    result = outcome.result
    names = [key.split("_")[0] for key in result if key.startswith("p") and "_ttft_ms" in key]
    percentiles = sorted(names, key=lambda name: float(name[1:]))
    columns = ["mean", "median", *percentiles]
    rows = [
        [title, *(milliseconds(result[f"{column}_{metric}_ms"]) for column in columns)]
        for metric, title in NAMES.items()
    ]
    facts = (
        f"{result['completed']:,} requests in {result['duration']:,.1f} s, "
        f"{result['total_input_tokens']:,} tokens in, {result['total_output_tokens']:,} out, "
        f"{_load(result)}; {_date(result['date'])}"
    )
    body = [
        certificate(result),
        _tiles(result, percentiles[-1] if percentiles else "median"),
        _search(result),
        section("Latency", table(["", *columns], rows), "per request; ITL per gap"),
        plots(_distributions(outcome, ["median", *(p for p in percentiles if p != "p50")])),
        plots(_over_time(outcome)),
        _causes(result),
        footer(result),
    ]
    subject = f"{result['model_id']} on {server_name(result['server'])}"
    return page("bench serve", subject, facts, body, result)


def _date(text: str) -> str:
    return datetime.strptime(text, "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M")


def _load(result: dict[str, Any]) -> str:
    if result["dataset_name"] == "trace":
        return "at the times of the trace"
    if result["request_rate"] != "inf":
        return f"sent at {result['request_rate']:.2f} a second"
    users = result["max_concurrency"]
    return f"{users} users" if users else "all at once"


def _tiles(result: dict[str, Any], percentile: str) -> str:
    figures: list[tuple[str, str, str]] = [
        (f"TTFT, {percentile}", milliseconds(result[f"{percentile}_ttft_ms"]), "prefill"),
        (f"ITL, {percentile}", milliseconds(result[f"{percentile}_itl_ms"]), "decode"),
        ("TPOT, median", milliseconds(result["median_tpot_ms"]), "decode"),
        ("requests a second", f"{result['request_throughput']:,.2f}", "queue"),
        ("output tokens a second", f"{result['output_throughput']:,.1f}", "queue"),
    ]
    if result["request_goodput"] is not None:
        goals = ", ".join(
            f"{SHORT[name]} {milliseconds(ms)}" for name, ms in result["goals"].items()
        )
        name = f"goodput, requests a second within {goals}"
        figures.append((name, f"{result['request_goodput']:,.2f}", "good"))
    return tiles(figures)


def _distributions(outcome: BenchOutcome, columns: Sequence[str]) -> list[str]:
    result, values = outcome.result, values_ms(outcome.run.samples)
    figures = []
    for metric, color, unit in (
        ("ttft", "prefill", "requests"),
        ("itl", "decode", "gaps"),
        ("tpot", "decode", "requests"),
        ("e2el", "queue", "requests"),
    ):
        marks = [
            (result[f"{name}_{metric}_ms"], f"{name} {milliseconds(result[f'{name}_{metric}_ms'])}")
            for name in columns
        ]
        goal = result["goals"].get(metric)
        if goal is not None:
            marks.append((goal, f"goal {milliseconds(goal)}"))
        figures.append(
            chart(
                NAMES[metric],
                [Series("", cumulative(values[metric]), color, "area")],
                Axis("at most this long", "ms", log=None),
                Axis(f"share of {unit}", "%"),
                marks=marks if values[metric] else (),
                marks_below=True,
            )
        )
    return figures


def _over_time(outcome: BenchOutcome) -> list[str]:
    run = outcome.run
    due = [(s.scheduled_s - run.started_s, 1e3 * s.ttft_s) for s in run.samples if s.ok]
    return [
        chart(
            "TTFT over the run",
            [Series("", thinned(due), "prefill", "dots")],
            Axis("when the request was due, in seconds"),
            Axis("time to first token", "ms", log=None),
            wide=True,
        ),
        chart(
            "Gaps between tokens over the run",
            _gap_series(outcome.gaps, run.started_s),
            Axis("when the gap ended, in seconds"),
            Axis("time between two tokens of a stream", "ms", log=None),
            note="coloured by the largest cause" if _causes_known(outcome.gaps) else "",
            wide=True,
        ),
    ]


def _causes_known(gaps: Sequence[CausedGap]) -> bool:
    return any(gap.parts is not None for gap in gaps)


def _gap_series(gaps: Sequence[CausedGap], started_s: float) -> list[Series]:
    """Return one series for each cause. Rare causes are drawn last, on top."""
    if not _causes_known(gaps):
        points = [(gap.at_s - started_s, 1e3 * gap.gap_s) for gap in gaps]
        return [Series("", thinned(points), "decode", "dots")]
    by_cause: dict[str, list[tuple[float, float]]] = {}
    for gap in gaps:
        by_cause.setdefault(gap.cause, []).append((gap.at_s - started_s, 1e3 * gap.gap_s))
    order = sorted(by_cause, key=lambda cause: (cause != UNKNOWN, -len(by_cause[cause])))
    return [
        Series(
            CAUSE_NAMES.get(cause, cause),
            thinned(by_cause[cause]),
            CAUSE_COLORS.get(cause, "soft"),
            "dots",
        )
        for cause in order
    ]


def _causes(result: dict[str, Any]) -> str:
    causes = result.get("gap_causes")
    if causes is None:
        return ""
    seconds = causes["seconds"]
    total = sum(seconds.values()) or 1.0
    parts = [
        (CAUSE_NAMES[cause], seconds[cause] / total, CAUSE_COLORS[cause])
        for cause in CAUSES
        if seconds[cause] / total >= 0.0005
    ]
    note = "all gaps, from the server's step records"
    if causes["known_share"] < 0.995:
        note += f"; the server still had the records of {causes['known_share']:.0%} of the gaps"
    return section("Where the time between tokens went", stacked(parts), note)


def _search(result: dict[str, Any]) -> str:
    tried = result.get("search")
    if not tried:
        return ""
    points = {
        met: sorted(
            (row["request_rate"], row["goodput"] or 0.0) for row in tried if row["met"] is met
        )
        for met in (True, False)
    }
    rates = sorted((*points[True], *points[False]))
    max_rate = max(rate for rate, _ in rates)
    best = max((rate for rate, _ in points[True]), default=0.0)
    figure = chart(
        "Goodput by request rate",
        [
            Series("sent", [(0.0, 0.0), (max_rate, max_rate)], "soft", "dashes"),
            Series("goodput", [(0.0, 0.0), *rates], "decode"),
            Series("goals met", points[True], "good", "dots"),
            Series("not met", points[False], "bad", "dots"),
        ],
        Axis("requests sent a second"),
        Axis("requests a second within the goals"),
        marks=[(best, f"highest: {best:.2f} a second")] if best else (),
        wide=True,
    )
    return plots([figure]) + section("Rates tried", table(SEARCH_HEAD, search_rows(tried)))
