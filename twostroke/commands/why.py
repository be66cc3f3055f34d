"""`twostroke why`: where the time of a request went, and who took it."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from twostroke.commands.bench import add_server_url, api_key
from twostroke.commands.trace import fetch_records
from twostroke.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from twostroke.measure.why import Ledger

SUMMARY = "where the time of a slow request went, and who took it"
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
    parser.add_argument("--json", action="store_true")


def execute(args: argparse.Namespace) -> int:
    if args.slowest < 1:
        raise ConfigError("--slowest must be at least 1")
    from rich.console import Console

    from twostroke.measure.why import Explainer

    explainer = Explainer(asyncio.run(fetch_records(args.url, api_key(args), args.seconds)))
    if not explainer.requests:
        raise RequestError(f"no request has ended in the last {args.seconds:g} s")
    chosen = [explainer.find(args.request)] if args.request else explainer.slowest(args.slowest)
    found = [explainer.explain(request) for request in chosen]
    if args.json:
        print(json.dumps([one.as_json() for one in found]))
        return 0
    console = Console()
    for one in found:
        show(console, one)
    return 0


def show(console: Console, ledger: Ledger) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(ledger.sentence(), style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    from twostroke.measure.tables import milliseconds

    rows: list[Any] = sorted(ledger.entries, key=lambda entry: -entry.seconds)
    for entry in rows:
        who = f": {', '.join(entry.culprits[:3])}" if entry.culprits else ""
        share = f"{entry.seconds / ledger.total_s:.1%}"
        table.add_row(entry.part, milliseconds(1e3 * entry.seconds), share, entry.because + who)
    console.print(table)
