"""`twostroke plan`: simulates the latencies of a trace of requests on engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twostroke.commands.bench import api_key
from twostroke.commands.output import add_result_arguments, check_output, show_result, write_file
from twostroke.commands.roofline import KV_FORMATS, WEIGHT_FORMATS, roofline_settings
from twostroke.draft.speculation_config import MAX_DEPTH
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.load.definitions import Goals
    from twostroke.measure.load.traces import TraceRequest
    from twostroke.planner.layout import EngineShape
    from twostroke.planner.load_curve import Simulate
    from twostroke.planner.predict import LayoutForecast
    from twostroke.planner.search import EngineChoice, Search
    from twostroke.planner.steptimes import StepModel

DESCRIPTION = (
    "Simulate a trace of requests on engines with twostroke's scheduler and KV cache, and report "
    "TTFT, gaps, goodput, utilisation and KV pressure, each with an interval. Step times come from "
    "a running server (--steps URL, --calibrate URL), from a file of its records (--steps FILE), "
    "or from a data sheet (--model with --hardware). Example: twostroke plan --trace "
    "azure.csv --steps http://localhost:8000 --engines 2 --ttft-slo-ms 500 --itl-slo-ms 50"
)
OPERANDS = ""
SYNTHETIC_S = 600.0
AUTO = "auto"
DEPTH, GBYTES_PER_S = 4, 20.0  # defaults of the planner's modules, which import numpy
NO_KV_BYTES = (
    ", the bytes of a token's keys and values, and these step records do not have them; use "
    "records of a newer server"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trace",
        metavar="FILE",
        help="a trace of Azure or Mooncake, /records, results of bench or guidellm",
    )
    add("--input-len", type=int, metavar="N", help="without a trace: mean prompt tokens")
    add("--output-len", type=int, metavar="N", help="without a trace: mean output tokens")
    add("--rate", type=float, metavar="R", help="requests a second; scales the times of a trace")
    add("--trace-start", type=float, default=0.0, metavar="S", help="seconds into the trace")
    add("--trace-seconds", type=float, metavar="S", help="seconds of the trace; default: all")
    add("--trace-shrink", type=float, default=1.0, metavar="X", help="divide lengths by X")
    add("--trace-keep", type=int, default=1, metavar="N", help="use one of N requests")
    add("--steps", metavar="URL|FILE", help="take step times from a twostroke server's records")
    add(
        "--calibrate", metavar="URL", help="load this server for a minute to measure its step times"
    )
    add("--save-steps", metavar="FILE", help="write the records to a file for --steps")
    add("--api-key", metavar="KEY", help="key of the server; default: OPENAI_API_KEY, if set")
    add("--model", metavar="MODEL", help="without step records: a name, folder or file")
    add("--hardware", nargs="+", metavar="H", help="without step records: such as A100 H100; here")
    add(
        "--price-per-hour",
        type=float,
        nargs="+",
        metavar="P",
        help="price of a GPU of each --hardware",
    )
    several = "several values are tried with --engines auto"
    add(
        "--tensor-parallel-size", "-tp", type=int, nargs="+", default=[1], metavar="N", help=several
    )
    add(
        "--weights",
        choices=WEIGHT_FORMATS,
        nargs="+",
        help=f"default: as stored in a GGUF file, else fp16; {several}",
    )
    add(
        "--decode-weights",
        choices=WEIGHT_FORMATS,
        help="weights of decode, stored beside --weights; default: --weights",
    )
    add("--kv-cache-dtype", choices=KV_FORMATS, nargs="+", default=["fp16"], help=several)
    add(
        "--engines",
        default="1",
        metavar="N",
        help="engines that share the requests; auto: the fewest",
    )
    add("--pools", action="store_true", help="with --engines auto: try prefill and decode pools")
    add("--prefill-engines", type=int, metavar="P", help="engines that only prefill")
    add("--decode-engines", type=int, metavar="D", help="engines that only decode")
    add(
        "--hand-over-gbytes",
        type=float,
        default=10.0,
        metavar="B",
        help="GB/s of the links between them",
    )
    add(
        "--speculation-acceptance",
        type=float,
        metavar="P",
        help="speculative decoding: the probability that a drafted token is right; default: the "
        "server's, if its records have drafts; 0: no speculation",
    )
    add(
        "--speculation-depth",
        type=int,
        metavar="N",
        help=f"tokens that a drafter offers for a row (default: {DEPTH}, or the server's)",
    )
    add(
        "--offload-hits",
        type=float,
        default=0.0,
        metavar="P",
        help="share of each prompt that a KV offload tier has (default: 0)",
    )
    add(
        "--offload-gbytes",
        type=float,
        default=GBYTES_PER_S,
        metavar="B",
        help=f"GB/s from the offload tier to an engine (default: {GBYTES_PER_S:g})",
    )
    add("--max-num-seqs", type=int, nargs="+", metavar="N", help="default: the server's")
    add("--max-num-batched-tokens", type=int, nargs="+", metavar="N", help="default: the server's")
    add("--ttft-slo-ms", type=float, metavar="MS", help="goal for the time to the first token")
    add("--itl-slo-ms", type=float, metavar="MS", help="goal for the mean gap of a request (TPOT)")
    add(
        "--target",
        type=float,
        default=0.99,
        metavar="P",
        help="share of requests that must meet the goals",
    )
    add("--check", metavar="URL", help="replay the trace on this server and compare")
    add("--seed", type=int, default=0, metavar="N")
    add_result_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    check_output(args.save_steps, args.html)
    _check_numbers(args)
    from twostroke.planner.check import compare, replay
    from twostroke.planner.plan_page import plan_page
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
    result = plan_json(trace, kind, goals, args.target, found, tried)
    if args.html is not None:
        from twostroke.planner.load_curve import load_curves

        result["loads"] = load_curves(
            trace, kind, found, tried, args.target, simulated(args, goals)
        )
    if args.check is not None:
        run = asyncio.run(replay(args.check, api_key(args), trace, args.trace_shrink))
        result["check"] = compare(found, run, goals)
    show_result(args, result, lambda console: show_plan(console, result), lambda: plan_page(result))
    return 0


def engine_kinds(
    args: argparse.Namespace, trace: list[TraceRequest], goals: Goals
) -> list[EngineChoice]:
    """Return the kinds of engines on the command line that can hold every request of the trace."""
    from twostroke.planner.layout import CapacityError

    if args.calibrate is not None or args.steps is not None:
        price = args.price_per_hour[0] if args.price_per_hour else None
        found = _measured(args, trace)
        return [_choice(args, trace, goals, _Kind("", price, args), *found)]
    if not (args.model and args.hardware):
        raise ConfigError(
            "no step times: give a running server (--steps URL, or --calibrate URL, which loads "
            "the server for a minute), a file of its records (--steps FILE), or --model with "
            "--hardware for a data sheet"
        )
    wanted = _kinds(args)
    if len(wanted) > 1 and args.engines != AUTO:
        raise ConfigError(
            "several kinds of --hardware, or several values of a setting, need --engines auto"
        )
    kinds, refused = [], []
    for kind in wanted:
        try:
            model, shape = _data_sheet(kind.args, kind.hardware)
            choice = _choice(args, trace, goals, kind, model, shape)
        except CapacityError as error:
            refused.append(error)
        else:
            kinds.append(choice)
    if not kinds:
        raise ConfigError("\n".join(dict.fromkeys(map(str, refused))))
    return kinds


class _Kind(NamedTuple):
    """One combination of hardware and settings. `args` has one value for each setting."""

    name: str
    price: float | None  # of an engine an hour
    args: argparse.Namespace
    hardware: str = ""


SETTINGS = (  # name of the argument, and how the name of a kind tells its value
    ("tensor_parallel_size", "tp {}"),
    ("weights", "{}"),
    ("kv_cache_dtype", "KV {}"),
    ("max_num_seqs", "{} seqs"),
    ("max_num_batched_tokens", "{} tokens a step"),
)


def _kinds(args: argparse.Namespace) -> list[_Kind]:
    """Return all combinations of hardware and settings."""
    prices: list[float | None] = args.price_per_hour or [None] * len(args.hardware)
    if len(prices) != len(args.hardware):
        raise ConfigError(
            f"--price-per-hour has {len(prices)} prices for {len(args.hardware)} kinds of "
            "--hardware; give one for each"
        )
    columns = [getattr(args, name) or [None] for name, _ in SETTINGS]
    found = []
    for hardware, price in zip(args.hardware, prices, strict=True):
        for values in product(*columns):
            words = [hardware]
            for (_, word), column, value in zip(SETTINGS, columns, values, strict=True):
                if len(column) > 1:
                    words.append(word.format(value))
            names = [name for name, _ in SETTINGS]
            one = argparse.Namespace(**(vars(args) | dict(zip(names, values, strict=True))))
            each = None if price is None else one.tensor_parallel_size * price
            found.append(_Kind(", ".join(words), each, one, hardware))
    return found


def _choice(
    args: argparse.Namespace,
    trace: list[TraceRequest],
    goals: Goals,
    kind: _Kind,
    model: StepModel,
    shape: EngineShape,
) -> EngineChoice:
    from twostroke.planner.engine import Link
    from twostroke.planner.layout import EngineLayout
    from twostroke.planner.predict import check_lengths, predict
    from twostroke.planner.search import EngineChoice

    shape = _with_settings(shape, kind.args)
    link = Link(shape.token_bytes, 1e9 * args.hand_over_gbytes)
    check_lengths(trace, EngineLayout(1, shape), _block(args))

    def forecast(layout: EngineLayout) -> LayoutForecast:
        return predict(trace, layout, model, goals, _block(args), args.seed)

    def engines(count: int) -> LayoutForecast:
        if args.prefill_engines is not None:
            return pools(args.prefill_engines, args.decode_engines)
        return forecast(EngineLayout(count, shape))

    def pools(prefill: int, decode: int) -> LayoutForecast:
        if not shape.token_bytes:
            raise ConfigError(f"pools need kv_bytes{NO_KV_BYTES}")
        return forecast(EngineLayout(0, shape, prefill, decode, link))

    return EngineChoice(kind.name, model, engines, kind.price, pools if args.pools else None)


def simulated(args: argparse.Namespace, goals: Goals) -> Simulate:
    """Return a function that simulates a layout with another trace, without intervals."""
    from twostroke.planner.predict import predict

    def run(
        forecast: LayoutForecast, kind: EngineChoice, trace: list[TraceRequest]
    ) -> LayoutForecast:
        block = _block(args)
        return predict(trace, forecast.layout, kind.model, goals, block, args.seed, interval=False)

    return run


def _block(args: argparse.Namespace) -> int:
    """Return the tokens of a block of the trace."""
    from twostroke.measure.load.traces import block_tokens

    return block_tokens(args.trace_shrink)


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


def _measured(args: argparse.Namespace, trace: list[TraceRequest]) -> tuple[StepModel, EngineShape]:
    """Return step times from a server's records, and the shape of its engine."""
    from twostroke.planner.layout import shape_of_server
    from twostroke.planner.steptimes import measured_model

    if args.calibrate is not None:
        records, source = asyncio.run(_calibrated(args, trace)), args.calibrate
    else:
        records, source = _recorded(args), args.steps
    if args.save_steps:
        write_file(args, args.save_steps, json.dumps(records) + "\n", "step records")
    where = f"{records.get('model', 'a model')} on {records.get('device', '?')}, {source}"
    return measured_model(records, where), shape_of_server(records, source)


