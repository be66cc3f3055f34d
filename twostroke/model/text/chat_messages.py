"""A conversation as it is sent → as chat templates read it, for every route and for `LLM.chat`.

What clients send has many shapes: a content that is null beside tool calls, fields that are null, a
content in parts, arguments of a call as JSON in a string. After `read_messages` a message has a
role, a content (a text, or a list of parts of the type 'text') and no field that is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from twostroke.errors import RequestError

Messages = list[dict[str, Any]]

TEXT_PARTS: Final = {  # the field that has the text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# What OpenAI's and Anthropic's clients send with a part that is nothing to a template.
PART_FIELDS: Final = {"type", *TEXT_PARTS.values(), "annotations", "logprobs", "cache_control"}
THINKING: Final = ("reasoning_content", "reasoning", "thinking")  # one thing in three dialects
MAY_BE_EMPTY: Final = ("assistant", "tool", "function")  # roles whose content may be null


def read_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Raises `RequestError` for what is no conversation. The caller's messages stay as they are."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages: expected a list of messages, each with a role and a content.")
    if not messages:
        raise RequestError("messages: the list is empty; at least one message is needed.")
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def join_parts(content: Any) -> Any:
    """A content in parts as one text, with a new line between them; another as it is."""
    if not isinstance(content, list):
        return content
    return "\n".join([part["text"] for part in content])


def with_end(messages: Messages, text: str) -> Messages:
    """With a text added to the end of the last message."""
    last = dict(messages[-1])
    if isinstance(last["content"], str):
        last["content"] += text
    else:
        *parts, end = last["content"]
        last["content"] = [*parts, {**end, "text": end["text"] + text}]
    return [*messages[:-1], last]


def _read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with a role and a content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}: the role is {'missing' if role is None else f'{role!r}'}; expected a text "
            "such as 'system', 'user' or 'assistant'."
        )
    # Templates ask whether a field is there, so one that is null must not be.
    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = _content(read, role, where)
    calls = read.pop("tool_calls", None)
    if calls:
        read["tool_calls"] = _tool_calls(calls, where)
    thought = next((read[name] for name in THINKING if name in read), None)
    if role == "assistant" and thought is not None:
        read = dict.fromkeys(THINKING, thought) | read
    return read


def _content(message: dict[str, Any], role: str, where: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None:
        if role not in MAY_BE_EMPTY:
            raise RequestError(f"{where}: the content is missing; expected a text.")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content: expected a text or a list of parts, not {type(content).__name__}."
        )
    texts = [_part_text(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
    if role in ("tool", "function") or not texts:
        return "\n".join(texts)
    return [
        {"type": "text", "text": text} | _other_fields(part)
        for part, text in zip(content, texts, strict=True)
    ]


def _other_fields(part: Any) -> dict[str, Any]:
    """For templates that know them, such as a translator's, which wants to be told languages."""
    if isinstance(part, str):
        return {}
    return {name: value for name, value in part.items() if name not in PART_FIELDS}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise RequestError(
            f"{where}: parts of the type {kind!r} are not supported; this model reads text only, "
            "given as {'type': 'text', 'text': ...}."
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(
            f"{where}: a part of the type {kind!r} needs its text in {TEXT_PARTS[kind]!r}."
        )
    return text


def _tool_calls(calls: Any, where: str) -> Messages:
    """The API sends a call's arguments as JSON in a string; templates write them out themselves."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls: expected a list of calls.")
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping):
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):  # cut short: as the model wrote them
                    arguments = json.loads(arguments) or {}
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append(dict(call))
    return read
