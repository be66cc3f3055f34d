"""`ChatTemplate`: renders messages to the prompt text, with the model's own Jinja template.

A template is an untrusted program: it comes with downloaded weights or with a request. It runs in
Jinja's immutable sandbox (no attributes with underscores, no imports, no changes to its arguments).
The sandbox does not limit time and memory. Therefore templates are rendered in processes that limit
both (`renderer`, run by `engine/rendering.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import ModelError, RequestError
from twostroke.model.text.chat_messages import (
    Messages,
    join_parts,
    read_messages,
    with_appended_text,
)
from twostroke.model.text.template_source import template_name

MAX_COMPILED: Final = 8  # templates that a renderer caches
END: Final = "[[the message ends here]] "  # marks the end of the last message in a rendered text


class ChatTemplate:
    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        of_request: bool = False,
        content_format: str = "auto",
    ) -> None:
        """`content_format`: one of `CONTENT_FORMATS`."""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._name = template_name(of_request)
        self._content_format = content_format
        self._parts_read: dict[str, bool | None] = {}  # by role
        advice = "Correct it." if of_request else "Give another one with --chat-template FILE."
        self._advice = advice
        try:
            self._template = _TemplateEnvironment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{self._name} has an error in line {error.lineno}: {error.message}. {advice}"
            ) from None
        except RecursionError:
            raise ModelError(f"{self._name} is nested too deeply to be read. {advice}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation.

        `continue_final_message`: the prompt ends with the last message, which the model continues.
        `kwargs`: further variables of the template, such as `enable_thinking`.
        """
        variables: dict[str, Any] = {
            "messages": None,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        reserved = sorted((variables.keys() - {"documents"}) & kwargs.keys())
        if reserved:
            raise RequestError(
                f"{', '.join(reserved)}: set by the server; a chat template's extra variables need "
                "other names."
            )
        variables |= kwargs
        shown = self._with_developer_messages(read_messages(messages), variables)
        if not continue_final_message:
            return self._render(shown, variables)
        content = shown[-1]["content"]
        content = content if isinstance(content, str) else content[-1]["text"]
        text = self._render(with_appended_text(shown, END), variables)
        end = text.rfind(END.strip())
        if end < 0 or content.strip() not in text:
            raise RequestError(
                f"continue_final_message: {self._name} does not show the last message's content",
                param="continue_final_message",
            )
        # A template that trims messages has trimmed END, so the message's end is trimmed here.
        return text[:end] if text.startswith(END, end) else text[:end].rstrip()

    def _with_developer_messages(self, messages: Messages, variables: dict[str, Any]) -> Messages:
        """Return the messages in a form whose 'developer' messages the template shows.

        The forms, in order: unchanged; with the role 'system'; merged into one system message.
        """
        if all(message["role"] != "developer" for message in messages):
            return messages
        system = [_with_role(message, "developer", "system") for message in messages]
        for candidate in (messages, system, _with_one_system_message(system)):
            if self._shows(candidate, ("developer", "system"), variables):
                return candidate
        # The template may drop system messages, but not developer messages.
        if self._shows(messages, ("developer",), variables):
            return messages
        raise RequestError(
            f"{self._name} does not show messages of the role 'developer'; send them as 'system' "
            "or 'user' messages."
        )

    def _shows(self, messages: Messages, roles: Sequence[str], variables: dict[str, Any]) -> bool:
        """Return whether the rendered text contains all messages of these roles."""
        marked, marks = list[dict[str, Any]](), []
        for n, message in enumerate(messages):
            if message["role"] in roles:
                marks.append(f"[[message {n}]]")
                (message,) = with_appended_text([message], marks[-1])
            marked.append(message)
        try:
            text = self._render(marked, variables)
        except RequestError:
            return False
        return all(mark in text for mark in marks)

    def _render(self, messages: Messages, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(variables | {"messages": self._shaped(messages)})
        except _RaisedByTemplate as error:
            raise RequestError(f"{self._name} refuses these messages: {error}") from None
        except SecurityError as error:
            raise RequestError(
                f"{self._name} does something that templates may not ({error}). {self._advice}"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # a template's code can raise any exception
            raise RequestError(
                f"{self._name} fails on these messages ({type(error).__name__}: "
                f"{error}). Check their roles and their order, and whether the template supports "
                "tools if there are any."
            ) from None

    # ── the message shapes that this template reads ───────────────────────────────────────────────

    def _shaped(self, messages: Messages) -> Messages:
        shaped = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list) and not self._reads_parts(message):
                message = message | {"content": join_parts(content)}
            elif isinstance(content, str) and self._content_format == "openai":
                message = message | {"content": [{"type": "text", "text": content}]}
            if message.get("tool_calls"):
                message = self._call_shape(message)
            shaped.append(message)
        return shaped

    @cached_property
    def _call_shape(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return the first shape of a message with tool calls whose arguments the template shows.

        Most templates read an empty string as the content and an object as the arguments; some read
        null, or a JSON string.
        """
        for shape in CALL_SHAPES:
            if "[[shown]]" in self._try([PROBE_USER, shape(PROBE_CALL), PROBE_RESULT]):
                return shape
        return CALL_SHAPES[0]

    def _reads_parts(self, message: dict[str, Any]) -> bool:
        """Return whether the template iterates over content that is a list."""
        if self._content_format != "auto":
            return self._content_format == "openai"
        role = message["role"]
        if role not in ("system", "developer", "user", "assistant"):
            return False
        if role not in self._parts_read:
            self._parts_read[role] = self._reads_probe(role)
        reads = self._parts_read[role]
        # A template that renders no probe may require parts with further fields.
        return any(len(part) > 2 for part in message["content"]) if reads is None else reads

    def _reads_probe(self, role: str) -> bool | None:
        """Return whether the template reads parts; None if it renders neither parts nor a text."""
        parts = [{"type": "text", "text": text} for text in ("[[one]]", "[[two]]")]

        def render(content: Any) -> str:
            probe = {"role": role, "content": content}
            others = {"user": [probe], "assistant": [PROBE_USER, probe]}
            return self._try(others.get(role, [probe, PROBE_USER]))

        text = render(parts)
        if not text and not render(join_parts(parts)):
            return None
        as_code = "'[[one]]'" in text or '"[[one]]"' in text
        return "[[one]]" in text and "[[two]]" in text and not as_code

    def _try(self, messages: Messages) -> str:
        """Return the text of a probe conversation, empty if the template raises."""
        variables = {"tools": [PROBE_TOOL], "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render({"messages": messages, **variables, **self._tokens})
        except MemoryError:
            raise
        except Exception:  # see `_render`
            return ""


def renderer(hello: bytes) -> Callable[[bytes], bytes]:
    """Return the request handler of a sandboxed process (`engine/rendering.py`).

    A request is a template with the arguments of `ChatTemplate.render`. The answer is the length of
    the text, and the text unless it is longer than the requested limit.
    """

    @functools.lru_cache(maxsize=MAX_COMPILED)
    def compiled(source: str, *settings: Any) -> ChatTemplate:
        try:
            return ChatTemplate(source, *settings)
        except ModelError as error:
            raise RequestError(str(error)) from None

    def render(request: bytes) -> bytes:
        if not request:
            return b""
        template, (messages, generate, tools, continued, variables), max_chars = json.loads(request)
        text = compiled(*template).render(messages, generate, tools, continued, **variables)
        fits = max_chars is None or len(text) <= max_chars
        return json.dumps([len(text), text if fits else None]).encode()

    return render


def _with_role(message: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return message | {"role": new} if message["role"] == old else message


def _with_one_system_message(messages: Messages) -> Messages:
    system = [join_parts(one["content"]) for one in messages if one["role"] == "system"]
    others = [one for one in messages if one["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others]


def _call_shape(null: bool, as_text: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def shape(message: dict[str, Any]) -> dict[str, Any]:
        if null and not message["content"]:
            message = message | {"content": None}
        if as_text:
            calls = [_arguments_as_text(call) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        return message

    return shape


def _arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function["arguments"], str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


CALL_SHAPES: Final = tuple(
    _call_shape(null, as_text) for as_text in (False, True) for null in (False, True)
)
PROBE_USER: Final[dict[str, Any]] = {"role": "user", "content": "Hello"}
PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
PROBE_CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "a1b2c3d4e",  # the length that Mistral's templates require
            "type": "function",
            "function": {"name": "look", "arguments": {"where": "[[shown]]"}},
        }
    ],
}
PROBE_RESULT: Final = {
    "role": "tool",
    "name": "look",
    "tool_call_id": "a1b2c3d4e",
    "content": "nothing",
}


class _RaisedByTemplate(jinja2.TemplateError):
    """Raised by `raise_exception(message)` in a template, which refuses the messages."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks a model's text for training. It renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters["tojson"] = _to_json


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own filter escapes `<` and others for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