async def _calibrated(args: argparse.Namespace, trace: list[TraceRequest]) -> dict[str, Any]:
    from twostroke.planner.calibrate import SECONDS, calibrate

    print(f"Calibrating for {SECONDS:g} s…", file=sys.stderr, flush=True)
    longest = max(request.prompt_tokens for request in trace)
    return await calibrate(args.calibrate, api_key(args), longest, SECONDS)


def _recorded(args: argparse.Namespace) -> dict[str, Any]:
    """Return the records of a running server or of a file."""
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
        raise ConfigError(
            f"--steps {args.steps}: expected a JSON object like the answer of /records"
        )
    return found


def _data_sheet(args: argparse.Namespace, name: str) -> tuple[StepModel, EngineShape]:
    """Return step times for a model on hardware, and the shape of an engine there."""
    from twostroke.config import EngineConfig
    from twostroke.measure.roofline.hardware import find_hardware
    from twostroke.measure.roofline.roofline import Roofline
    from twostroke.measure.roofline.shapes import find_spec
    from twostroke.planner.layout import shape_of_hardware
    from twostroke.planner.learned import learned_model
    from twostroke.planner.steptimes import roofline_model

    settings, stored = roofline_settings(args)
    if args.decode_weights not in (None, args.weights):
        settings = replace(settings, decode_weights=args.decode_weights)
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
    if hardware.measured:  # a CPU
        return roofline_model(roofline), shape._replace(max_in_flight=1)
    return learned_model(roofline), shape


