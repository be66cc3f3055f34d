"""`read_messages` converts the messages of a client to messages for a chat template.

Clients may send null fields, content that is a list of parts, and the arguments of a tool call as a
JSON string. A converted message has a role, content (a string, or a list of parts of the type
'text') and no field that is null. Every route and `LLM.chat` use this conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from twostroke.errors import RequestError

Messages = list[dict[str, Any]]

TEXT_PARTS: Final = {  # type of a part → the field with its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# Fields of a part that are not copied: the type and the text, which are converted, and fields of
# OpenAI's and Anthropic's clients that templates ignore.
IGNORED_PART_FIELDS: Final = {
    "type",
    *TEXT_PARTS.values(),
    "annotations",
    "logprobs",
    "cache_control",
}
# Clients and templates use any of these names for the reasoning of a message.
THINKING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
ROLES_WITH_OPTIONAL_CONTENT: Final = ("assistant", "tool", "function")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return the messages for a template. Raise `RequestError` if a message is invalid.

    The caller's messages are not changed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages: expected a list of messages, each with a role and content.")
    if not messages:
        raise RequestError("messages: the list is empty; at least one message is needed.")
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def join_parts(content: Any) -> Any:
    """Join content in parts with newlines. Return any other content unchanged."""
    if not isinstance(content, list):
        return content
    return "\n".join([part["text"] for part in content])


def with_appended_text(messages: Messages, text: str) -> Messages:
    """Return the messages with `text` appended to the content of the last message."""
    last = dict(messages[-1])
    if isinstance(last["content"], str):
        last["content"] += text
    else:
        *parts, last_part = last["content"]
        last["content"] = [*parts, {**last_part, "text": last_part["text"] + text}]
    return [*messages[:-1], last]


def _read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected an object with a role and content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}: the role is {'missing' if role is None else f'{role!r}'}; expected a string "
            "such as 'system', 'user' or 'assistant'."
        )
    # Templates test whether a field is defined, so null fields are removed.
    converted = {name: value for name, value in message.items() if value is not None}
    converted["content"] = _content(converted, role, where)
    calls = converted.pop("tool_calls", None)
    if calls:
        converted["tool_calls"] = _tool_calls(calls, where)
    reasoning = next((converted[name] for name in THINKING_FIELDS if name in converted), None)
    if role == "assistant" and reasoning is not None:  # under every name, for any template
        converted = dict.fromkeys(THINKING_FIELDS, reasoning) | converted
    return converted


def _content(message: dict[str, Any], role: str, where: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is None:
        if role not in ROLES_WITH_OPTIONAL_CONTENT:
            raise RequestError(f"{where}: the content is missing; expected a string.")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content: expected a string or a list of parts, not {type(content).__name__}."
        )
    texts = [_part_text(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
    if role in ("tool", "function") or not texts:
        return "\n".join(texts)
    return [
        {"type": "text", "text": text} | _template_fields(part)
        for part, text in zip(content, texts, strict=True)
    ]


def _template_fields(part: Any) -> dict[str, Any]:
    """Return the fields of a part that a template may read, such as `source_lang_code`."""
    if isinstance(part, str):
        return {}
    return {name: value for name, value in part.items() if name not in IGNORED_PART_FIELDS}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if part_type not in TEXT_PARTS:
        raise RequestError(
            f"{where}: parts of the type {part_type!r} are not supported; this model reads text "
            "only, given as {'type': 'text', 'text': ...}."
        )
    text = part.get(TEXT_PARTS[part_type])
    if not isinstance(text, str):
        raise RequestError(
            f"{where}: a part of the type {part_type!r} needs its text in "
            f"{TEXT_PARTS[part_type]!r}."
        )
    return text


def _tool_calls(calls: Any, where: str) -> Messages:
    """Parse the arguments of each call, which the API sends as a JSON string."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls: expected a list of calls.")
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping):
            arguments = function.get("arguments") or {}
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):  # invalid JSON stays a string
                    arguments = json.loads(arguments) or {}
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(dict(call))
    return parsed
