"""`twostroke doctor`: is a server slow, where, and why? And the doctor's own exam."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from twostroke.commands.bench import api_key
from twostroke.errors import ConfigError

DESCRIPTION = (
    "Watch a running server for a while and say whether it is healthy, slow to start or slow to "
    "stream, the cause with its evidence, where the time of requests went, and the next experiment "
    "with the gain it predicts. Servers of ours tell the most; vLLM, llama-server and others are "
    "judged by /metrics and by a few requests of the doctor's own. `twostroke doctor exam` injects "
    "known faults into servers of its own and counts how many it finds. Exit status: 0 healthy, "
    "1 it could not look, 2 wrong usage, 4 a fault was found, 5 not enough evidence. Example: "
    "twostroke doctor http://localhost:8000 --for 20"
)
OPERANDS = " URL | exam"
FAULT, NOT_ENOUGH_EVIDENCE = 4, 5  # as `ab` has it: 4 a loss, 5 inconclusive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="or `exam`")
    add("--for", dest="seconds", type=_seconds, default=20.0, metavar="S", help="default 20")
    add("--no-probe", action="store_true", help="send no requests of its own")
    add("--wait", type=_seconds, default=0.0, metavar="S", help="for a server that is starting")
    add("--model", help="default: the first that the server has; of an exam: serve's")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--html", metavar="FILE", help="a report in one file")
    add("--json", nargs="?", const="-", metavar="FILE", help="the verdict, for programs")
    exam = parser.add_argument_group("exam")
    exam.add_argument("--cases", metavar="NAMES", help="some of them, by commas; `list` shows them")
    exam.add_argument("--repeats", type=int, default=3, metavar="N", help="of each; default 3")
    exam.add_argument("--jobs", type=int, default=1, metavar="N", help="at one time; default 1")
    exam.add_argument("--cpus-per-job", type=int, default=2, metavar="N", help="default 2")


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def execute(args: argparse.Namespace) -> int:
    return _exam(args) if args.url == "exam" else _diagnose(args)


def _diagnose(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.doctor.diagnosis import diagnose
    from twostroke.measure.doctor.doctor import watch
    from twostroke.measure.doctor.doctor_report import show, verdict_page
    from twostroke.measure.doctor.verdict import HEALTHY, NOT_ENOUGH

    if args.cases or args.jobs != 1:
        raise ConfigError("--cases and --jobs are for `twostroke doctor exam`")
    if sys.stderr.isatty():
        print(f"watching {args.url} for {args.seconds:g} s …", file=sys.stderr)
    seen = asyncio.run(
        watch(args.url, api_key(args), args.seconds, not args.no_probe, args.wait, args.model)
    )
    found = diagnose(seen)
    if args.json:
        _write(args.json, json.dumps(found.as_json()))
    if args.json != "-":
        show(Console(), found)
    if args.html:
        Path(args.html).write_text(verdict_page(found), encoding="utf-8")
    return {HEALTHY: 0, NOT_ENOUGH: NOT_ENOUGH_EVIDENCE}.get(found.verdict, FAULT)


def _exam(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.doctor.doctor_report import show_exam
    from twostroke.measure.doctor.exam import find_cases, result_json, run_exam

    cases = find_cases(args.cases)
    if args.cases == "list":
        for case in cases:
            print(f"{case.name:22} {case.expected or 'healthy':26} {case.what}")
        return 0
    if min(args.repeats, args.jobs, args.cpus_per_job) < 1:
        raise ConfigError("--repeats, --jobs and --cpus-per-job must be at least 1")

    def tell(number: int, of: int, name: str, answer: str) -> None:
        print(f"{number} of {of}: {name}: {answer}", file=sys.stderr, flush=True)

    answers = run_exam(cases, args.model, args.repeats, args.jobs, args.cpus_per_job, tell)
    found = result_json(answers)
    if args.json:
        _write(args.json, json.dumps(found, indent=1))
    if args.json != "-":
        show_exam(Console(), found)
    return 0 if found["passed"] else FAULT


def _write(where: str, text: str) -> None:
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")