def _with_settings(shape: EngineShape, args: argparse.Namespace) -> EngineShape:
    """Return the shape with the settings of the command line; of several values, the first."""
    found = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            found[name] = value
    return _with_features(shape._replace(**found), args)


def _with_features(shape: EngineShape, args: argparse.Namespace) -> EngineShape:
    """Return the shape with the speculation and the offload tier of the command line."""
    from twostroke.planner.offload import OffloadHits
    from twostroke.planner.speculation import Acceptance

    acceptance, rate, depth = shape.acceptance, args.speculation_acceptance, args.speculation_depth
    if rate is not None:
        acceptance = Acceptance(rate, acceptance.depth if acceptance else DEPTH) if rate else None
    if depth is not None:
        if acceptance is None:
            raise ConfigError(
                "--speculation-depth needs --speculation-acceptance, the probability that a "
                "drafted token is right"
            )
        acceptance = acceptance._replace(depth=depth)
    offload = None
    if args.offload_hits:
        if not shape.token_bytes:
            raise ConfigError(f"--offload-hits needs kv_bytes{NO_KV_BYTES}")
        if not shape.prefix_caching:
            raise ConfigError("--offload-hits needs prefix caching, which this server has off")
        offload = OffloadHits(args.offload_hits, 1e9 * args.offload_gbytes)
    return shape._replace(acceptance=acceptance, offload=offload)


