"""`twostroke profile`: profiles the steps of a running server, by phase."""

from __future__ import annotations

import argparse
import asyncio
import json

from twostroke.commands.bench import add_server_url, api_key
from twostroke.commands.output import add_result_arguments, check_output, show_result, write_file

DESCRIPTION = (
    "Profile a running twostroke server for some seconds, without a restart: on a CPU the stages "
    "of every step, on a GPU (and with --kernels reference) torch's kernels, for steps that only "
    "prefill, only decode, or do both. Send requests to the server during the profile. Example: "
    "twostroke profile http://localhost:8000 --seconds 5 -o profile.json"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, metavar="S", help="default 5, at most 60")
    add("-o", "--output", metavar="FILE", help="write a timeline for Perfetto to this file")
    add_result_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    check_output(args.html, args.output)
    from twostroke.measure.explain.step_profile import (
        perfetto_trace,
        profile_page,
        profile_server,
        show_profile,
    )

    found, records = asyncio.run(profile_server(args.url, api_key(args), args.seconds))
    show_result(
        args, found, lambda console: show_profile(console, found), lambda: profile_page(found)
    )
    if args.output:
        what = "timeline, for https://ui.perfetto.dev"
        write_file(args, args.output, json.dumps(perfetto_trace(found, records)) + "\n", what)
    return 0
