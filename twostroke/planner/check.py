"""`--check`: replays a trace against a real server and compares the figures with the forecast."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from twostroke.errors import ConfigError
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.load_run import LoadRun, run_open_loop
from twostroke.measure.load.result import problems
from twostroke.measure.load.sample_client import OpenAIClient, first_model, send_first
from twostroke.measure.load.traces import TraceRequest
from twostroke.measure.load.workload import PromptGenerator, replayed
from twostroke.planner.kept_checks import Factors, KeptChecks, step_factors
from twostroke.planner.predict import (
    METRICS,
    PERCENTILES,
    LayoutForecast,
    latencies_ms,
    predict,
)
from twostroke.planner.steptimes import StepModel

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]
MAX_FITTED = 400  # requests of a trace to which step times are fitted
CHECKED = (
    *(f"p{share}_{metric}_ms" for metric in METRICS for share in PERCENTILES),
    "requests_per_s",
    "goodput",
    "met",
)


async def replay(
    url: str, api_key: str | None, trace: Sequence[TraceRequest], shrink: float
) -> LoadRun:
    """Send the trace's requests at their times. `shrink` divides the lengths of the trace."""
    connections = Connections(Endpoint(url, api_key))
    try:
        client = OpenAIClient(connections, str((await first_model(connections))["id"]))
        # The server's prefix cache may still hold the prompts of another run.
        prompts = PromptGenerator(0, f"check {secrets.token_hex(4)}", as_text=False)
        planned = replayed(list(trace), prompts, shrink)
        shortest = min(planned, key=lambda one: one.prompt_tokens)
        await send_first(client, shortest)
        run = await run_open_loop(client, planned)
    finally:
        connections.close()
    if not any(sample.ok for sample in run.samples):
        raise ServerError(f"no request of the trace succeeded: {run.samples[0].error}")
    return run


def compare(forecast: LayoutForecast, run: LoadRun, goals: Goals) -> Json:
    """Return a row for every figure that was predicted and measured, and the run's problems."""
    measured = latencies_ms(run.samples)
    measured["requests_per_s"] = sum(one.ok for one in run.samples) / run.duration_s
    if goals.any_set:
        met = sum(map(goals.met, run.samples))
        measured |= {"goodput": met / run.duration_s, "met": met / len(run.samples)}
    rows = []
    for name in CHECKED:
        if name in measured and name in forecast.figures:
            one, value = forecast.figures[name], measured[name]
            rows.append(
                {
                    "figure": name,
                    "predicted": one.expected,
                    "low": one.low,
                    "high": one.high,
                    "measured": value,
                    "error": one.expected / value - 1.0 if value else None,
                    "inside": one.contains(value),
                }
            )
    return {"rows": rows, "problems": problems(run, (), None, False)}


def measured_factors(
    forecast: LayoutForecast,
    model: StepModel,
    trace: Sequence[TraceRequest],
    run: LoadRun,
    block_tokens: int,
    seed: int,
) -> Factors:
    """Return the factors of the step times that explain a run of the trace."""
    base = model if model.correction is None else model.correction.base
    first = list(trace[:MAX_FITTED])

    def simulated(scaled: StepModel) -> Json:
        found = predict(first, forecast.layout, scaled, Goals(), block_tokens, seed, interval=False)
        return {name: one.expected for name, one in found.figures.items()}

    return step_factors(base, latencies_ms(run.samples[:MAX_FITTED]), simulated)


def keep_check(kept: KeptChecks, server: Json, factors: Factors, run: LoadRun) -> Json:
    """Keep the result of a run for the next plan of the same servers. Return what was done."""
    if found := problems(run, (), None, False):
        return {"message": f"The check is not kept, because its run is not certified: {found[0]}"}
    try:
        kept.keep(server, factors, len(run.samples), str(date.today()))
    except ConfigError as error:
        return {"message": f"The check is not kept: {error}"}
    return {
        "factors": factors._asdict(),
        "message": (
            f"Kept for the next plan of these servers: steps with prefill take "
            f"{factors.prefill:.2f} and others {factors.decode:.2f} times the uncorrected time; "
            f"with these factors the latencies differ by {factors.rest:.0%}"
        ),
    }


def show_check(console: Console, check: Json) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure")
    for name in ("predicted", "interval", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in check["rows"]:
        error = "" if row["error"] is None else f"{row['error']:+.1%}"
        table.add_row(
            row["figure"],
            f"{row['predicted']:.4g}",
            f"{row['low']:.4g} to {row['high']:.4g}",
            Text(f"{row['measured']:.4g}", style="" if row["inside"] else "yellow"),
            error,
        )
    console.print()
    console.print(table)
    if "kept" in check:
        console.print(check["kept"]["message"], highlight=False)
    inside = sum(row["inside"] for row in check["rows"])
    console.print(f"{inside} of {len(check['rows'])} measured figures lie in their intervals")
    for problem in check["problems"]:
        console.print(Text(f"The run is not certified: {problem}", style="yellow"))
