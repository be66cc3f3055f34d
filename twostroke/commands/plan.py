"""`twostroke plan`: what a trace will see from engines, before there are any."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.commands.bench import api_key
from twostroke.commands.output import check_output, tell, write
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.load.definitions import Goals
    from twostroke.measure.load.traces import TraceRequest
    from twostroke.planner.layout import EngineShape, Layout
    from twostroke.planner.predict import Forecast
    from twostroke.planner.search import EngineKind, Search
    from twostroke.planner.steptimes import StepModel

DESCRIPTION = (
    "Simulate a trace of requests on engines with the product's own scheduler and KV cache, and "
    "tell TTFT, gaps, goodput, utilisation and KV pressure, each with an interval. Step times are "
    "those of a running server (--steps URL, --calibrate URL), of a file of its records (--steps "
    "FILE), or of a data sheet (--model with --hardware). Example: twostroke plan --trace "
    "azure.csv --steps http://localhost:8000 --engines 2 --ttft-slo-ms 500 --itl-slo-ms 50"
)
OPERANDS = ""
SYNTHETIC_S = 600.0
AUTO = "auto"
WEIGHTS = ("fp32", "fp16", "fp8", "int8", "int4", "fp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", metavar="FILE", help="Azure's, Mooncake's, /records, bench or guidellm results")
    add("--input-len", type=int, metavar="N", help="without a trace: mean prompt tokens")
    add("--output-len", type=int, metavar="N", help="without a trace: mean output tokens")
    add("--rate", type=float, metavar="R", help="requests a second; scales the times of a trace")
    add("--trace-start", type=float, default=0.0, metavar="S", help="seconds into the trace")
    add("--trace-seconds", type=float, metavar="S", help="of the trace; default: all of it")
    add("--trace-shrink", type=float, default=1.0, metavar="X", help="divides lengths")
    add("--trace-keep", type=int, default=1, metavar="N", help="every Nth request alone")
    add("--steps", metavar="URL|FILE", help="step times of a twostroke server's records")
    add("--calibrate", metavar="URL", help="load this server for a minute, and take its step times")
    add("--save-steps", metavar="FILE", help="keep the records for --steps")
    add("--api-key", metavar="KEY", help="of the server; default: OPENAI_API_KEY, if set")
    add("--model", metavar="MODEL", help="without step records: a name, folder or file")
    add("--hardware", nargs="+", metavar="H", help="without step records: such as A100 H100; here")
    add(
        "--price-per-hour", type=float, nargs="+", metavar="P", help="of one GPU of each --hardware"
    )
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    add("--weights", choices=WEIGHTS, help="of --model; default: as a GGUF file has them, or fp16")
    add("--kv-cache-dtype", choices=("fp32", "fp16", "fp8", "int8"), default="fp16")
    add("--engines", default="1", metavar="N", help="that share the requests; auto: the fewest")
    add("--prefill-engines", type=int, metavar="P", help="pools instead: engines that prefill")
    add("--decode-engines", type=int, metavar="D", help="and engines that decode")
    add("--hand-over-gbytes", type=float, default=10.0, metavar="B", help="GB/s of their links")
    add("--max-num-seqs", type=int, metavar="N", help="default: the server's")
    add("--max-num-batched-tokens", type=int, metavar="N", help="default: the server's")
    add("--ttft-slo-ms", type=float, metavar="MS", help="goal for a request's first token")
    add("--itl-slo-ms", type=float, metavar="MS", help="goal for a request's mean gap (its TPOT)")
    add("--target", type=float, default=0.99, metavar="P", help="share of requests that must meet")
    add("--check", metavar="URL", help="replay the trace against this server, and compare")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(html=None)


def execute(args: argparse.Namespace) -> int:
    check_output(args.save_steps)
    _check_numbers(args)
    from twostroke.planner.check import compare, replay
    from twostroke.planner.report import plan_json, show_plan
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
    told = plan_json(trace, kind, goals, args.target, found, tried)
    if args.check is not None:
        run = asyncio.run(replay(args.check, api_key(args), trace, args.trace_shrink))
        told["check"] = compare(found, run, goals)
    tell(args, told, lambda console: show_plan(console, told), lambda: "")
    return 0


def engine_kinds(
    args: argparse.Namespace, trace: list[TraceRequest], goals: Goals
) -> list[EngineKind]:
    """The engines that the command names, with their step times."""
    from twostroke.measure.load.traces import block_tokens
    from twostroke.planner.layout import Layout
    from twostroke.planner.predict import predict
    from twostroke.planner.search import EngineKind

    def kind(name: str, model: StepModel, shape: EngineShape, price: float | None) -> EngineKind:
        shape = _with_settings(shape, args)
        block = block_tokens(args.trace_shrink)

        def forecast(count: int) -> Forecast:
            layout = _pools(args, shape) or Layout(count, shape)
            return predict(trace, layout, model, goals, block, args.seed)

        return EngineKind(name, model, forecast, price)

    prices: list[float | None] = args.price_per_hour or [None]
    if args.calibrate is not None or args.steps is not None:
        return [kind("", *_measured(args, trace), prices[0])]
    if not (args.model and args.hardware):
        raise ConfigError(
            "no step times: give a running server (--steps URL, or --calibrate URL, which loads it "
            "for a minute), a file of its records (--steps FILE), or --model with --hardware for a "
            "data sheet's"
        )
    if args.price_per_hour is None:
        prices = [None] * len(args.hardware)
    if len(prices) != len(args.hardware):
        raise ConfigError(
            f"--price-per-hour has {len(prices)} prices for {len(args.hardware)} kinds of "
            "--hardware; give one for each"
        )
    if len(args.hardware) > 1 and args.engines != AUTO:
        raise ConfigError("several kinds of --hardware are compared with --engines auto alone")
    size = args.tensor_parallel_size
    return [
        kind(hardware, *_roofline(args, hardware), None if price is None else size * price)
        for hardware, price in zip(args.hardware, prices, strict=True)
    ]


def _pools(args: argparse.Namespace, shape: EngineShape) -> Layout | None:
    from twostroke.planner.engine import Link
    from twostroke.planner.layout import Layout

    if args.prefill_engines is None:
        return None
    if not shape.token_bytes:
        raise ConfigError(
            "pools need the bytes of a token's keys and values, and these step records do not have "
            "them (kv_bytes); take records of a newer server"
        )
    link = Link(shape.token_bytes, 1e9 * args.hand_over_gbytes)
    return Layout(0, shape, args.prefill_engines, args.decode_engines, link)


def _no_layout(search: Search, target: float) -> str:
    best = max(search.tried, key=lambda one: one.forecast.figures["met"].low)
    forecast = best.forecast
    return (
        f"no number of engines up to {max(one.engines for one in search.tried)} meets the goals "
        f"for {target:.1%} of the requests; {best.kind.name} {forecast.layout.name} meet them for "
        f"{forecast.figures['met'].low:.1%} in the worst simulation, where TTFT p99 is "
        f"{forecast.figures['p99_ttft_ms'].high:,.0f} ms and TPOT p99 "
        f"{forecast.figures['p99_tpot_ms'].high:,.0f} ms; give goals that one request alone can "
        "meet, or faster hardware"
    )


def read_load(args: argparse.Namespace) -> list[TraceRequest]:
    """The trace, scaled as asked for, or a synthetic one."""
    from twostroke.measure.load.traces import at_rate, read_trace, scaled, synthetic

    if args.trace is not None:
        found = read_trace(args.trace, args.trace_start, args.trace_seconds)
        found = scaled(found, shrink=args.trace_shrink, keep=args.trace_keep)
        return at_rate(found, args.rate) if args.rate else found
    if not (args.rate and args.input_len and args.output_len):
        raise ConfigError(
            "nothing to plan for: give a trace (--trace FILE), or --rate, --input-len and "
            "--output-len for a synthetic one"
        )
    seconds = args.trace_seconds or SYNTHETIC_S
    return synthetic(args.rate, seconds, args.input_len, args.output_len, args.seed)


def _measured(args: argparse.Namespace, trace: list[TraceRequest]) -> tuple[StepModel, EngineShape]:
    """Step times of a server's records, and the engine that wrote them."""
    from twostroke.planner.layout import shape_of_server
    from twostroke.planner.steptimes import measured_model

    if args.calibrate is not None:
        records, source = asyncio.run(_calibrated(args, trace)), args.calibrate
    else:
        records, source = _recorded(args), args.steps
    if args.save_steps:
        write(args, args.save_steps, json.dumps(records) + "\n", "step records")
    where = f"{records.get('model', 'a model')} on {records.get('device', '?')}, {source}"
    return measured_model(records, where), shape_of_server(records, source)


