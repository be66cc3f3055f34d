"""`twostroke why`: where the time of a request went, and who took it."""

from __future__ import annotations

import argparse
import asyncio

from twostroke.commands.bench import add_server_url, api_key
from twostroke.commands.output import add_result_arguments, check_output, tell
from twostroke.commands.trace import fetch_records
from twostroke.errors import ConfigError, RequestError

DESCRIPTION = (
    "Explain requests that have ended on a twostroke server: a sentence, then a ledger that sums "
    "to the whole, with the requests and steps that caused the waits. Example: "
    "twostroke why http://localhost:8000 --slowest 3"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    parser.add_argument("--request", metavar="ID", help="the id of its answer")
    parser.add_argument("--slowest", type=int, default=1, metavar="N", help="default: the slowest")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="default 120")
    add_result_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    if args.slowest < 1:
        raise ConfigError("--slowest must be at least 1")
    check_output(args.html)
    from twostroke.measure.explain.why import Explainer
    from twostroke.measure.explain.why_report import show_why, why_json, why_page

    records = asyncio.run(fetch_records(args.url, api_key(args), args.seconds))
    explainer = Explainer(records)
    if not explainer.requests:
        raise RequestError(
            f"no request has ended in the last {args.seconds:g} s; send some, or look further back "
            "with --seconds"
        )
    chosen = [explainer.find(args.request)] if args.request else explainer.slowest(args.slowest)
    found = [explainer.explain(request) for request in chosen]
    server = {"url": args.url, "model": records["model"], "device": records["device"]}
    tell(
        args,
        why_json(found, server),
        lambda console: show_why(console, found),
        lambda: why_page(found, server),
    )
    return 0
