"""The options of `twostroke plan`, and the checks of their values."""

from __future__ import annotations

import argparse

from twostroke.commands.output import add_result_arguments
from twostroke.commands.roofline import KV_FORMATS, WEIGHT_FORMATS
from twostroke.draft.speculation_config import MAX_DEPTH
from twostroke.errors import ConfigError

AUTO = "auto"
DEPTH, GBYTES_PER_S = 4, 20.0  # copies of the planner's defaults, because its modules import numpy

MAXIMA = {
    "prefill_engines": 1024,
    "decode_engines": 1024,
    "tensor_parallel_size": 256,
    "max_num_seqs": 65536,
    "max_num_batched_tokens": 1 << 20,
    "speculation_depth": MAX_DEPTH,
}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trace",
        metavar="FILE",
        help="a trace of Azure or Mooncake, /records, results of bench or guidellm",
    )
    add("--input-len", type=int, metavar="N", help="without a trace: mean prompt tokens")
    add("--output-len", type=int, metavar="N", help="without a trace: mean output tokens")
    add("--rate", type=float, metavar="R", help="requests a second; scales the times of a trace")
    add("--trace-start", type=float, default=0.0, metavar="S", help="skip S seconds of the trace")
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
    add("--hardware", nargs="+", metavar="H", help="without step records: A100, H100, here, …")
    add(
        "--price-per-hour",
        type=float,
        nargs="+",
        metavar="P",
        help="price of a GPU of each --hardware",
    )
    several = "--engines auto tries several values"
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
        help="engines that share the requests; auto: the fewest that meet the goals",
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
    add(
        "--check",
        metavar="URL",
        help="replay the trace on this server and compare; the result corrects later plans of the "
        "same model, machine and settings",
    )
    add(
        "--no-kept-checks",
        dest="kept_checks",
        action="store_false",
        help="neither use nor store results of --check",
    )
    add("--save-plan", metavar="FILE", help="write the plan as JSON, for `twostroke serve --plan`")
    add(
        "--kuberay",
        metavar="FILE",
        help="write the numbers of engines into this copy of deploy/kubernetes/ray.yaml",
    )
    add("--seed", type=int, default=0, metavar="N")
    add_result_arguments(parser)


def check_plan_arguments(args: argparse.Namespace) -> None:
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
    if not 0 < args.target <= 1:
        raise ConfigError(
            f"--target {args.target:g}: give a share above 0 and up to 1, such as 0.99"
        )
    if args.engines != AUTO and not (args.engines.isdecimal() and 0 < int(args.engines) <= 1024):
        raise ConfigError(f"--engines {args.engines}: give a number from 1 to 1024, or auto")
    for name, maximum in MAXIMA.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value > maximum:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {value}: give a number up to {maximum}")
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
