"""The kinds of engines that `twostroke plan` simulates. A kind is a combination of hardware and
settings, with its step times, capacity, price and forecasts."""

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
from twostroke.commands.output import write_file
from twostroke.commands.plan_flags import AUTO, DEPTH
from twostroke.commands.roofline import roofline_settings
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.load.definitions import Goals
    from twostroke.measure.load.traces import TraceRequest
    from twostroke.planner.kept_checks import KeptChecks
    from twostroke.planner.layout import EngineShape
    from twostroke.planner.predict import LayoutForecast
    from twostroke.planner.search import EngineChoice
    from twostroke.planner.steptimes import StepModel

NO_KV_BYTES = (
    ", the bytes of a token's keys and values, and these step records do not have them; use "
    "records of a newer server"
)


def engine_kinds(
    args: argparse.Namespace, trace: list[TraceRequest], goals: Goals
) -> list[EngineChoice]:
    """Return the kinds of engines on the command line that can hold every request of the trace."""
    from twostroke.planner.layout import CapacityError

    if args.calibrate is not None or args.steps is not None:
        price = args.price_per_hour[0] if args.price_per_hour else None
        records, model, shape = _measured(args, trace)
        return [_choice(args, trace, goals, _Kind("", price, args, "", records), model, shape)]
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
    price: float | None  # price of an engine per hour
    args: argparse.Namespace
    hardware: str = ""
    records: dict[str, Any] | None = None  # the step records, instead of a data sheet


def kept_checks() -> KeptChecks:
    from twostroke.model.find.hub import cache_dir
    from twostroke.planner.kept_checks import KeptChecks

    return KeptChecks(cache_dir() / "plan-checks.json")


def _server(kind: _Kind, model: StepModel, shape: EngineShape) -> dict[str, Any]:
    """Return the model, the machine and the settings of a kind of engines."""
    records, args = kind.records, kind.args
    if records is not None:
        machine = records.get("machine") or {}
        found = {name: records.get(name) for name in ("model", "weights", "device", "isa")}
        found |= {"cpus": machine.get("cpus"), "gpus": machine.get("gpus")}
    else:
        names = ("model", "weights", "decode_weights", "kv_cache_dtype", "tensor_parallel_size")
        found = {name: getattr(args, name) for name in names} | {"hardware": kind.hardware}
        found["efficiencies"] = model.source  # a check applies only to the same efficiencies
    settings = ("max_num_seqs", "max_num_batched_tokens", "max_in_flight")
    found |= {name: getattr(shape, name) for name in settings}
    return found | {"speculation": bool(shape.acceptance), "offload": bool(shape.offload)}


SETTINGS = (  # name of the argument, and the format of its value in the name of a kind
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
    from twostroke.planner.kept_checks import corrected
    from twostroke.planner.layout import EngineLayout
    from twostroke.planner.predict import check_lengths, predict
    from twostroke.planner.search import EngineChoice

    shape = _with_features(shape._replace(**_settings(kind.args)), kind.args)
    link = Link(shape.token_bytes, 1e9 * args.hand_over_gbytes)
    check_lengths(trace, EngineLayout(1, shape), trace_block(args))

    server = _server(kind, model, shape)
    if args.kept_checks:
        model = corrected(model, kept_checks().of(server))

    def forecast(layout: EngineLayout) -> LayoutForecast:
        return predict(trace, layout, model, goals, trace_block(args), args.seed)

    def engines(count: int) -> LayoutForecast:
        if args.prefill_engines is not None:
            return pools(args.prefill_engines, args.decode_engines)
        return forecast(EngineLayout(count, shape))

    def pools(prefill: int, decode: int) -> LayoutForecast:
        if not shape.token_bytes:
            raise ConfigError(f"pools need kv_bytes{NO_KV_BYTES}")
        return forecast(EngineLayout(0, shape, prefill, decode, link))

    found = pools if args.pools else None
    planned = _settings(kind.args)
    return EngineChoice(kind.name, model, engines, kind.price, found, server, planned)


def _measured(
    args: argparse.Namespace, trace: list[TraceRequest]
) -> tuple[dict[str, Any], StepModel, EngineShape]:
    """Return a server's records, step times from them, and the shape of its engine."""
    from twostroke.planner.layout import shape_of_server
    from twostroke.planner.steptimes import measured_model

    if args.calibrate is not None:
        records, source = asyncio.run(_calibrated(args, trace)), args.calibrate
    else:
        records, source = _recorded(args), args.steps
    if args.save_steps:
        write_file(args, args.save_steps, json.dumps(records) + "\n", "step records")
    where = f"{records.get('model', 'a model')} on {records.get('device', '?')}, {source}"
    return records, measured_model(records, where), shape_of_server(records, source)


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
    from twostroke.model.describe.tensor_parallel import check_ranks
    from twostroke.planner.layout import CapacityError, shape_of_hardware
    from twostroke.planner.learned import learned_model
    from twostroke.planner.steptimes import roofline_model

    settings, stored = roofline_settings(args)
    if args.decode_weights not in (None, args.weights):
        settings = replace(settings, decode_weights=args.decode_weights)
    spec, hardware = find_spec(args.model), find_hardware(name)
    if args.tensor_parallel_size > 1:
        try:
            check_ranks(spec, args.tensor_parallel_size)
        except ConfigError as error:
            raise CapacityError(str(error)) from None
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


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings of the command line; the first of several values."""
    found = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            found[name] = value
    return found


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


def trace_block(args: argparse.Namespace) -> int:
    """Return the number of tokens in a block of the trace."""
    from twostroke.measure.load.traces import block_tokens

    return block_tokens(args.trace_shrink)
