"""`twostroke doctor`: finds out if a server is slow, where and why. `doctor exam` tests the
doctor."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from twostroke.commands.bench import api_key
from twostroke.errors import ConfigError

DESCRIPTION = (
    "Watch a running server and report whether it is healthy, slow to start or slow to stream, the "
    "cause with its evidence, where the time of requests went, and the next experiment with its "
    "predicted gain. twostroke servers give the most evidence; for vLLM, llama-server and other "
    "servers the doctor uses /metrics and sends a few requests. `twostroke doctor exam` injects "
    "known faults into servers that it starts and counts how many it finds. Exit status: 0 "
    "healthy, 1 the server cannot be watched, 2 usage error, 4 a fault was found, 5 not enough "
    "evidence. Example: "
    "twostroke doctor http://localhost:8000 --for 20"
)
OPERANDS = " URL | exam"
FAULT, NOT_ENOUGH_EVIDENCE = 4, 5  # like `ab`: 4 a loss, 5 inconclusive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="or `exam`")
    add("--for", dest="seconds", type=_seconds, default=20.0, metavar="S", help="default 20")
    add("--no-probe", action="store_true", help="send no requests")
    add(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="wait so long for a server that is starting",
    )
    add("--model", help="default: the first model of the server; for an exam, that of serve")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--html", metavar="FILE", help="write a report to one HTML file")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the verdict as JSON, or write it to FILE",
    )
    exam = parser.add_argument_group("exam")
    exam.add_argument(
        "--cases", metavar="NAMES", help="cases, separated by commas; `list` shows all"
    )
    exam.add_argument("--repeats", type=int, default=3, metavar="N", help="of each case; default 3")
    exam.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="cases that run at the same time; default 1",
    )
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
        raise ConfigError("--cases and --jobs are options of `twostroke doctor exam`")
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

    def show_answer(number: int, total: int, name: str, answer: str) -> None:
        print(f"{number} of {total}: {name}: {answer}", file=sys.stderr, flush=True)

    answers = run_exam(cases, args.model, args.repeats, args.jobs, args.cpus_per_job, show_answer)
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
