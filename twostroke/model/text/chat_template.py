"""Messages → the text a model was trained to answer, by the model's own Jinja template.

A template is a program that came with somebody's weights, or with a request. It runs in Jinja's
immutable sandbox (no attributes with underscores, no imports, no changes to what it is given),
which does not bound the time and the memory that it takes: it is rendered in processes that are
limited in both (`renderer`, run by `engine/rendering.py`).
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
from twostroke.model.text.chat_messages import Messages, join_parts, read_messages, with_end
from twostroke.model.text.template_source import template_name

COMPILED: Final = 8  # templates that a renderer keeps
END: Final = "[[the message ends here]] "  # marks it in a rendered text


class ChatTemplate:
    def __init__(
        self, source: str, bos_token: str, eos_token: str, of_request: bool = False
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._name = template_name(of_request)
        self._parts_read: dict[str, bool | None] = {}  # by role
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
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """`continue_final_message`: the text ends where the last message does, for the model to
        write on. `kwargs` are further variables of the template, such as `enable_thinking`."""
        variables: dict[str, Any] = {
            "messages": None,
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
        given = self._with_developers_shown(read_messages(messages), variables)
        if not continue_final_message:
            return self._render(given, variables)
        content = given[-1]["content"]
        content = content if isinstance(content, str) else content[-1]["text"]
        text = self._render(with_end(given, END), variables)
        end = text.rfind(END.strip())
        if end < 0 or content.strip() not in text:
            raise RequestError(
                f"continue_final_message: {self._name} does not show the last message's content",
                param="continue_final_message",
            )
        # A template that trims a message has trimmed the space of END, and not what is before it.
        return text[:end] if text.startswith(END, end) else text[:end].rstrip()

    def _with_developers_shown(self, messages: Messages, variables: dict[str, Any]) -> Messages:
        """Messages of the role 'developer' as they are, if the template shows them; else with the
        role 'system', else as part of the first message of that role."""
        if all(message["role"] != "developer" for message in messages):
            return messages
        system = [_with_role(message, "developer", "system") for message in messages]
        for given in (messages, system, _with_one_system_message(system)):
            if self._shows(given, ("developer", "system"), variables):
                return given
        if self._shows(messages, ("developer",), variables):  # a template that drops the others
            return messages
        raise RequestError(
            f"{self._name} does not show messages of the role 'developer'; send them as 'system' "
            "or 'user' messages."
        )

    def _shows(self, messages: Messages, roles: Sequence[str], variables: dict[str, Any]) -> bool:
        """Whether all messages of these roles are in the text."""
        marked, marks = list[dict[str, Any]](), []
        for n, message in enumerate(messages):
            if message["role"] in roles:
                marks.append(f"[[message {n}]]")
                (message,) = with_end([message], marks[-1])
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

    # ── what this template wants to be given ────────────────────────────────────────────────

    def _shaped(self, messages: Messages) -> Messages:
        shaped = []
        for message in messages:
            if isinstance(message["content"], list) and not self._reads_parts(message):
                message = message | {"content": join_parts(message["content"])}
            if message.get("tool_calls"):
                message = self._call_shape(message)
            shaped.append(message)
        return shaped

    @cached_property
    def _call_shape(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """How messages with tool calls are given: the first way in which the template shows a
        call's arguments. Most want an empty content and an object, some null or JSON in a string.
        """
        for shape in CALL_SHAPES:
            if "[[shown]]" in self._try([PROBE_USER, shape(PROBE_CALL), PROBE_RESULT]):
                return shape
        return CALL_SHAPES[0]

    def _reads_parts(self, message: dict[str, Any]) -> bool:
        """Whether the template takes a content apart that is a list."""
        role = message["role"]
        if role not in ("system", "developer", "user", "assistant"):
            return False
        if role not in self._parts_read:
            self._parts_read[role] = self._reads_probe(role)
        reads = self._parts_read[role]
        # A template that takes none of ours may want parts with fields of its own.
        return any(len(part) > 2 for part in message["content"]) if reads is None else reads

    def _reads_probe(self, role: str) -> bool | None:
        """None if it takes our content neither in parts nor as one text."""
        parts = [{"type": "text", "text": text} for text in ("[[one]]", "[[two]]")]

        def tried(content: Any) -> str:
            probe = {"role": role, "content": content}
            others = {"user": [probe], "assistant": [PROBE_USER, probe]}
            return self._try(others.get(role, [probe, PROBE_USER]))

        text = tried(parts)
        if not text and not tried(join_parts(parts)):
            return None
        as_code = "'[[one]]'" in text or '"[[one]]"' in text
        return "[[one]]" in text and "[[two]]" in text and not as_code

    def _try(self, messages: Messages) -> str:
        """The text of a conversation of ours, empty if the template does not take it."""
        variables = {"tools": [PROBE_TOOL], "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render({"messages": messages, **variables, **self._tokens})
        except MemoryError:
            raise
        except Exception:  # as in `_render`
            return ""


def renderer(hello: bytes) -> Callable[[bytes], bytes]:
    """Work of a limited process (`engine/rendering.py`): a template and the arguments of
    `ChatTemplate.render` → a text's length and, unless it is too long to be wanted, the text."""

    @functools.lru_cache(maxsize=COMPILED)
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
        wanted = max_chars is None or len(text) <= max_chars
        return json.dumps([len(text), text if wanted else None]).encode()

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
            "id": "a1b2c3d4e",  # as Mistral's templates want it
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
