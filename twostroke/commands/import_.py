"""`twostroke import`: shows result files of several benchmark tools in one table."""

from __future__ import annotations

import argparse
import json

DESCRIPTION = (
    "Read result files of vllm bench serve, sglang's bench_serving, guidellm, aiperf or twostroke "
    "bench, restate them in one set of definitions, and say what cannot be compared. Example: "
    "twostroke import vllm.json guidellm.json"
)
OPERANDS = " FILE …"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--json", action="store_true")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.compare.other_tools import import_result
    from twostroke.measure.report.tables import show_imported

    found = [import_result(path) for path in args.files]
    if args.json:
        print(json.dumps(found))
    else:
        show_imported(Console(), found)
    return 0
