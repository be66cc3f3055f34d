"""A plan as one HTML file with pictures."""

from __future__ import annotations

from typing import Any

from twostroke.measure.report.charts import Axis, Series, chart
from twostroke.measure.report.html import bullets, page, plots, section, stacked, table, tiles
from twostroke.planner.engine import TIMELINE_S
from twostroke.planner.predict import METRICS, PERCENTILES
from twostroke.planner.report import NAMES, between, load_lines, tried_rows, verdict

Json = dict[str, Any]
COLORS = ("prefill", "decode", "host", "queue")  # of layouts
PARTS = {"queue": "queue", "prefill": "prefill", "decode": "decode"}  # of a request → its colour


def plan_page(plan: Json) -> str:
    figures, trace, steps = plan["forecast"]["figures"], plan["trace"], plan["step_times"]
    facts = (
        f"{trace['requests']:,} requests in {trace['seconds']:,.0f} s, "
        f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} output tokens"
    )
    body = [tiles(_tiles(plan)), plots(_curves(plan)), _parts(figures)]
    for role, points in plan["forecast"]["timelines"].items():
        body.append(plots([_timeline(role, points)]))
    head = ["ms", *(f"p{share}" for share in PERCENTILES)]
    rows = [
        [NAMES[metric], *(between(figures[f"p{share}_{metric}_ms"]) for share in PERCENTILES)]
        for metric in METRICS
        if f"p50_{metric}_ms" in figures
    ]
    body.append(section("Latencies", table(head, rows), "expected (lowest to highest)"))
    body.append(section("Load", bullets(load_lines(figures))))
    if plan["tried"]:
        names = ["layout", "price an hour", "requests within the goals", "TTFT p99 in ms"]
        body.append(section("Simulated layouts", table(names, tried_rows(plan))))
    source = [
        f"Step times: {steps['source']}.",
        f"Error of a single step ±{steps['step_error']:.0%}; common error ±{steps['drift']:.0%}, "
        "which gives the intervals.",
        *plan["forecast"]["notes"],
    ]
    body.append(section("Step times", bullets(source)))
    return page("plan", verdict(plan), facts, body, plan)


def _tiles(plan: Json) -> list[tuple[str, str, str]]:
    figures = plan["forecast"]["figures"]
    found = [
        ("TTFT p99, ms", between(figures["p99_ttft_ms"]), "prefill"),
        ("requests a second", f"{figures['requests_per_s']['expected']:.3g}", "queue"),
    ]
    if "p99_tpot_ms" in figures:
        found.insert(1, ("TPOT p99, ms", between(figures["p99_tpot_ms"]), "decode"))
    if plan["price_per_hour"] is not None:
        found.append(("price an hour", f"{plan['price_per_hour']:,.2f}", "queue"))
    return found


def _curves(plan: Json) -> list[str]:
    loads, goals = plan.get("loads", ()), plan["goals_ms"]
    pictures = []
    for figure, name, goal in (
        ("p99_ttft_ms", "TTFT p99 by load", goals.get("ttft")),
        ("p99_tpot_ms", "TPOT p99 by load", goals.get("tpot")),
    ):
        series = []
        for curve, color in zip(loads, COLORS, strict=False):
            points = [(one["rate"], one[figure]) for one in curve["points"] if figure in one]
            label = ", ".join(filter(None, (curve["hardware"], curve["layout"])))
            series.append(Series(label, points, color))
        if not series:
            continue
        here = plan["trace"]["requests"] / max(plan["trace"]["seconds"], 1e-9)
        chosen = plan["forecast"]["figures"].get(figure)
        if chosen is not None:
            series.append(Series("the plan", [(here, chosen["expected"])], COLORS[0], "rings"))
        if goal is not None:
            rates = [point[0] for one in series for point in one.points]
            series.append(Series("goal", [(min(rates), goal), (max(rates), goal)], "bad", "dashes"))
        pictures.append(
            chart(name, series, Axis("requests a second"), Axis("latency", "ms", log=None))
        )
    return pictures


def _parts(figures: Json) -> str:
    """Return where the time of a request goes."""
    means = {part: figures[f"mean_{part}_ms"]["expected"] for part in PARTS}
    total = sum(means.values()) or 1.0
    bars = [(part, value / total, PARTS[part]) for part, value in means.items()]
    return section("Where the time goes", stacked(bars), f"of {total:,.0f} ms, the mean request")


def _timeline(role: str, points: list[tuple[float, float]]) -> str:
    times = [TIMELINE_S * (number + 0.5) for number in range(len(points))]
    used, held = ([min(1.0, one[column]) for one in points] for column in (0, 1))
    return chart(
        f"{role} engines over time",
        [
            Series("in use", list(zip(times, used, strict=True)), "prefill"),
            Series("KV cache held", list(zip(times, held, strict=True)), "decode"),
        ],
        Axis("time in the trace", "s"),
        Axis("share"),
        wide=True,
    )
