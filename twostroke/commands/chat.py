"""`twostroke chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.commands.answer import (
    Answer,
    ask,
    has_chat_template,
    load,
    noticing_interrupts,
    print_text,
)
from twostroke.commands.flags import (
    OF_A_SERVER,
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    checked,
    sampling_params,
    take_model,
)
from twostroke.commands.report import length_hint, print_dim, turn_line
from twostroke.errors import RequestError, TwostrokeError, nearest
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.build import Engine

DESCRIPTION = (
    "Talk with a model. Each turn sends the whole conversation; what the prefix cache still holds "
    "of it is not computed again, and the line below each answer says how much that was."
)
OPERANDS = " [MODEL]"
TELLS_ALL = True  # that is wrong with a line and its settings, at once
COMMANDS = {
    "/clear": "forget the conversation",
    "/exit": "leave (Ctrl-D too)",
    "/help": "this list",
}
HELP = "\n".join(
    (
        *(f"{name:<8}{text}" for name, text in COMMANDS.items()),
        "Ctrl-C  stop the answer; what was written stays in the conversation",
        "\\       at the end of a line: the message goes on in the next",
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    add_sampling_arguments(parser)
    add_engine_arguments(parser, leave_out=OF_A_SERVER)


def execute(args: argparse.Namespace) -> int:
    take_model(args)
    config = checked(args)
    engine, _ = load(config)
    params = sampling_params(args, engine.sampling)
    if not has_chat_template(engine):
        raise RequestError(
            f"{engine.model_name} has no chat template; give one with --chat-template, or use "
            "`twostroke run --raw`"
        )
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        print_dim(HELP + "\n")
    conversation = Conversation(engine, params, args.system)
    failed = False
    for said in read_turns(_terminal_lines() if at_terminal else _piped_lines()):
        if said == "/exit":
            break
        if re.fullmatch(r"/\w+", said):
            _obey(said, conversation)
            continue
        try:
            conversation.turn(said)
        except TwostrokeError as error:
            failed = True
            print(f"twostroke: error: {error}", file=sys.stderr, flush=True)
    # At a terminal the person has seen it; a script must be told.
    return 1 if failed and not at_terminal else 0


class Conversation:
    """What was said so far. A turn that fails leaves it as it was."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params = engine, params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)

    def clear(self) -> None:
        self._messages = list(self._start)

    def turn(self, said: str) -> None:
        messages = [*self._messages, {"role": "user", "content": said}]
        with noticing_interrupts() as interrupted:
            answer = self._answer(messages, interrupted)
        print(flush=True)
        if answer.text or answer.finish_reason != "abort":
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if hint := length_hint(self._engine, answer, self._params.max_tokens):
            print_dim(hint)
        print_dim(turn_line(answer))

    def _answer(self, messages: list[dict[str, str]], interrupted: Callable[[], bool]) -> Answer:
        engine, asked_s = self._engine, monotonic()
        prompt = engine.input_processor.render_chat(messages)
        if len(prompt) >= engine.memory.max_model_len:
            raise RequestError(
                f"the conversation has grown to {len(prompt):,} tokens, and max_model_len is "
                f"{engine.memory.max_model_len:,}; /clear starts a new one"
            )
        return ask(engine, prompt, self._params, print_text, asked_s, interrupted)


def read_turns(lines: Iterator[str | None]) -> Iterator[str]:
    """Messages: a line that ends with a backslash goes on in the next; None drops what was begun,
    and empty messages are none."""
    parts: list[str] = []
    for line in lines:
        if line is None:
            parts = []
            continue
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            if said := "\n".join(parts).strip():
                yield said
            parts = []
    if said := "\n".join(parts).strip():
        yield said


def _terminal_lines() -> Iterator[str | None]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history and editing)
    prompt = "> "
    while True:
        line: str | None = None
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # as in a shell: what was begun is dropped
            print()
        yield line
        prompt = "… " if line is not None and line.endswith("\\") else "> "


def _piped_lines() -> Iterator[str | None]:
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/clear":
        conversation.clear()
        print_dim("the conversation starts anew")
    elif command == "/help":
        print_dim(HELP)
    else:
        print_dim(f"there is no {command}{nearest(command, COMMANDS) or '; see /help'}")
