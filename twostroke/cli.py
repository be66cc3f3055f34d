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
from typing import TextIO

from twostroke import __version__
from twostroke.commands import (
    ab,
    bench,
    chat,
    doctor,
    import_,
    phases,
    profile,
    roofline,
    run,
    run_batch,
    serve,
    trace,
    why,
)
from twostroke.commands.parser import Parser
from twostroke.commands.serve_flags import spelt
from twostroke.commands.terminal import columns, wrapped
from twostroke.errors import TwostrokeError, nearest, shown

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # as a shell reports a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words, make_parser(words[0] if words else ""))
    if args is None:
        return 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal cannot show must not end the program
            stream.reconfigure(errors="replace")
    try:
        status: int = args.execute(args)
        sys.stdout.flush()
        return status
    except TwostrokeError as error:
        text = wrapped(f"twostroke: error: {error}", columns(sys.stderr), "  ")
        print(text, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _send_to_nowhere(sys.stdout)  # or Python complains again when it flushes at exit
        return PIPE_CLOSED


def parse(words: list[str], parser: Parser) -> argparse.Namespace | None:
    """What was asked for; None: for nothing, and help was printed. A command that `TELLS_ALL` has
    yet to call `args.parser.finish`, once it has read its settings."""
    commands = _commands(parser)
    command = commands.get(words[0]) if words else None
    if words and command is None and not words[0].startswith("-"):
        hint = nearest(words[0], commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {shown(words[0])}{hint}")
    if command is not None:
        of_others = words[0] in ("serve", "run-batch")
        rest = spelt(words[1:]) if of_others else words[1:]
        words = [words[0], *(command.without_unknown(rest) if command.tells_all else rest)]
    args, unexpected = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return None
    # argparse leaves words that stand after an option; `run` takes them as part of the prompt.
    if args.parser.tells_all and hasattr(args, "prompt"):
        args.prompt += unexpected
        return args
    for word in args.parser.without_unknown(unexpected):
        args.parser.problem(f"unexpected argument {shown(word)}")
    if not args.parser.tells_all:
        args.parser.finish()
    return args


def make_parser(wanted: str | None = None) -> Parser:
    """`wanted`: the one command whose options are needed; None: of all, which takes longer."""
    parser = Parser(
        prog="twostroke",
        description="An LLM inference engine built along the line between prefill and decode.",
    )
    parser.add_argument("--version", action="version", version=f"twostroke {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    modules = (
        run,
        chat,
        serve,
        run_batch,
        bench,
        phases,
        roofline,
        trace,
        profile,
        why,
        doctor,
        ab,
        import_,
    )
    for module in modules:
        name = module.__name__.rpartition(".")[2].rstrip("_").replace("_", "-")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            usage=f"twostroke {name} [options]{module.OPERANDS}",
        )
        command.tells_all = getattr(module, "TELLS_ALL", False)
        if wanted in (None, name):
            module.add_arguments(command)
        command.set_defaults(execute=module.execute, parser=command)
    return parser


def _commands(parser: Parser) -> dict[str, Parser]:
    action = next(one for one in parser._actions if one.dest == "command")
    return dict(action.choices or {})


def _send_to_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