async def _calibrated(args: argparse.Namespace, trace: list[TraceRequest]) -> dict[str, Any]:
    from twostroke.planner.calibrate import SECONDS, calibrate

    print(f"Calibrating for {SECONDS:g} s…", file=sys.stderr, flush=True)
    longest = max(one.prompt_tokens for one in trace)
    return await calibrate(args.calibrate, api_key(args), longest, SECONDS)


def _recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The records of a running server, or of a file."""
    if args.steps.startswith(("http://", "https://")):
        from twostroke.commands.trace import fetch_records

        return dict(asyncio.run(fetch_records(args.steps, api_key(args), 600.0)))
    try:
        found = json.loads(Path(args.steps).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--steps {args.steps} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"--steps {args.steps} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--steps {args.steps}: expected one JSON object, as /records answers")
    return found


def _roofline(args: argparse.Namespace, name: str) -> tuple[StepModel, EngineShape]:
    from twostroke.config import EngineConfig
    from twostroke.measure.roofline.hardware import find_hardware
    from twostroke.measure.roofline.roofline import FILE, Roofline, Settings
    from twostroke.measure.roofline.shapes import find_spec, stored_bytes
    from twostroke.planner.layout import shape_of_hardware
    from twostroke.planner.steptimes import roofline_model

    stored = stored_bytes(args.model) if args.weights is None else None
    settings = Settings(
        tensor_parallel=args.tensor_parallel_size,
        weights=args.weights or ("fp16" if stored is None else FILE),
        kv=args.kv_cache_dtype,
    )
    spec, hardware = find_spec(args.model), find_hardware(name)
    roofline = Roofline(spec, hardware, settings, 0.0, stored)
    shape = shape_of_hardware(
        roofline.kv_tokens,
        roofline.kv_bytes_per_token,
        spec.max_context,
        args.model,
        hardware.name,
        EngineConfig(),
    )
    return roofline_model(roofline), shape


def _with_settings(shape: EngineShape, args: argparse.Namespace) -> EngineShape:
    given = {
        name: value
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(args, name)) is not None
    }
    return shape._replace(**given)


def goals_of(args: argparse.Namespace) -> Goals:
    from twostroke.measure.load.definitions import Goals

    ttft, itl = (None if ms is None else ms / 1e3 for ms in (args.ttft_slo_ms, args.itl_slo_ms))
    return replace(Goals(), ttft_s=ttft, tpot_s=itl)


def _check_numbers(args: argparse.Namespace) -> None:
    positive = (
        "input_len output_len rate trace_seconds trace_shrink trace_keep tensor_parallel_size "
        "prefill_engines decode_engines hand_over_gbytes max_num_seqs max_num_batched_tokens "
        "ttft_slo_ms itl_slo_ms"
    )
    for name in positive.split():
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, and is {value:g}")
    if not 0 < args.target <= 1:
        raise ConfigError(f"--target {args.target:g}: give a share above 0 and up to 1, as 0.99")
    if args.engines != AUTO and not (args.engines.isdecimal() and 0 < int(args.engines) <= 1024):
        raise ConfigError(f"--engines {args.engines}: give a number from 1 to 1024, or auto")
    if (args.prefill_engines is None) is not (args.decode_engines is None):
        raise ConfigError("--prefill-engines and --decode-engines go together: give both")
    if args.prefill_engines is not None and args.engines != "1":
        raise ConfigError("--engines are those that do both phases: leave it out beside pools")
    if args.engines == AUTO and args.ttft_slo_ms is None and args.itl_slo_ms is None:
        raise ConfigError("--engines auto needs a goal: --ttft-slo-ms, --itl-slo-ms, or both")
    if any(not 0 < price < float("inf") for price in args.price_per_hour or ()):
        raise ConfigError("--price-per-hour: give prices above 0")
    if args.steps is not None and args.calibrate is not None:
        raise ConfigError("--steps and --calibrate: give one of them")
