"""`twostroke run`: one prompt, its answer as it is written, and what each phase took."""

from __future__ import annotations

import argparse
import json
import sys
from time import monotonic
from typing import TYPE_CHECKING

from twostroke.commands.answer import (
    ask,
    has_chat_template,
    load,
    noticing_interrupts,
    written_words,
)
from twostroke.commands.answer_report import as_json, print_report
from twostroke.commands.flags import (
    SERVER_ONLY,
    add_engine_arguments,
    add_sampling_arguments,
    require_engine_config,
    sampling_params,
)
from twostroke.errors import RequestError

if TYPE_CHECKING:
    from twostroke.engine.build import Engine
    from twostroke.engine.input_processor import Prompt

DESCRIPTION = (
    "Answer one prompt. The text goes to stdout as it is written; what prefill, decode and the KV "
    "cache took follows below it, or on stderr if stdout is not a terminal."
)
OPERANDS = " [MODEL] PROMPT ..."
COLLECT_ERRORS = True  # that is wrong with a line and its settings, at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="a model, as --model has it, and the words of the prompt; - reads stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the plain text, without the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead, once it is done"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser, leave_out=SERVER_ONLY)


def execute(args: argparse.Namespace) -> int:
    from twostroke.model.find.hub import check_path, names_a_model

    if args.raw and args.system is not None:
        args.parser.problem("--system is part of a chat, which --raw leaves out; give one of them")
    if not hasattr(args, "model") and args.prompt and names_a_model(args.prompt[0]):
        args.model = args.prompt.pop(0)
    config = require_engine_config(args)
    if config.model is not None:
        check_path(config.model)
    text = _read_prompt(args)
    engine, load_s = load(config, for_chat=not args.raw)
    params = sampling_params(args, engine.sampling)
    with noticing_interrupts() as interrupted, written_words() as print_words:
        write = _discard if args.json else print_words
        asked_s = monotonic()
        prompt = _prompt(engine, text, args.system, args.raw)
        answer = ask(engine, prompt, params, write, asked_s, interrupted)
    if not args.json:
        print(flush=True)
    if answer.finish_reason == "abort":
        raise KeyboardInterrupt
    if args.json:
        print(json.dumps(as_json(engine, answer, load_s), ensure_ascii=False))
    else:
        print_report(engine, answer, params.max_tokens)
    return 0


def _discard(text: str) -> None:
    pass


def _read_prompt(args: argparse.Namespace) -> str:
    text = " ".join(args.prompt)
    if text == "-" or (not args.prompt and not sys.stdin.isatty()):
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        args.parser.error("the prompt is empty; give some words, or text on stdin")
    return text


def _prompt(engine: Engine, text: str, system: str | None, raw: bool) -> Prompt:
    if raw or not has_chat_template(engine):
        if system is not None:
            raise RequestError(
                "--system needs a chat template, and the model has none; give one with "
                "--chat-template, or leave --system out"
            )
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return engine.input_processor.render_chat(messages)
