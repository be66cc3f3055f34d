"""`twostroke bench`: measures any OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.commands.flags import SERVER_ONLY, add_engine_arguments, engine_settings
from twostroke.commands.output import add_result_arguments, check_output, show_result, write_file
from twostroke.environment import client_api_key
from twostroke.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.measure.load.bench import ServeOptions
    from twostroke.measure.load.definitions import Goals

DESCRIPTION = (
    "Measure any OpenAI-compatible server, with the option names of vLLM. Latency counts from the "
    "time at which a request was due. A run with invalid figures (a late client, errors, answers "
    "from a cache, too few requests for a percentile) is not certified, and exits with 3. "
    "Example: twostroke bench serve --num-prompts 400 --request-rate 2 --random-input-len 256 "
    "--random-output-len 32 --goodput ttft:500 tpot:50 --html report.html"
)
OPERANDS = " COMMAND …"
NOT_CERTIFIED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parsers = parser.add_subparsers(
        dest="bench", metavar="COMMAND", required=True, prog="twostroke bench"
    )
    serve = parsers.add_parser(
        "serve",
        help="requests to a running server",
        description=DESCRIPTION,
        usage="twostroke bench serve [options]",
        allow_abbrev=False,
    )
    _add_serve(serve)
    serve.set_defaults(parser=serve, execute_bench=_serve)
    for name, summary, add, run in (
        ("latency", "one batch after another, without a server", _add_latency, _latency),
        ("throughput", "many requests at once, without a server", _add_throughput, _throughput),
    ):
        offline = parsers.add_parser(
            name,
            help=summary,
            description=f"An engine in this process: {summary}. Example: twostroke bench {name} "
            "--input-len 128 --output-len 32",
            usage=f"twostroke bench {name} [options]",
            allow_abbrev=False,
        )
        add(offline)
        offline.add_argument("--output-json", metavar="FILE", help="also write the result here")
        add_result_arguments(offline)
        add_engine_arguments(offline, leave_out=SERVER_ONLY)
        offline.set_defaults(parser=offline, execute_bench=run)


def execute(args: argparse.Namespace) -> int:
    status: int = args.execute_bench(args)
    return status


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address of the server."""
    parser.add_argument("--base-url", metavar="URL", help="default http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    parser.add_argument("--model", help="default: the first model of the server")


def add_server_url(parser: argparse.ArgumentParser) -> None:
    """Add the address of the server as an operand."""
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")


def api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or client_api_key()


def server_url(args: argparse.Namespace) -> str:
    return args.base_url or f"http://{args.host}:{args.port}"


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add = parser.add_argument
    add("--backend", choices=("openai", "openai-chat", "vllm"), default="openai")
    add("--endpoint", metavar="PATH", help="default: the backend's route")
    add("--dataset-name", choices=("random", "custom", "trace"), default="random")
    add(
        "--dataset-path", metavar="FILE", help="for custom (JSON lines) and trace (Azure, Mooncake)"
    )
    add("--num-prompts", type=int, default=100, metavar="N")
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="N")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="N")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by ±R")
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts share",
    )
    add("--custom-output-len", type=int, default=256, metavar="N")
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests each second; inf: at once",
    )
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; lower: burstier")
    add("--max-concurrency", type=int, metavar="N", help="without a rate: N users, closed loop")
    add("--ramp-up-strategy", choices=("linear", "exponential"))
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--trace-start", type=float, default=0.0, metavar="S", help="skip S seconds of the trace")
    add("--trace-seconds", type=float, metavar="S", help="replay S seconds of the trace")
    add("--trace-speed", type=float, default=1.0, metavar="X", help="replay X times as fast")
    add("--trace-shrink", type=float, default=1.0, metavar="X", help="divide lengths by X")
    add("--trace-keep", type=int, default=1, metavar="N", help="replay one of N requests")
    add("--num-warmups", type=int, default=1, metavar="N")
    add("--seed", type=int, default=0)
    add("--temperature", type=float)
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    add("--extra-body", metavar="JSON", help="fields for every request")
    add("--goodput", nargs="+", metavar="GOAL", help="such as ttft:200 tpot:50 e2el:5000, in ms")
    add("--find-rate", action="store_true", help="find the highest rate that meets --goodput")
    add(
        "--goodput-share",
        type=float,
        default=0.95,
        metavar="X",
        help="for --find-rate; default 0.95",
    )
    add("--metric-percentiles", default="99", metavar="P,…")
    add("--save-result", action="store_true", help="write the result as JSON to --result-dir")
    add("--save-detailed", action="store_true", help="write the result with every request")
    add("--result-dir", metavar="DIR", default=".")
    add("--result-filename", metavar="FILE")
    add_result_arguments(parser)
    add("--disable-tqdm", action="store_true", help="show no progress bar")


