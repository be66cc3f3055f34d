"""Messages → the text a model was trained to answer, by the model's own Jinja template.

A template is a program that came with somebody's weights, or with a request. It runs in Jinja's
immutable sandbox (no attributes with underscores, no imports, no changes to what it is given),
which does not bound the time and the memory that it takes: the server renders in processes that
are limited in both (`renderer`, run by `limited.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import ModelError, RequestError

COMPILED: Final = 8  # templates that a renderer keeps


class ChatTemplate:
    def __init__(
        self, source: str, bos_token: str, eos_token: str, of_request: bool = False
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._name = template_name(of_request)
        advice = "Correct it." if of_request else "Give another one with --chat-template FILE."
        self._advice = advice
        try:
            self._template = _Environment().from_string(source)
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
        **kwargs: Any,
    ) -> str:
        """`kwargs` are further variables of the template, such as `enable_thinking`."""
        variables: dict[str, Any] = {
            "messages": check_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        taken = sorted((variables.keys() - {"documents"}) & kwargs.keys())
        if taken:
            raise RequestError(
                f"{', '.join(taken)}: set by the server; a chat template's extra variables need "
                "other names."
            )
        variables |= kwargs
        try:
            return self._template.render(variables)
        except _RaisedByTemplate as error:
            raise RequestError(f"{self._name} refuses these messages: {error}") from None
        except SecurityError as error:
            raise RequestError(
                f"{self._name} does what templates may not ({error}). {self._advice}"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # the template's code is not ours: anything can come out of it
            raise RequestError(
                f"{self._name} fails on these messages ({type(error).__name__}: "
                f"{error}). Check their roles and their order, and that the template knows tools "
                "if there are any."
            ) from None


def template_name(of_request: bool) -> str:
    return "the request's chat template" if of_request else "the model's chat template"


def renderer(hello: bytes) -> Callable[[bytes], bytes]:
    """In a limited process: answers the arguments of `ChatTemplate.render` with a text's length
    and, unless it is too long to be wanted, the text."""
    source, bos_token, eos_token = json.loads(hello)

    @functools.lru_cache(maxsize=COMPILED)
    def compiled(own: str | None) -> ChatTemplate:
        try:
            given = source if own is None else own
            return ChatTemplate(given, bos_token, eos_token, of_request=own is not None)
        except ModelError as error:
            raise RequestError(str(error)) from None

    def render(request: bytes) -> bytes:
        if not request:
            return b""
        own, messages, add_generation_prompt, tools, variables, max_chars = json.loads(request)
        text = compiled(own).render(messages, add_generation_prompt, tools, **variables)
        return json.dumps([len(text), text if len(text) <= max_chars else None]).encode()

    return render


def choose_template(named: Mapping[str, str]) -> str | None:
    """Of a model's named templates the 'default' one, else the first by name."""
    if not named:
        return None
    return named["default"] if "default" in named else named[min(named)]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates read them: content as text, arguments of tool calls as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages: expected a list of messages, each with a role and a content.")
    if not messages:
        raise RequestError("messages: the list is empty; at least one message is needed.")
    return [_check_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with a role and a content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}: the role is {'missing' if role is None else f'{role!r}'}; expected a text "
            "such as 'system', 'user' or 'assistant'."
        )
    checked = {**message, "content": _text(message.get("content"), where)}
    if checked["content"] is None and not message.get("tool_calls"):
        raise RequestError(f"{where}: the content is missing; expected a text.")
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return checked


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content: expected a text or a list of parts, not {type(content).__name__}."
        )
    return "\n".join([_part_text(part, f"{where}.content[{n}]") for n, part in enumerate(content)])


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f"{where}: parts of the type {kind!r} are not supported; this model reads text only, "
            "given as {'type': 'text', 'text': ...}."
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: a part of the type 'text' needs its text in 'text'.")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The API sends a call's arguments as JSON in a string; templates write them out themselves."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls: expected a list of calls.")
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = function["arguments"]  # as a model wrote it, perhaps cut short
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append(dict(call))
    return read


class _RaisedByTemplate(jinja2.TemplateError):
    """`raise_exception(message)` in a template: its way to refuse what it was given."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
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
    """Jinja's own escapes `<` and the like for HTML; a model should read what was meant."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
