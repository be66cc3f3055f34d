"""`serve --plan FILE` and `serve --plan-trace FILE`: the server takes the sizes of its pools from a
plan.

twostroke plan … --engines auto --save-plan plan.json
twostroke serve MODEL --plan plan.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

from twostroke import child_process
from twostroke.commands.parser import Parser
from twostroke.errors import ConfigError

AUTO = "auto"
COUNTS = ("prefill_engines", "decode_engines", "data_parallel_size")
SETTINGS = ("max_num_seqs", "max_num_batched_tokens")
PLAN_S = 3600.0  # time limit for making a plan
Json = dict[str, Any]


def count_or_auto(text: str) -> int | str:
    """Return the value of an option that takes a number of engines or `auto`."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, or auto with --plan") from None


def apply_plan(args: argparse.Namespace) -> None:
    """Set the numbers of engines from the plan of the command line, and the settings of the plan
    that the user does not give. Errors are added to the parser's problems."""
    parser: Parser = args.parser
    try:
        _apply(args)
    except ConfigError as error:
        parser.problem(str(error))
        for name in _auto(args):
            delattr(args, name)


def _apply(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in ("plan", "plan_trace") if hasattr(args, name)}
    auto = _auto(args)
    if not given:
        if auto:
            raise ConfigError(
                f"{_flag(auto[0])} auto needs a plan: give --plan FILE, which `twostroke plan … "
                "--save-plan FILE` writes, or --plan-trace FILE, the requests to plan for"
            )
        if hasattr(args, "plan_steps"):
            raise ConfigError("--plan-steps is for --plan-trace, the requests to plan for")
        return
    if len(given) > 1:
        raise ConfigError("--plan and --plan-trace: give one of them")
    for name in COUNTS:
        if hasattr(args, name) and name not in auto:
            flag = _flag(name)
            raise ConfigError(
                f"{flag} {getattr(args, name)} and a plan both set the number of engines: leave "
                f"{flag} out, or give {flag} auto"
            )
    if "plan" in given:
        source = f"--plan {args.plan}"
        plan = read_plan(args.plan, source)
    else:
        source = f"--plan-trace {args.plan_trace}"
        plan = _made_plan(args)
    for name, count in counts_of(plan, auto, source).items():
        setattr(args, name, count)
    for name, value in (plan.get("settings") or {}).items():
        if name in SETTINGS and not hasattr(args, name):
            setattr(args, name, value)
    print(f"{source}: {plan.get('verdict') or 'no verdict'}", file=sys.stderr)


def _auto(args: argparse.Namespace) -> list[str]:
    return [name for name in COUNTS if getattr(args, name, None) == AUTO]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_plan(path: str, source: str) -> Json:
    """Read the JSON of `twostroke plan`. Raise `ConfigError` if the file is not a plan."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    return checked_plan(found, source)


def checked_plan(found: Any, source: str) -> Json:
    try:
        layout = found["forecast"]["layout"]
        counts = [layout[name] for name in ("engines", "prefill_engines", "decode_engines")]
        valid = all(type(count) is int and 0 <= count <= 1024 for count in counts) and (
            counts[0] > 0 if not counts[1] else counts[1] > 0 < counts[2] and not counts[0]
        )
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise ConfigError(
            f"{source} is no plan: expected the JSON that `twostroke plan --save-plan FILE` or "
            "`twostroke plan --json` writes"
        )
    return dict(found)


def counts_of(plan: Json, auto: list[str], source: str) -> dict[str, int]:
    """Return the numbers of engines that a plan sets. `auto`: the options with the value auto."""
    layout = plan["forecast"]["layout"]
    if layout["engines"]:
        if {"prefill_engines", "decode_engines"} & set(auto):
            raise ConfigError(
                f"{source} has engines for both phases ({layout['name']}), and no pools: give "
                "--data-parallel-size auto, or plan with --prefill-engines and --decode-engines"
            )
        return {"data_parallel_size": layout["engines"]}
    if "data_parallel_size" in auto:
        raise ConfigError(
            f"{source} has pools ({layout['name']}): give --prefill-engines auto and "
            "--decode-engines auto"
        )
    return {name: layout[name] for name in ("prefill_engines", "decode_engines")}


def _made_plan(args: argparse.Namespace) -> Json:
    """Plan for the trace, in a separate process, because the server does not import numpy."""
    source = f"--plan-trace {args.plan_trace}"
    words = ["--trace", args.plan_trace, "--engines", AUTO, "--json"]
    for name in ("ttft_slo_ms", "itl_slo_ms"):
        if hasattr(args, name):
            words += [_flag(name), str(getattr(args, name))]
    if len(words) == 5:
        raise ConfigError(f"{source} needs a goal: --ttft-slo-ms, --itl-slo-ms, or both")
    if not hasattr(args, "plan_steps"):
        raise ConfigError(
            f"{source} needs step times: give --plan-steps FILE, which `twostroke plan … "
            "--calibrate URL --save-steps FILE` writes. To plan from a data sheet, use `twostroke "
            "plan … --save-plan FILE`, and give --plan FILE here"
        )
    words += ["--steps", args.plan_steps]
    if "data_parallel_size" not in _auto(args):
        words.append("--pools")
    print(f"{source}: planning…", file=sys.stderr, flush=True)
    process = child_process.start("twostroke", "plan", *words, stdout=PIPE, stderr=PIPE)
    try:
        out, err = process.communicate(timeout=PLAN_S)
    except TimeoutExpired:
        process.kill()
        raise ConfigError(f"{source}: no plan within {PLAN_S:g} s; use a shorter trace") from None
    if process.returncode:
        reason = err.decode(errors="replace").strip()
        raise ConfigError(f"{source}: {reason.removeprefix('twostroke: error: ')}")
    return checked_plan(json.loads(out), source)