def goals_of(args: argparse.Namespace) -> Goals:
    from twostroke.measure.load.definitions import Goals

    ttft, itl = (None if ms is None else ms / 1e3 for ms in (args.ttft_slo_ms, args.itl_slo_ms))
    return replace(Goals(), ttft_s=ttft, tpot_s=itl)


def _check_numbers(args: argparse.Namespace) -> None:
    positive = (
        "input_len output_len rate trace_seconds trace_shrink trace_keep tensor_parallel_size "
        "prefill_engines decode_engines hand_over_gbytes max_num_seqs max_num_batched_tokens "
        "ttft_slo_ms itl_slo_ms speculation_depth offload_gbytes"
    )
    for name in positive.split():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, and is {value:g}")
    for name in ("speculation_acceptance", "offload_hits"):
        share = getattr(args, name)
        if share is not None and not 0 <= share < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {share:g}: give a share from 0 to below 1, such as 0.7"
            )
    if (depth := args.speculation_depth) is not None and depth > MAX_DEPTH:
        raise ConfigError(f"--speculation-depth {depth}: give a number up to {MAX_DEPTH}")
    if not 0 < args.target <= 1:
        raise ConfigError(
            f"--target {args.target:g}: give a share above 0 and up to 1, such as 0.99"
        )
    if args.engines != AUTO and not (args.engines.isdecimal() and 0 < int(args.engines) <= 1024):
        raise ConfigError(f"--engines {args.engines}: give a number from 1 to 1024, or auto")
    if (args.prefill_engines is None) is not (args.decode_engines is None):
        raise ConfigError("--prefill-engines and --decode-engines need each other: give both")
    if args.prefill_engines is not None and args.engines != "1":
        raise ConfigError(
            "--engines sets engines for both phases: leave it out with --prefill-engines"
        )
    if args.pools and args.engines != AUTO:
        raise ConfigError("--pools needs --engines auto, which looks for the sizes of the pools")
    if args.engines == AUTO and args.ttft_slo_ms is None and args.itl_slo_ms is None:
        raise ConfigError("--engines auto needs a goal: --ttft-slo-ms, --itl-slo-ms, or both")
    if any(not 0 < price < float("inf") for price in args.price_per_hour or ()):
        raise ConfigError("--price-per-hour: give prices above 0")
    if args.calibrate is not None or args.steps is not None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if len(getattr(args, name) or ()) > 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: step records are of one setting; give one value"
                )
    if args.steps is not None and args.calibrate is not None:
        raise ConfigError("--steps and --calibrate: give one of them")
