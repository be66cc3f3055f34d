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
from importlib import import_module
from typing import TextIO

from twostroke import __version__
from twostroke.commands.parser import Parser
from twostroke.commands.terminal import columns, wrapped
from twostroke.errors import TwostrokeError, nearest, shown

# What each is for; its module is read when it is the one that was asked for.
COMMANDS = {
    "run": "answer one prompt and show what each phase took",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP, as `vllm serve` does",
    "learn": "a page that explains prefill and decode with a running engine",
    "run-batch": "answer a file of requests, as `vllm run-batch` does",
    "bench": "measure a server: TTFT, TPOT, ITL, throughput, goodput",
    "phases": "one request taken apart: slow to start, or slow to stream?",
    "roofline": "how fast a model could be on a machine, by phase",
    "plan": "what a trace of requests will see from engines: simulated, with intervals",
    "quality": "what a format costs in quality: perplexity and KL against a base",
    "trace": "the last seconds of a server as a timeline",
    "profile": "what a server's steps are made of: stages or kernels, by phase",
    "why": "where the time of a slow request went, and who took it",
    "doctor": "is a server slow, where, why, and what to try next",
    "ab": "does a change help? two servers or settings, in pairs",
    "import": "results of vllm bench, guidellm, aiperf, sglang in one table",
}
MODULES = {"run-batch": "run_batch", "import": "import_"}  # where Python has other rules for names
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # as a shell reports a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["version"]:
        words = ["--version"]
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
        for word in words[1:]:
            if word.startswith("--help=") and command.usual:
                print(command.help_about(word.partition("=")[2]), end="")
                return None
        of_others = words[0] in ("serve", "run-batch")
        rest = words[1:]
        if of_others:
            from twostroke.commands.serve_flags import spelt

            rest = spelt(rest)
        if command.lines:
            rest = joined_values(rest, command.lines)
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


def joined_values(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the words with the values of these flags joined to them: `--b --no-x` as `--b=--no-x`,
    because argparse takes no word that begins with a dash for a value."""
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in flags else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def make_parser(wanted: str | None = None) -> Parser:
    """`wanted`: the one command whose options are needed; None: of all, which takes longer."""
    parser = Parser(
        prog="twostroke",
        description="An LLM inference engine built along the line between prefill and decode.",
    )
    parser.add_argument("--version", action="version", version=f"twostroke {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMANDS.items():
        if wanted not in (None, name):
            commands.add_parser(name, help=summary)
            continue
        module = import_module(f"twostroke.commands.{MODULES.get(name, name)}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            usage=f"twostroke {name} [options]{module.OPERANDS}",
        )
        command.tells_all = getattr(module, "TELLS_ALL", False)
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
