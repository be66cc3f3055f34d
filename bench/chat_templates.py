"""Chat templates of real models, rendered by twostroke and by transformers: the same text?

    python bench/chat_templates.py FOLDER [--json FILE]      # FOLDER: *.jinja, at any depth

For each template:

- `continue_final_message`: a conversation whose last message is one of `LAST` is cut where that
  message ends, white space and all, as transformers' apply_chat_template does it; or both refuse.
- the second turn of an agent's loop: a message with tool calls and a content that is null, then the
  result, must be rendered as transformers renders it with content and arguments in the shape that
  the template wants; and where the template shows calls, the call and its result are in it.
- messages of the role 'developer' are in the text, or refused.

Templates are somebody's work and not kept here: vLLM's source package has some under `examples/`,
llama.cpp's under `models/templates/`, TRL's under `trl/chat_templates/`. Exit status 1 if anything
differs. Ends with one JSON line.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # `bench` is found there
    sys.path[0] = __file__.rpartition("/bench/")[0] or "."

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from twostroke.errors import ModelError, RequestError
from twostroke.model.text.chat_template import ChatTemplate

LAST = (
    "The answer is",
    "The answer is ",
    "two lines\n",
    "  def f(x):\n\treturn x\n\t",
    "a",
    "user",
    "Hello",
    "",
    "Grüße 😀  ",
    'With "quotes", <b>tags</b> & {"json": [1, 2]}',
    "no-break\u00a0space\u00a0",
)
CALL_ID = "a1b2c3d4e"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
SHAPES = [(content, as_text) for as_text in (False, True) for content in ("", None)]


class Reference:
    """transformers: its renderer alone, as its tokenizers drop a content that is null (from 5.23
    on), which some templates ask for."""

    def __init__(self) -> None:
        self.said = ""  # when it refused last

    def render(self, source: str, messages: Any, **settings: Any) -> str | None:
        """None if it refuses."""
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        try:
            (text,), _ = render_jinja_template(
                [messages], chat_template=source, **tokens, **settings
            )
        except Exception as error:  # whatever a template raises
            self.said = repr(error)
            return None
        assert isinstance(text, str)
        return text


@lru_cache(maxsize=1)
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>")


def ours(source: str, messages: Any, **settings: Any) -> str | None:
    try:
        return compiled(source).render(messages, **settings)
    except (ModelError, RequestError):
        return None


def conversation(last: str) -> list[dict[str, Any]]:
    """The last message occurs before, too."""
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": last or "a"},
        {"role": "user", "content": "user: And now? The answer is"},
        {"role": "assistant", "content": last},
    ]


def continues(reference: Reference, source: str, last: str) -> str:
    """ "same", "refused by both" or what differs."""
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    theirs = reference.render(source, conversation(last), **settings)
    text = ours(source, conversation(last), **settings)
    if text == theirs:
        return "refused by both" if text is None else "same"
    return f"{last!r}: {_end(text)} instead of {_end(theirs)}"


def _end(text: str | None) -> str:
    return "refused" if text is None else repr(text[-40:])


def agent_turn(content: Any, arguments: Any, result: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": "What is the weather in Ulm?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": "weather", "content": result},
    ]


def second_turn(reference: Reference, source: str) -> str:
    """ "same", "no calls in this template", "refused by both" or what differs."""
    arguments = {"town": "Ulm-by-the-Danube"}
    parts = [{"type": "text", "text": "rain all day"}]
    settings = {"tools": [TOOL], "add_generation_prompt": True}
    text = ours(source, agent_turn(None, json.dumps(arguments), parts), **settings)
    renderings = [
        reference.render(
            source,
            agent_turn(content, json.dumps(arguments) if as_text else arguments, "rain all day"),
            **settings,
        )
        for content, as_text in SHAPES
    ]
    showing = [one for one in renderings if one is not None and arguments["town"] in one]
    if not showing:
        if text is None:
            same = all(one is None for one in renderings)
            return "refused by both" if same else "refused"
        if text == renderings[0]:
            return "no calls in this template"
        return f"differs, without calls ({reference.said})"
    if text != showing[0]:
        return f"{_end(text)} instead of {_end(showing[0])}"
    return "same" if "rain all day" in text else "the result is missing"


def developer(source: str) -> str:
    """ "shown", "refused" (as a system message would be, or lost) or what is wrong."""
    said, user = "Always answer in verse.", {"role": "user", "content": "Hello"}
    as_system = ours(source, [{"role": "system", "content": said}, user])
    for before in ([], [{"role": "system", "content": "You are terse."}]):
        text = ours(source, [*before, {"role": "developer", "content": said}, user])
        if text is None:
            shown = as_system is not None and said in as_system
            return "refused, though system messages are shown" if shown else "refused"
        if said not in text:
            return "lost"
    return "shown"


GOOD = {
    "continue_final_message": ("same", "refused by both"),
    "second_turn": ("same", "refused by both", "no calls in this template"),
    "developer": ("shown", "refused"),
}


def check(reference: Reference, source: str) -> Iterator[tuple[str, str]]:
    """The names of the checks, and what was found."""
    for last in LAST:
        yield "continue_final_message", continues(reference, source, last)
    yield "second_turn", second_turn(reference, source)
    yield "developer", developer(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    reference, sources = Reference(), dict[str, str]()
    for path in sorted(args.folder.rglob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        sources.setdefault(hashlib.sha256(source.encode()).hexdigest(), source)
    counts: dict[str, Counter[str]] = {name: Counter() for name in GOOD}
    for digest, source in sources.items():
        for name, said in check(reference, source):
            counts[name][said if said in GOOD[name] else "wrong"] += 1
            if said not in GOOD[name]:
                print(f"{digest[:12]} {name}: {said}")
    wrong = sum(count["wrong"] for count in counts.values())
    result: dict[str, Any] = {"transformers": transformers.__version__, "templates": len(sources)}
    result |= {"last_messages": len(LAST), "wrong": wrong}
    result |= {name: dict(sorted(count.items())) for name, count in counts.items()}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
