"""A capacity plan (`twostroke plan`) as one HTML file with charts."""

from __future__ import annotations

from typing import Any

from twostroke.measure.report.charts import Axis, Series, chart
from twostroke.measure.report.html import bullets, page, plots, section, stacked, table, tiles
from twostroke.planner.engine import TIMELINE_S
from twostroke.planner.predict import METRICS, PERCENTILES
from twostroke.planner.report import METRIC_NAMES, load_lines, tried_rows, verdict, with_interval

Json = dict[str, Any]
# Names of colours of `charts.py`. In a chart by load, each layout has one of these colours.
COLORS = ("prefill", "decode", "host", "queue")
# A part of the latency of a request → its colour.
PART_COLORS = {"queue": "queue", "prefill": "prefill", "decode": "decode"}


def plan_page(plan: Json) -> str:
    figures, trace, steps = plan["forecast"]["figures"], plan["trace"], plan["step_times"]
    facts = (
        f"{trace['requests']:,} requests in {trace['seconds']:,.0f} s, "
        f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} output tokens"
    )
    body = [tiles(_tiles(plan)), plots(_curves(plan)), _parts(figures)]
    for role, points in plan["forecast"]["timelines"].items():
        body.append(plots([_timeline(role, points)]))
    head = ["ms", *(f"p{percentile}" for percentile in PERCENTILES)]
    rows = [
        [
            METRIC_NAMES[metric],
            *(with_interval(figures[f"p{percentile}_{metric}_ms"]) for percentile in PERCENTILES),
        ]
        for metric in METRICS
        if f"p50_{metric}_ms" in figures
    ]
    body.append(
        section("Latencies", table(head, rows), "expected (lowest to highest of the simulations)")
    )
    body.append(section("Load", bullets(load_lines(figures))))
    if plan["tried"]:
        names = ["layout", "price an hour", "requests within the goals", "TTFT p99 in ms"]
        body.append(section("Simulated layouts", table(names, tried_rows(plan))))
    source = [
        f"Step times: {steps['source']}.",
        f"Error of a single step ±{steps['step_error']:.0%}; of all steps together "
        f"±{steps['drift']:.0%}, which gives the intervals.",
        *plan["forecast"]["notes"],
    ]
    body.append(section("Step times", bullets(source)))
    return page("plan", verdict(plan), facts, body, plan)


def _tiles(plan: Json) -> list[tuple[str, str, str]]:
    figures = plan["forecast"]["figures"]
    shown = [
        ("TTFT p99, ms", with_interval(figures["p99_ttft_ms"]), "prefill"),
        ("requests a second", f"{figures['requests_per_s']['expected']:.3g}", "queue"),
    ]
    if "p99_tpot_ms" in figures:
        shown.insert(1, ("TPOT p99, ms", with_interval(figures["p99_tpot_ms"]), "decode"))
    if plan["price_per_hour"] is not None:
        shown.append(("price an hour", f"{plan['price_per_hour']:,.2f}", "queue"))
    return shown


def _curves(plan: Json) -> list[str]:
    loads, goals = plan.get("loads", ()), plan["goals_ms"]
    charts = []
    for metric, name, goal in (
        ("p99_ttft_ms", "TTFT p99 by load", goals.get("ttft")),
        ("p99_tpot_ms", "TPOT p99 by load", goals.get("tpot")),
    ):
        series = []
        for curve, color in zip(loads, COLORS, strict=False):
            points = [
                (point["rate"], point[metric]) for point in curve["points"] if metric in point
            ]
            label = ", ".join(filter(None, (curve["hardware"], curve["layout"])))
            series.append(Series(label, points, color))
        if not series:
            continue
        trace_rate = plan["trace"]["requests"] / max(plan["trace"]["seconds"], 1e-9)
        chosen = plan["forecast"]["figures"].get(metric)
        if chosen is not None:
            series.append(
                Series("the plan", [(trace_rate, chosen["expected"])], COLORS[0], "rings")
            )
        if goal is not None:
            rates = [rate for drawn in series for rate, _ in drawn.points]
            series.append(Series("goal", [(min(rates), goal), (max(rates), goal)], "bad", "dashes"))
        latency = Axis("latency", "ms", log=None)  # None: the values decide
        charts.append(chart(name, series, Axis("requests a second"), latency))
    return charts


def _parts(figures: Json) -> str:
    """Return a bar with the parts of the mean latency of a request."""
    means = {part: figures[f"mean_{part}_ms"]["expected"] for part in PART_COLORS}
    total = sum(means.values()) or 1.0
    bars = [(part, value / total, PART_COLORS[part]) for part, value in means.items()]
    return section("Parts of the mean latency", stacked(bars), f"{total:,.0f} ms in all")


def _timeline(role: str, points: list[tuple[float, float]]) -> str:
    times = [TIMELINE_S * (number + 0.5) for number in range(len(points))]
    busy_shares = [min(1.0, busy) for busy, _ in points]
    kv_shares = [min(1.0, kv) for _, kv in points]
    return chart(
        f"{role} engines over time",
        [
            Series("time in use", list(zip(times, busy_shares, strict=True)), "prefill"),
            Series("KV cache in use", list(zip(times, kv_shares, strict=True)), "decode"),
        ],
        Axis("time in the trace", "s"),
        Axis("share of the time or of the KV cache"),
        wide=True,
    )
