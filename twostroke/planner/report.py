"""A plan as a terminal report and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.result import environment
from twostroke.measure.load.traces import TraceRequest
from twostroke.planner.check import show_check
from twostroke.planner.predict import METRICS, PERCENTILES, LayoutForecast
from twostroke.planner.search import EngineChoice, SimulatedLayout

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]
KV = ("kv_mean", "kv_peak")
METRIC_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "end to end"}


def plan_json(
    trace: Sequence[TraceRequest],
    choice: EngineChoice,
    goals: Goals,
    target: float,
    forecast: LayoutForecast,
    tried: Sequence[SimulatedLayout] = (),
) -> Json:
    return {
        "schema_version": 1,
        "trace": {
            "requests": len(trace),
            "seconds": trace[-1].at_s,
            "prompt_tokens": sum(one.prompt_tokens for one in trace),
            "output_tokens": sum(one.output_tokens for one in trace),
        },
        "step_times": choice.model.as_json(),
        "hardware": choice.name,
        "price_per_hour": None if choice.price is None else choice.price * forecast.layout.count,
        "goals_ms": goals.limits_ms,
        "target": target,
        "forecast": forecast.as_json(),
        "tried": [one.as_json() for one in tried],
        "environment": environment(),
    }


def show_plan(console: Console, plan: Json) -> None:
    from rich.table import Table
    from rich.text import Text

    trace, steps, forecast = plan["trace"], plan["step_times"], plan["forecast"]
    figures = forecast["figures"]
    seconds = max(trace["seconds"], 1e-9)
    console.print(Text(verdict(plan), style="bold"))
    console.print(
        f"load        {trace['requests']:,} requests in {seconds:,.0f} s "
        f"({trace['requests'] / seconds:.3g} a second), {trace['prompt_tokens']:,} prompt and "
        f"{trace['output_tokens']:,} output tokens",
        highlight=False,
    )
    console.print(f"step times  {steps['source']}", highlight=False)
    if found := steps["correction"]:
        console.print(f"            {correction_line(found)}", highlight=False)
    console.print(
        f"            error of a single step ±{steps['step_error']:.0%}, of all steps together "
        f"±{steps['drift']:.0%}, which gives the intervals",
        highlight=False,
    )
    for line in feature_lines(forecast["layout"]):
        console.print(line, highlight=False)
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("ms")
    for percentile in PERCENTILES:
        rows.add_column(f"p{percentile}", justify="right", no_wrap=True)
    for metric in METRICS:
        keys = [f"p{percentile}_{metric}_ms" for percentile in PERCENTILES]
        if keys[0] in figures:
            rows.add_row(METRIC_NAMES[metric], *(with_interval(figures[key]) for key in keys))
    console.print()
    console.print(rows)
    console.print()
    for line in load_lines(figures):
        console.print(line, highlight=False)
    for note in forecast["notes"]:
        console.print(Text(note, style="yellow"))
    if plan["tried"]:
        show_tried(console, plan)
    if "check" in plan:
        show_check(console, plan["check"])


def show_tried(console: Console, plan: Json) -> None:
    from rich.table import Table

    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("tried")
    for name in ("price an hour", "requests within the goals", "TTFT p99 in ms"):
        rows.add_column(name, justify="right")
    for row in tried_rows(plan):
        rows.add_row(*row)
    console.print()
    console.print(rows)


def tried_rows(plan: Json) -> list[list[str]]:
    """Return layout, price, share of the requests within the goals, and TTFT of each layout."""
    rows = []
    for one in sorted(plan["tried"], key=lambda one: (one["hardware"], one["engines"])):
        price, met = one["price_per_hour"], one["met"]
        rows.append(
            [
                f"{one['layout']}, {one['hardware']}" if one["hardware"] else one["layout"],
                "" if price is None else f"{price:,.2f}",
                f"{met['expected']:.1%} ({met['low']:.1%} to {met['high']:.1%})",
                with_interval(one["p99_ttft_ms"]),
            ]
        )
    return rows


def verdict(plan: Json) -> str:
    layout, met = plan["forecast"]["layout"]["name"], plan["forecast"]["figures"].get("met")
    layout = f"{layout} ({plan['hardware']})" if plan["hardware"] else layout
    if plan["price_per_hour"] is not None:
        layout = f"{layout}, {plan['price_per_hour']:,.2f} an hour,"
    if met is None:
        return f"{layout}: no goals are set (--ttft-slo-ms, --itl-slo-ms)"
    target = plan["target"]
    if met["low"] >= target:
        answer = "meets the goals"
    elif met["high"] < target:
        answer = "misses the goals"
    else:
        answer = "may miss the goals"
    return (
        f"{layout} {answer}: {met['expected']:.1%} of the requests ({met['low']:.1%} to "
        f"{met['high']:.1%}), with a target of {target:.3%}".replace(".000%", "%")
    )


def correction_line(found: Json) -> str:
    checks = "1 check" if found["checks"] == 1 else f"{found['checks']} checks"
    return (
        f"corrected by {checks}, the last on {found['last']}: steps with prefill "
        f"×{found['prefill_factor']:.2f}, others ×{found['decode_factor']:.2f}"
    )


def feature_lines(layout: Json) -> list[str]:
    """Describe the speculation and the offload tier of a layout, if it has them."""
    lines = []
    if drafts := layout["speculation"]:
        lines.append(
            f"speculation {drafts['depth']} drafted tokens a row, each right with "
            f"{drafts['rate']:.0%} if those before it are"
        )
    if tier := layout["offload"]:
        lines.append(
            f"offload     {tier['share']:.0%} of each prompt from a tier at "
            f"{tier['bytes_per_s'] / 1e9:g} GB/s"
        )
    return lines


def load_lines(figures: Json) -> list[str]:
    lines = []
    if "goodput" in figures:
        one = figures["goodput"]
        lines.append(
            f"goodput     {one['expected']:.3g} requests/s ({one['low']:.3g} to {one['high']:.3g})"
        )
    preempted, cached = figures["preempted"]["expected"], figures["cached"]["expected"]
    lines.append(
        f"prompts     {cached:.0%} of the prompt tokens cached; preempted: {preempted:.0f}"
    )
    for role in (name.removesuffix("_utilisation") for name in figures if "_utilisation" in name):
        use, mean, peak = (figures[f"{role}_{name}"] for name in ("utilisation", *KV))
        lines.append(
            f"{role:11} in use {use['expected']:.0%} of the time ({use['low']:.0%} to "
            f"{use['high']:.0%}); KV cache {mean['expected']:.0%} held by requests, at most "
            f"{peak['expected']:.0%} ({peak['low']:.0%} to {peak['high']:.0%})"
        )
    return lines


def with_interval(figure: Json) -> str:
    """Return an expected value and its interval."""
    low, high = _short(figure["low"]), _short(figure["high"])
    return f"{_short(figure['expected'])} ({low} to {high})"


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
