"""`twostroke profile`: what the steps of a running server are made of, by phase."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from twostroke.commands.bench import add_server_url, api_key

SUMMARY = "what a server's steps are made of: stages or kernels, by phase"
DESCRIPTION = (
    "Profile a running twostroke server for some seconds without restarting it: on a CPU the "
    "stages of every step, on a GPU (and with --kernels reference) torch's kernels, for steps that "
    "only prefill, only decode, or do both. Somebody has to use the server meanwhile. Example: "
    "twostroke profile http://localhost:8000 --seconds 5 -o profile.json"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, metavar="S", help="default 5, at most 60")
    add("-o", "--output", metavar="FILE", help="a timeline for Perfetto")
    add("--html", metavar="FILE", help="a report in one file")
    add("--json", action="store_true")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from twostroke.measure.profile import perfetto, profile_page, profile_server, show_profile

    found, records = asyncio.run(profile_server(args.url, api_key(args), args.seconds))
    if args.json:
        print(json.dumps(found))
    else:
        show_profile(Console(), found)
    if args.output:
        Path(args.output).write_text(json.dumps(perfetto(found, records)) + "\n", encoding="utf-8")
    if args.html:
        Path(args.html).write_text(profile_page(found), encoding="utf-8")
    if not args.json:
        for file, what in (
            (args.output, "timeline, for https://ui.perfetto.dev"),
            (args.html, "report"),
        ):
            if file:
                print(f"{what}: {file}")
    return 0
