"""`twostroke`: one command, and what all its parts promise.

Arguments are read and checked before anything heavy is imported, so that help and mistakes are
answered at once. Exit status: 0 done, 1 refused or failed (with a reason, without a traceback),
2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from twostroke import __version__
from twostroke.commands import (
    ab,
    bench,
    chat,
    import_,
    phases,
    profile,
    roofline,
    run,
    serve,
    trace,
    why,
)
from twostroke.errors import TwostrokeError, nearest

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # as a shell reports a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, instead of repeating every option there is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"twostroke: error: {message}\nTry `{self.prog} --help`.\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        words = serve.spelt(words)
    args, unknown = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    _take_unknown(args, unknown)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal cannot show must not end the program
            stream.reconfigure(errors="replace")
    try:
        status: int = args.execute(args)
        sys.stdout.flush()
        return status
    except TwostrokeError as error:
        print(f"twostroke: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _send_to_nowhere(sys.stdout)  # or Python complains again when it flushes at exit
        return PIPE_CLOSED


def make_parser() -> Parser:
    parser = Parser(
        prog="twostroke",
        description="An LLM inference engine built along the line between prefill and decode.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"twostroke {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in (run, chat, serve, bench, phases, roofline, trace, profile, why, ab, import_):
        name = module.__name__.rpartition(".")[2].rstrip("_")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            usage=f"twostroke {name} [options]{module.OPERANDS}",
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute, parser=command)
    return parser


def _take_unknown(args: argparse.Namespace, unknown: list[str]) -> None:
    """argparse leaves words that stand after an option; `run` takes them as part of the prompt."""
    known = [option for action in args.parser._actions for option in action.option_strings]
    for word in unknown:
        if word.startswith("-"):
            option = word.partition("=")[0]
            args.parser.error(f"unknown option {option}{nearest(option, known)}")
    if unknown and not hasattr(args, "prompt"):
        args.parser.error(f"unexpected argument {unknown[0]!r}")
    if unknown:
        args.prompt += unknown


def _send_to_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
