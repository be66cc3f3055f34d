"""The `twostroke` command line.

Arguments are parsed and checked before heavy modules are imported, so that help and usage errors
appear at once. Exit status: 0 success, 1 failure (with a message, without a traceback), 2 usage
error, 130 interrupted.
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
from twostroke.errors import TwostrokeError, did_you_mean, shown

# The summary of each command. The module of a command is imported when the command is used.
COMMANDS = {
    "run": "answer one prompt and show the time of each phase",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP, as `vllm serve` does",
    "learn": "explain prefill and decode on a page with a running engine",
    "run-batch": "answer a file of requests, as `vllm run-batch` does",
    "bench": "measure a server: TTFT, TPOT, ITL, throughput, goodput",
    "phases": "measure the phases of one request: slow to start, or slow to stream?",
    "roofline": "compute how fast a model can be on a machine, by phase",
    "plan": "simulate the latencies of a trace of requests on engines, with error intervals",
    "quality": "measure the quality loss of a format: perplexity and KL against a base",
    "trace": "write the last seconds of a server as a timeline",
    "profile": "measure the stages or kernels of a server's steps, by phase",
    "why": "explain where the time of a slow request went",
    "doctor": "find out if a server is slow, where, why, and what to try next",
    "ab": "compare two servers or settings in pairs of runs",
    "import": "show results of vllm bench, guidellm, aiperf, sglang in one table",
}
MODULES = {"run-batch": "run_batch", "import": "import_"}  # names that are not module names
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # the exit status of a program that SIGPIPE ended, as in a shell


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["version"]:
        words = ["--version"]
    args = parse(words, make_parser(words[0] if words else ""))
    if args is None:
        return 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # "?" replaces characters that a terminal cannot show
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
        _redirect_to_null(sys.stdout)  # else Python reports the closed pipe again at exit
        return PIPE_CLOSED


def parse(words: list[str], parser: Parser) -> argparse.Namespace | None:
    """Return the arguments of a command; None if help was printed instead.

    A command with `COLLECT_ERRORS` must call `args.parser.finish` after it has read its settings.
    """
    commands = _commands(parser)
    command = commands.get(words[0]) if words else None
    if words and command is None and not words[0].startswith("-"):
        hint = did_you_mean(words[0], commands) or f"; the commands are {', '.join(commands)}"
        parser.error(f"unknown command {shown(words[0])}{hint}")
    if command is not None:
        for word in words[1:]:
            if word.startswith("--help=") and command.usual_options:
                print(command.help_about(word.partition("=")[2]), end="")
                return None
        rest = words[1:]
        if words[0] in ("serve", "run-batch"):
            from twostroke.commands.serve_flags import normalize_options

            rest = normalize_options(rest)
        if command.command_line_options:
            rest = joined_values(rest, command.command_line_options)
        words = [words[0], *(command.without_unknown(rest) if command.collects_errors else rest)]
    args, unexpected = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        return None
    # argparse does not add words after an option to the prompt of `run`.
    if args.parser.collects_errors and hasattr(args, "prompt"):
        args.prompt += unexpected
        return args
    for word in args.parser.without_unknown(unexpected):
        args.parser.problem(f"unexpected argument {shown(word)}")
    if not args.parser.collects_errors:
        args.parser.finish()
    return args


def joined_values(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Join the values of some flags to the flags: `--b --no-x` becomes `--b=--no-x`. argparse does
    not accept a separate value that begins with a dash."""
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in flags else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def make_parser(wanted: str | None = None) -> Parser:
    """Make the parser. `wanted`: the command whose options the parser gets; None: all commands get
    their options, which takes longer."""
    parser = Parser(
        prog="twostroke",
        description="An LLM inference engine with separate paths for prefill and decode.",
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
        command.collects_errors = getattr(module, "COLLECT_ERRORS", False)
        module.add_arguments(command)
        command.set_defaults(execute=module.execute, parser=command)
    return parser


def _commands(parser: Parser) -> dict[str, Parser]:
    action = next(one for one in parser._actions if one.dest == "command")
    return dict(action.choices or {})


def _redirect_to_null(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