def _serve(args: argparse.Namespace) -> int:
    options = serve_options(args)
    if args.find_rate and not options.goals.any_set:
        raise ConfigError("--find-rate needs goals, such as --goodput ttft:200 tpot:50")
    check_output(args.html)
    from twostroke.measure.load.bench import run_serve
    from twostroke.measure.load.progress_bar import Progress
    from twostroke.measure.load.serve_report import serve_page
    from twostroke.measure.report.tables import show_serve

    share = args.goodput_share if args.find_rate else None
    shown = not args.disable_tqdm and sys.stderr.isatty()
    with Progress(None if args.find_rate else options.num_prompts, shown) as progress:
        outcome, tried = run_serve(options, progress.add, share, progress.tried)
    found = outcome.result
    if tried:
        found["search"] = tried
    show_result(
        args,
        found,
        lambda console: show_serve(console, found, options.metric_percentiles),
        lambda: serve_page(outcome),
    )
    if args.save_result or args.save_detailed or args.result_filename:
        folder = Path(args.result_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = args.result_filename or f"{options.backend}-{found['date']}.json"
        write_file(args, str(folder / name), json.dumps(found) + "\n", "result")
    return 0 if found["certified"] else NOT_CERTIFIED


def _add_latency(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input-len", type=int, default=32, metavar="N")
    add("--output-len", type=int, default=128, metavar="N")
    add("--batch-size", type=int, default=8, metavar="N")
    add("--num-iters-warmup", type=int, default=3, metavar="N")
    add("--num-iters", type=int, default=10, metavar="N")


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input-len", type=int, default=256, metavar="N")
    add("--output-len", type=int, default=64, metavar="N")
    add("--num-prompts", type=int, default=64, metavar="N")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by ±R")


def _latency(args: argparse.Namespace) -> int:
    _at_least_one(args, ("input_len", "output_len", "batch_size", "num_iters"))
    llm = _offline_llm(args)
    from twostroke.measure.load.offline import latency
    from twostroke.measure.load.offline_report import latency_page

    counts = (args.batch_size, args.input_len, args.output_len)
    found = latency(llm, *counts, args.num_iters_warmup, args.num_iters)
    return _show_offline(args, found, latency_page)


def _throughput(args: argparse.Namespace) -> int:
    _at_least_one(args, ("input_len", "output_len", "num_prompts"))
    llm = _offline_llm(args)
    from twostroke.measure.load.offline import throughput
    from twostroke.measure.load.offline_report import throughput_page

    counts = (args.num_prompts, args.input_len, args.output_len)
    found = throughput(llm, *counts, args.random_range_ratio, getattr(args, "seed", 0))
    return _show_offline(args, found, throughput_page)


def _offline_llm(args: argparse.Namespace) -> Any:
    check_output(args.html, args.output_json)
    settings = {"enable_prefix_caching": False} | engine_settings(args)
    from twostroke.llm import LLM

    return LLM(**settings)


def _show_offline(
    args: argparse.Namespace, found: dict[str, Any], page: Callable[[dict[str, Any]], str]
) -> int:
    from twostroke.measure.load.offline_report import show_offline

    show_result(args, found, lambda console: show_offline(console, found), lambda: page(found))
    if args.output_json:
        write_file(args, args.output_json, json.dumps(found) + "\n", "result")
    return 0


def _at_least_one(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")


def serve_options(args: argparse.Namespace) -> ServeOptions:
    from twostroke.measure.load.bench import ServeOptions
    from twostroke.measure.load.stats import parse_metric_percentiles

    extra: dict[str, Any] = {}
    if args.extra_body is not None:
        try:
            extra = dict(json.loads(args.extra_body))
        except (ValueError, TypeError):
            raise ConfigError("--extra-body: give a JSON object") from None
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    _at_least_one(args, ("num_prompts", "random_input_len", "random_output_len", "trace_keep"))
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1")
    if min(args.trace_speed, args.trace_shrink) <= 0:
        raise ConfigError("--trace-speed and --trace-shrink must be above 0")
    return ServeOptions(
        url=server_url(args),
        api_key=api_key(args),
        model=args.model,
        backend=args.backend,
        endpoint=args.endpoint,
        dataset_name=args.dataset_name,
        dataset_path=args.dataset_path,
        num_prompts=args.num_prompts,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        random_range_ratio=args.random_range_ratio,
        random_prefix_len=args.random_prefix_len,
        custom_output_len=args.custom_output_len,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        ramp_up_strategy=args.ramp_up_strategy,
        ramp_up_start_rps=args.ramp_up_start_rps,
        ramp_up_end_rps=args.ramp_up_end_rps,
        trace_start_s=args.trace_start,
        trace_seconds=args.trace_seconds,
        trace_speed=args.trace_speed,
        trace_shrink=args.trace_shrink,
        trace_keep=args.trace_keep,
        num_warmups=args.num_warmups,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        extra_body=extra,
        metric_percentiles=parse_metric_percentiles(args.metric_percentiles),
        goals=parse_goals(args.goodput or []),
        save_detailed=args.save_detailed,
    )


def parse_goals(texts: list[str]) -> Goals:
    """Read goals such as `ttft:200 tpot:50`, in ms."""
    from twostroke.measure.load.definitions import Goals

    found: dict[str, float] = {}
    for goal in texts:
        name, _, value = goal.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in ("ttft", "tpot", "e2el") or number <= 0:
            raise ConfigError(
                f"--goodput {goal!r}: give ttft, tpot or e2el in ms, such as ttft:200"
            )
        found[f"{name}_s"] = number / 1e3
    return Goals(**found)
