"""`twostroke doctor`: judges a running server, and names the cause if the server is slow."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from twostroke.commands.bench import api_key

DESCRIPTION = (
    "Watch a running server and print whether the server is healthy, slow to start or slow to "
    "stream, the cause with its evidence, where the time of requests went, and the next experiment "
    "with its predicted gain. A twostroke server gives the most evidence; vLLM, llama-server and "
    "other servers are judged by /metrics and by a few requests that the doctor sends. Exit "
    "status: 0 healthy, 1 the server cannot be reached, 2 wrong usage, 4 a fault was found, "
    "5 not enough evidence. Example: twostroke doctor http://localhost:8000 --for 20"
)
OPERANDS = " URL"
FAULT, NOT_ENOUGH_EVIDENCE = 4, 5  # the same numbers as in `ab`: 4 a loss, 5 inconclusive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL")
    add("--for", dest="seconds", type=_seconds, default=20.0, metavar="S", help="default 20")
    add("--no-probe", action="store_true", help="send no requests to the server")
    add(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="wait up to S seconds for a server that is starting",
    )
    add("--model", help="default: the first model of the server")
    add("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add("--html", metavar="FILE", help="write a report as one HTML file")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the verdict as JSON")


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.doctor.diagnosis import diagnose
    from twostroke.measure.doctor.doctor_report import show, verdict_page
    from twostroke.measure.doctor.verdict import HEALTHY, NOT_ENOUGH
    from twostroke.measure.doctor.watch import watch

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


def _write(where: str, text: str) -> None:
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")
