"""`twostroke phases`: measures prefill and decode of one controlled request to a server."""

from __future__ import annotations

import argparse
import asyncio

from twostroke.commands.bench import NOT_CERTIFIED, add_server_url, api_key
from twostroke.commands.output import add_result_arguments, check_output, show_result

DESCRIPTION = (
    "Send one controlled request (fixed prompt, fixed output, no other requests) to any server "
    "with OpenAI's API, and report the time in queue, prefill and decode, with the source of the "
    "figures: client only, /metrics, per request, or step records. Exit status: 3 if the figures "
    "are not valid. Example: twostroke phases http://localhost:8000 --prompt-tokens 2000"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    add = parser.add_argument
    add("--model", help="default: the first model of the server")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="default 512")
    add("--output-tokens", type=int, default=64, metavar="N", help="default 64")
    add("--repeat", type=int, default=3, metavar="N", help="requests, one after the other")
    add("--chat", action="store_true", help="use /v1/chat/completions")
    add_result_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    check_output(args.html)
    from twostroke.measure.explain.phases import measure_phases
    from twostroke.measure.explain.phases_report import phases_page, show_phases
    from twostroke.measure.load.sample_client import CHAT, COMPLETIONS

    found = asyncio.run(
        measure_phases(
            args.url,
            api_key(args),
            args.model,
            args.prompt_tokens,
            args.output_tokens,
            args.repeat,
            CHAT if args.chat else COMPLETIONS,
        )
    )
    show_result(
        args,
        found.as_json(),
        lambda console: show_phases(console, found),
        lambda: phases_page(found),
    )
    return NOT_CERTIFIED if found.problems else 0
