"""`twostroke phases`: one controlled request to a server, taken apart into prefill and decode."""

from __future__ import annotations

import argparse
import asyncio

from twostroke.commands.bench import NOT_CERTIFIED, add_server_url, api_key
from twostroke.commands.output import add_result_arguments, check_output, tell

DESCRIPTION = (
    "Send one controlled request (fixed prompt, fixed output, nobody else) to any server that "
    "speaks OpenAI's API, and say where its time went: queue, prefill, decode. The evidence it had "
    "is named: client only, /metrics, per request, step records. Exit status 3 if the figures do "
    "not count. Example: twostroke phases http://localhost:8000 --prompt-tokens 2000"
)
OPERANDS = " URL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_url(parser)
    add = parser.add_argument
    add("--model", help="default: the first that the server has")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="default 512")
    add("--output-tokens", type=int, default=64, metavar="N", help="default 64")
    add("--repeat", type=int, default=3, metavar="N", help="requests, one after the other")
    add("--chat", action="store_true", help="over /v1/chat/completions")
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
    tell(
        args,
        found.as_json(),
        lambda console: show_phases(console, found),
        lambda: phases_page(found),
    )
    return NOT_CERTIFIED if found.problems else 0
