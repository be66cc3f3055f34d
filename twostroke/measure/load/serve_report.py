"""What `bench serve` found, as a page: distributions, the run over time, and the search's rates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from twostroke.measure.load.causes import CAUSES, UNKNOWN, CausedGap
from twostroke.measure.load.result import values_ms
from twostroke.measure.report.charts import Series, chart, cumulative, thinned
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
    from twostroke.measure.load.bench import Outcome

COLORS = ("decode", "prefill", "preemption", "host", "communication", "queue")
CAUSE_COLORS = dict(zip(CAUSES, COLORS, strict=True))


def serve_page(outcome: Outcome) -> str:
    found = outcome.result
    shares = [
        key.split("_")[0] for key in found if key.startswith("p") and key.endswith("_ttft_ms")
    ]
    columns = ["mean", "median", *shares]
    rows = [
        [title, *(milliseconds(found[f"{column}_{metric}_ms"]) for column in columns)]
        for metric, title in NAMES.items()
    ]
    facts = (
        f"{found['completed']:,} requests in {found['duration']:,.1f} s, "
        f"{found['total_input_tokens']:,} tokens in, {found['total_output_tokens']:,} out, "
        f"{_load(found)}; {_date(found['date'])}"
    )
    body = [
        verdict(found),
        _tiles(found, shares[-1] if shares else "median"),
        _search(found),
        section("Latency", table(["", *columns], rows), "of a request; ITL of a gap"),
        plots(_distributions(outcome, ["median", *(p for p in shares if p != "p50")])),
        plots(_over_time(outcome)),
        _causes(found),
        footing(found),
    ]
    subject = f"{found['model_id']} on {server_name(found['server'])}"
    return page("bench serve", subject, facts, body, found)


def _date(text: str) -> str:
    return datetime.strptime(text, "%Y%m%d-%H%M%S").strftime("%Y-%m-%d %H:%M")


def _load(found: dict[str, Any]) -> str:
    if found["dataset_name"] == "trace":
        return "as the trace says"
    if found["request_rate"] != "inf":
        return f"sent at {found['request_rate']:.2f} a second"
    users = found["max_concurrency"]
    return f"{users} users" if users else "all at once"


def _tiles(found: dict[str, Any], last: str) -> str:
    figures: list[tuple[str, str, str]] = [
        (f"TTFT, {last}", milliseconds(found[f"{last}_ttft_ms"]), "prefill"),
        (f"ITL, {last}", milliseconds(found[f"{last}_itl_ms"]), "decode"),
        ("TPOT, median", milliseconds(found["median_tpot_ms"]), "decode"),
        ("requests a second", f"{found['request_throughput']:,.2f}", "queue"),
        ("tokens written a second", f"{found['output_throughput']:,.1f}", "queue"),
    ]
    if found["request_goodput"] is not None:
        goals = ", ".join(
            f"{SHORT[name]} {milliseconds(ms)}" for name, ms in found["goals"].items()
        )
        words = f"goodput, requests a second within {goals}"
        figures.append((words, f"{found['request_goodput']:,.2f}", "good"))
    return tiles(figures)


def _distributions(outcome: Outcome, shown: Sequence[str]) -> list[str]:
    found, values = outcome.result, values_ms(outcome.run.samples)
    figures = []
    for metric, color, what in (
        ("ttft", "prefill", "requests"),
        ("itl", "decode", "gaps"),
        ("tpot", "decode", "requests"),
        ("e2el", "queue", "requests"),
    ):
        marks = [
            (found[f"{name}_{metric}_ms"], f"{name} {milliseconds(found[f'{name}_{metric}_ms'])}")
            for name in shown
        ]
        goal = found["goals"].get(metric)
        if goal is not None:
            marks.append((goal, f"goal {milliseconds(goal)}"))
        figures.append(
            chart(
                NAMES[metric],
                [Series("", cumulative(values[metric]), color, "area")],
                "so long or shorter",
                f"share of {what}",
                x_unit="ms",
                y_unit="%",
                x_log=None,
                marks=marks if values[metric] else (),
                marks_below=True,
            )
        )
    return figures


def _over_time(outcome: Outcome) -> list[str]:
    run = outcome.run
    due = [(s.scheduled_s - run.started_s, 1e3 * s.ttft_s) for s in run.samples if s.ok]
    return [
        chart(
            "TTFT over the run",
            [Series("", thinned(due), "prefill", "dots")],
            "when the request was due, in seconds",
            "time to first token",
            y_unit="ms",
            y_log=None,
            wide=True,
        ),
        chart(
            "Gaps between tokens over the run",
            _gap_series(outcome.gaps, run.started_s),
            "when the gap ended, in seconds",
            "time between two tokens of a stream",
            y_unit="ms",
            y_log=None,
            note="coloured by what took most of it" if _known(outcome.gaps) else "",
            wide=True,
        ),
    ]


def _known(gaps: Sequence[CausedGap]) -> bool:
    return any(gap.parts is not None for gap in gaps)


def _gap_series(gaps: Sequence[CausedGap], started_s: float) -> list[Series]:
    """A series a cause; those that are rare are drawn last, so that they are seen."""
    if not _known(gaps):
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


def _causes(found: dict[str, Any]) -> str:
    causes = found.get("gap_causes")
    if causes is None:
        return ""
    seconds = causes["seconds"]
    total = sum(seconds.values()) or 1.0
    parts = [
        (CAUSE_NAMES[cause], seconds[cause] / total, CAUSE_COLORS[cause])
        for cause in CAUSES
        if seconds[cause] / total >= 0.0005
    ]
    note = "all gaps together, by the server's step records"
    if causes["known_share"] < 0.995:
        note += f"; the server still had those of {causes['known_share']:.0%} of the gaps"
    return section("Where the time between tokens went", stacked(parts), note)


def _search(found: dict[str, Any]) -> str:
    tried = found.get("search")
    if not tried:
        return ""
    points = {
        met: sorted(
            (row["request_rate"], row["goodput"] or 0.0) for row in tried if row["met"] is met
        )
        for met in (True, False)
    }
    rates = sorted((*points[True], *points[False]))
    most = max(rate for rate, _ in rates)
    best = max((rate for rate, _ in points[True]), default=0.0)
    figure = chart(
        "Goodput by request rate",
        [
            Series("sent", [(0.0, 0.0), (most, most)], "soft", "dashes"),
            Series("goodput", [(0.0, 0.0), *rates], "decode"),
            Series("goals met", points[True], "good", "dots"),
            Series("not met", points[False], "bad", "dots"),
        ],
        "requests a second sent",
        "requests a second within the goals",
        marks=[(best, f"highest: {best:.2f} a second")] if best else (),
        wide=True,
    )
    return plots([figure]) + section("Rates tried", table(SEARCH_HEAD, search_rows(tried)))
