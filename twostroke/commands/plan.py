"""`twostroke plan`: simulates the latencies of a trace of requests on engines."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.commands.bench import api_key
from twostroke.commands.output import check_output, show_result, write_file
from twostroke.commands.plan_flags import AUTO, add_plan_arguments, check_plan_arguments
from twostroke.commands.plan_kinds import engine_kinds, kept_checks, trace_block
from twostroke.commands.plan_kuberay import check_manifest, write_manifest
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.load.definitions import Goals
    from twostroke.measure.load.traces import TraceRequest
    from twostroke.planner.load_curve import Simulate
    from twostroke.planner.predict import LayoutForecast
    from twostroke.planner.search import EngineChoice, Search

DESCRIPTION = (
    "Simulate a trace of requests on engines with twostroke's scheduler and KV cache, and report "
    "TTFT, gaps, goodput, utilisation and KV pressure, each with an interval. Step times come from "
    "a running server (--steps URL, --calibrate URL), from a file of its records (--steps FILE), "
    "or from a data sheet (--model with --hardware). Example: twostroke plan --trace "
    "azure.csv --steps http://localhost:8000 --engines 2 --ttft-slo-ms 500 --itl-slo-ms 50"
)
OPERANDS = ""
SYNTHETIC_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    check_output(args.save_steps, args.html, args.save_plan)
    check_manifest(args.kuberay)
    check_plan_arguments(args)
    from twostroke.planner.check import compare, keep_check, measured_factors, replay
    from twostroke.planner.plan_page import plan_page
    from twostroke.planner.report import plan_json, show_plan, verdict
    from twostroke.planner.search import cheapest

    trace, goals = read_load(args), goals_of(args)
    kinds = engine_kinds(args, trace, goals)
    tried = []
    if args.engines == AUTO:
        search = cheapest(kinds, args.target)
        tried = search.tried
        if search.best is None:
            raise ConfigError(_no_layout(search, args.target))
        kind, found = search.best.kind, search.best.forecast
    else:
        kind = kinds[0]
        found = kind.predict(int(args.engines))
    result = plan_json(trace, kind, goals, args.target, found, tried)
    result |= {"settings": kind.settings, "verdict": verdict(result)}
    if args.html is not None:
        from twostroke.planner.load_curve import load_curves

        result["loads"] = load_curves(
            trace, kind, found, tried, args.target, simulated(args, goals)
        )
    if args.check is not None:
        run = asyncio.run(replay(args.check, api_key(args), trace, args.trace_shrink))
        result["check"] = compare(found, run, goals)
        if args.kept_checks:
            factors = measured_factors(found, kind.model, trace, run, trace_block(args), args.seed)
            result["check"]["kept"] = keep_check(kept_checks(), kind.server, factors, run)
    if args.save_plan is not None:
        write_file(args, args.save_plan, json.dumps(result, indent=1) + "\n", "plan")
    if args.kuberay is not None:
        write_manifest(args.kuberay, result)
    show_result(args, result, lambda console: show_plan(console, result), lambda: plan_page(result))
    return 0


def simulated(args: argparse.Namespace, goals: Goals) -> Simulate:
    """Return a function that simulates a layout with another trace, without intervals."""
    from twostroke.planner.predict import predict

    def run(
        forecast: LayoutForecast, kind: EngineChoice, trace: list[TraceRequest]
    ) -> LayoutForecast:
        block = trace_block(args)
        return predict(trace, forecast.layout, kind.model, goals, block, args.seed, interval=False)

    return run


def _no_layout(search: Search, target: float) -> str:
    best = max(search.tried, key=lambda tried: tried.forecast.figures["met"].low)
    forecast = best.forecast
    return (
        f"no number of engines up to {max(tried.engines for tried in search.tried)} meets the "
        f"goals for {target:.1%} of the requests; {best.kind.name} {forecast.layout.name} meet "
        f"them for {forecast.figures['met'].low:.1%} in the worst simulation, where TTFT p99 is "
        f"{forecast.figures['p99_ttft_ms'].high:,.0f} ms and TPOT p99 "
        f"{forecast.figures['p99_tpot_ms'].high:,.0f} ms; give goals that one request alone can "
        "meet, or faster hardware"
    )


def read_load(args: argparse.Namespace) -> list[TraceRequest]:
    """Return the scaled trace, or a synthetic one."""
    from twostroke.measure.load.traces import at_rate, read_trace, scaled, synthetic

    if args.trace is not None:
        found = read_trace(args.trace, args.trace_start, args.trace_seconds)
        found = scaled(found, shrink=args.trace_shrink, keep=args.trace_keep)
        return at_rate(found, args.rate) if args.rate else found
    if not (args.rate and args.input_len and args.output_len):
        raise ConfigError(
            "no requests: give a trace (--trace FILE), or --rate, --input-len and --output-len for "
            "a synthetic one"
        )
    seconds = args.trace_seconds or SYNTHETIC_S
    return synthetic(args.rate, seconds, args.input_len, args.output_len, args.seed)


def goals_of(args: argparse.Namespace) -> Goals:
    from twostroke.measure.load.definitions import Goals

    ttft, itl = (None if ms is None else ms / 1e3 for ms in (args.ttft_slo_ms, args.itl_slo_ms))
    return replace(Goals(), ttft_s=ttft, tpot_s=itl)
