"""`twostroke roofline`: computes how fast a model can be on a machine, for each phase."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.commands.bench import api_key
from twostroke.commands.output import add_result_arguments, check_output, show_result
from twostroke.commands.trace import fetch_records
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.roofline.roofline import RooflineSettings

DESCRIPTION = (
    "Compute bounds for prefill and decode from a model's shape and a machine's rates: FLOPs, "
    "bytes, the shortest possible TTFT and TPOT, KV bytes per token, how many requests fit, and "
    "the batch size at which batching stops helping. MODEL is a known name (llama-3.1-8b), a size "
    "(7B), a folder, a config.json or a GGUF file. Example: "
    "twostroke roofline llama-3.1-8b --hardware H100 --batch 32"
)
OPERANDS = " MODEL"
WEIGHT_FORMATS = ("fp32", "fp16", "fp8", "int8", "int4", "fp4")
KV_FORMATS = ("fp32", "fp16", "fp8", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL")
    add(
        "--hardware",
        default="here",
        metavar="H",
        help="such as A100, H100, 4090; here: measure this machine",
    )
    add("--prompt", "--input-len", type=int, default=1024, metavar="N", help="tokens to prefill")
    add("--context", type=int, metavar="N", help="tokens of a decoding stream; default: the prompt")
    add("--batch", type=int, default=1, metavar="N", help="streams that decode in one step")
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    add(
        "--weights",
        choices=WEIGHT_FORMATS,
        help="default: as stored in a GGUF file, else fp16",
    )
    add(
        "--decode-weights",
        choices=WEIGHT_FORMATS,
        help="weights of decode, stored beside --weights; default: --weights",
    )
    add("--kv-cache-dtype", choices=KV_FORMATS, default="fp16")
    add(
        "--server",
        metavar="URL",
        help="also show the rates of this twostroke server in its last minute",
    )
    add("--api-key", metavar="KEY", help="key of --server; default: OPENAI_API_KEY, if set")
    add_result_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    check_output(args.html)
    from twostroke.measure.roofline.hardware import find_hardware
    from twostroke.measure.roofline.roofline import (
        Roofline,
        measured_phases,
        roofline_json,
    )
    from twostroke.measure.roofline.roofline_report import roofline_page, show_roofline
    from twostroke.measure.roofline.shapes import find_spec, parameter_count

    for name in ("prompt", "batch", "tensor_parallel_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    count = parameter_count(args.model)
    spec = None if count else find_spec(args.model)
    settings, stored = roofline_settings(args)
    settings = replace(
        settings,
        prompt=args.prompt,
        context=args.context or args.prompt,
        batch=args.batch,
        decode_weights=None if args.decode_weights == args.weights else args.decode_weights,
    )
    found = Roofline(spec, find_hardware(args.hardware), settings, count or 0.0, stored)
    measured = []
    if args.server:
        records = asyncio.run(fetch_records(args.server, api_key(args), 60.0))
        measured = measured_phases(records["steps"])
    show_result(
        args,
        roofline_json(args.model, found, measured),
        lambda console: show_roofline(console, args.model, found, measured),
        lambda: roofline_page(args.model, found, measured),
    )
    return 0


def roofline_settings(args: argparse.Namespace) -> tuple[RooflineSettings, dict[str, float] | None]:
    """Return the settings of --weights, --kv-cache-dtype and --tensor-parallel-size. If the weights
    are used as a GGUF file stores them, also return the bytes of each weight."""
    from twostroke.measure.roofline.roofline import FILE, RooflineSettings
    from twostroke.measure.roofline.shapes import stored_bytes

    stored = stored_bytes(args.model) if args.weights is None else None
    settings = RooflineSettings(
        tensor_parallel=args.tensor_parallel_size,
        weights=args.weights or ("fp16" if stored is None else FILE),
        kv=args.kv_cache_dtype,
    )
    return settings, stored
