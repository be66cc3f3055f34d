"""`twostroke chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from twostroke.commands.answer import (
    Answer,
    answer_printer,
    deferred_interrupts,
    has_chat_template,
    load,
    run_request,
)
from twostroke.commands.answer_report import length_hint, print_dim, turn_line
from twostroke.commands.chat_input import History, piped_lines, read_turns, terminal_lines
from twostroke.commands.flags import (
    SERVER_ONLY,
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    require_engine_config,
    resolve_model,
    sampling_params,
)
from twostroke.errors import RequestError, TwostrokeError, did_you_mean
from twostroke.request import SamplingParams

if TYPE_CHECKING:
    from twostroke.engine.build import Engine

DESCRIPTION = (
    "Talk with a model. Each turn sends the whole conversation. The prefix cache has most of it, "
    "and the line below each answer shows how many tokens were cached."
)
OPERANDS = " [MODEL]"
COLLECT_ERRORS = True
COMMANDS = {
    "/clear": "forget the conversation",
    "/system": "TEXT  set the system message; - removes it; without TEXT: show it",
    "/set": "NAME VALUE  set a sampling parameter, such as temperature 0.7; without NAME: show all",
    "/save": "FILE  write the conversation to a file, as JSON",
    "/exit": "leave (Ctrl-D too)",
    "/help": "show this list",
}
HELP = "\n".join(
    (
        *(f"{name:<8}{text}" for name, text in COMMANDS.items()),
        "Ctrl-C  stop the answer; its text stays in the conversation",
        "\\       at the end of a line: the message continues on the next line",
        "↑       the previous message; also of earlier conversations",
    )
)
SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
}
NAMES = ", ".join(SETTINGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message at the start")
    add_sampling_arguments(parser)
    add_engine_arguments(parser, leave_out=SERVER_ONLY)


def execute(args: argparse.Namespace) -> int:
    resolve_model(args)
    config = require_engine_config(args)
    engine, _ = load(config)
    params = sampling_params(args, engine.sampling)
    if not has_chat_template(engine):
        raise RequestError(
            f"{engine.model_name} has no chat template; give one with --chat-template, or use "
            "`twostroke run --raw`"
        )
    from twostroke.model.find.hub import cache_dir

    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        print_dim(HELP + "\n")
    conversation = Conversation(engine, params, args.system)
    failed = False
    history = History(cache_dir() / "chat_history") if at_terminal else None
    lines = terminal_lines() if at_terminal else piped_lines()
    for message in read_turns(lines, history.add if history else lambda _: None):
        if (command := command_of(message)) is not None:
            if command[0] == "/exit":
                break
            _run_command(*command, conversation)
            continue
        try:
            conversation.turn(message)
        except TwostrokeError as error:
            failed = True
            print(f"twostroke: error: {error}", file=sys.stderr, flush=True)
    # At a terminal the user has seen the error. A script sees the exit status.
    return 1 if failed and not at_terminal else 0


class Conversation:
    """The messages of a conversation, and the settings of the next answer. A failed turn does not
    change the messages."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine, self._params = engine, params
        self._system = system
        self._messages: list[dict[str, str]] = []

    def clear(self) -> None:
        self._messages = []

    def set_system(self, text: str) -> str:
        """Set the system message of the next turns; without a text, return the present one."""
        if not text:
            return f"system message: {self._system}" if self._system else "no system message"
        self._system = None if text == "-" else text
        return "the system message is removed" if text == "-" else "the system message is set"

    def set_sampling(self, text: str) -> str:
        """Set a sampling parameter from `NAME VALUE`; without a name, return all parameters."""
        settings = {name: getattr(self._params, name) for name in SETTINGS}
        if not text:
            return "  ".join(f"{name} {value}" for name, value in settings.items())
        name, _, value = text.replace("=", " ").partition(" ")
        name = name.strip("-").replace("-", "_")
        if name not in settings:
            hint = did_you_mean(name, SETTINGS) or f"; the settings are {NAMES}"
            return f"unknown setting {name}{hint}"
        try:
            self._params = replace(self._params, **{name: SETTINGS[name](value)})
        except ValueError:
            return f"{name} must be a number, not {value.strip() or 'nothing'}"
        except TwostrokeError as error:
            return str(error)
        return f"{name} {getattr(self._params, name)}"

    def save(self, path: str) -> str:
        """Write the messages as JSON, in the format of a request to a server."""
        if not path:
            return "give a file: /save FILE.json"
        try:
            text = json.dumps({"messages": self._with_system()}, ensure_ascii=False, indent=2)
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"wrote {len(self._messages)} messages to {path}"

    def _with_system(self) -> list[dict[str, str]]:
        start = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*start, *self._messages]

    def turn(self, message: str) -> None:
        """Answer a message of the user."""
        question = {"role": "user", "content": message}
        with deferred_interrupts() as interrupted, answer_printer() as write:
            answer = self._answer([*self._with_system(), question], write, interrupted)
        print(flush=True)
        if answer.text or answer.finish_reason != "abort":
            self._messages += [question, {"role": "assistant", "content": answer.text}]
        if hint := length_hint(self._engine, answer, self._params.max_tokens):
            print_dim(hint)
        print_dim(turn_line(answer))

    def _answer(
        self,
        messages: list[dict[str, str]],
        write: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> Answer:
        engine, start_s = self._engine, monotonic()
        prompt = engine.input_processor.render_chat(messages)
        if len(prompt) >= engine.memory.max_model_len:
            raise RequestError(
                f"the conversation has grown to {len(prompt):,} tokens, and max_model_len is "
                f"{engine.memory.max_model_len:,}; /clear starts a new one"
            )
        return run_request(engine, prompt, self._params, write, start_s, interrupted)


def _run_command(name: str, value: str, conversation: Conversation) -> None:
    if name == "/clear":
        conversation.clear()
        print_dim("the conversation is cleared")
    elif name == "/help":
        print_dim(HELP)
    elif name == "/system":
        print_dim(conversation.set_system(value))
    elif name == "/set":
        print_dim(conversation.set_sampling(value))
    elif name == "/save":
        print_dim(conversation.save(value))
    else:
        print_dim(f"unknown command {name}{did_you_mean(name, COMMANDS) or '; see /help'}")


def command_of(message: str) -> tuple[str, str] | None:
    """Return a command and its value; None for a message to the model, which may also begin with a
    slash."""
    name, _, value = message.partition(" ")
    if name in COMMANDS or re.fullmatch(r"/\w+", message):
        return name, value.strip()
    return None
