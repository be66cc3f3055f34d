"""Translates a Responses request into OpenAI's chat request: the settings, and the input items.

    input, items of stored responses ──read_items──▶ items ──messages_of──▶ messages of a chat

`read_items` keeps only the known fields of an item and validates them, so stored items are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from twostroke.errors import did_you_mean, shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.body_fields import AccountFields, EngineFields
from twostroke.serve.fields.protocol import (
    ChatRequest,
    ConversationRequest,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
    Tool,
)
from twostroke.serve.fields.response_json import Json

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (  # only the first has an effect
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME_NAME = set(ConversationRequest.__struct_fields__) - set(AccountFields.__struct_fields__)
_SAME_NAME |= {*EngineFields.__struct_fields__, "prompt_cache_key"}


# ── settings ────────────────────────────────────────────────────────────────────────────────────


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Return the chat request without its messages."""
    _refuse_unsupported(request)
    wants_logprobs = LOGPROBS in (request.include or ())
    tools, choice = _tools(request)
    return ChatRequest(
        messages=[],
        **{name: getattr(request, name) for name in _SAME_NAME},
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_response_format(request.text.format if request.text else None),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
    )


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name in request.include or ():
        if name not in INCLUDABLE:
            message = f"include: there is no {shown(name)}{did_you_mean(name, INCLUDABLE)}"
            raise ApiError(400, message, param="include")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise ApiError(400, "max_tool_calls must be at least 1", param="max_tool_calls")
    if request.background and request.store is False:
        message = "background requires store: the response is read from the store"
        raise ApiError(400, message, param="background")
    if request.background and LOGPROBS in (request.include or ()):
        message = f"include: {LOGPROBS} are not stored; ask for them without background"
        raise ApiError(400, message, param="include")


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    if form.schema is None:
        where = "text.format.schema"
        raise ApiError(400, f"{where}: a JSON schema is needed here", param=where)
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema))


def _tools(request: ResponsesRequest) -> tuple[list[Tool] | None, Any]:
    """Return the tools and the tool choice of the chat request."""
    tools = [
        tool for n, given in enumerate(request.tools or ()) for tool in _flat(given, f"tools[{n}]")
    ]
    choice: Any = request.tool_choice
    if not isinstance(choice, dict):
        return tools or None, choice
    kind, name = choice.get("type"), choice.get("name")
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or choice.get("mode") not in ("auto", "required"):
            message = 'tool_choice: allowed_tools has a mode, "auto" or "required", and tools'
            raise ApiError(400, message, param="tool_choice")
        entries = [entry if isinstance(entry, dict) else {} for entry in allowed]
        functions = [entry for entry in entries if entry.get("type", "function") == "function"]
        names = [function.get("name") for function in functions]
        known = [tool.function.name for tool in tools]
        if unknown := [name for name in names if name not in known]:
            message = f"tool_choice allows {shown(unknown[0])}, which is not among the tools"
            raise ApiError(400, message, param="tool_choice")
        return [tool for tool in tools if tool.function.name in names] or None, choice["mode"]
    if kind != "function":
        raise ApiError(
            400,
            f"tool_choice: this server runs no tools of type {shown(kind)}; name a function",
            param="tool_choice",
        )
    return tools or None, {"type": "function", "function": {"name": name}}


def _flat(tool: ResponsesTool, where: str, namespace: str | None = None) -> Iterator[Tool]:
    """Yield a function, or the functions of a namespace with both names joined."""
    if tool.type == "namespace" and namespace is None:
        for n, inner in enumerate(tool.tools or ()):
            yield from _flat(inner, f"{where}.tools[{n}]", tool.name or "")
    elif tool.type == "function":
        function = FunctionTool(
            name=full_name(tool.name or "", namespace),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        yield Tool(type="function", function=function)
    else:
        raise ApiError(
            400,
            f"{where}: this server runs no tools of type {shown(tool.type)}; define functions that "
            "the client runs",
            param="tools",
        )


def full_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def namespaces_of(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Return (name, namespace) of functions, by the joined name that the model uses."""
    return {
        full_name(inner.name or "", tool.name): (inner.name or "", tool.name or "")
        for tool in request.tools or ()
        for inner in tool.tools or ()
    }


# ── items ───────────────────────────────────────────────────────────────────────────────────────


def read_items(
    content: str | Sequence[Json], find: Callable[[str], Json | None] = lambda _: None
) -> list[Json]:
    """Return the items of `input` with their known fields. `find` returns the stored item to which
    an item_reference refers. Each item may be referenced once."""
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    items, referred = [], set()
    for n, item in enumerate(content):
        where = f"input[{n}]"
        if item.get("type") == "item_reference":
            name = str(item.get("id"))
            found = None if name in referred else find(name)
            if found is None:
                why = "is referenced twice" if name in referred else "is not stored (any more)"
                message = f"{where}: the item {shown(name)} of the item_reference {why}"
                raise ApiError(400, f"{message}; send the item itself", param="input")
            referred.add(name)
            item = found
        items.append(_read_item(item, where))
    return items


def _read_item(item: Json, where: str) -> Json:
    kind = item.get("type") or "message"
    read: Json = {"type": kind}
    if isinstance(item.get("id"), str):
        read["id"] = item["id"]
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise ApiError(400, f"{where}: a message needs its role", param="input")
        by_model = role == "assistant"
        read |= {"role": role, "content": _parts(item.get("content"), where, by_model)}
        if by_model:
            read["status"] = "completed"
    elif kind == "function_call":
        read |= _texts(item, where, "call_id", "name", "arguments")
        read["status"] = "completed"
        if isinstance(item.get("namespace"), str):
            read["namespace"] = item["namespace"]
    elif kind == "function_call_output":
        output = item.get("output")
        read |= _texts(item, where, "call_id")
        read["output"] = output if isinstance(output, str) else _parts(output, where, False)
    elif kind == "reasoning":
        read["summary"] = _reasoning_parts(item.get("summary"), "summary_text", where)
        read["content"] = _reasoning_parts(item.get("content"), "reasoning_text", where)
    else:
        raise ApiError(
            400,
            f"{where}: items of type {shown(kind)} are not supported; send message, function_call, "
            "function_call_output, reasoning or item_reference",
            param="input",
        )
    return read


def _texts(item: Json, where: str, *names: str) -> Json:
    for name in names:
        if not isinstance(item.get(name), str):
            message = f"{where}: a {item['type']} needs the field {name}, a string"
            raise ApiError(400, message, param="input")
    return {name: item[name] for name in names}


def _parts(content: Any, where: str, by_model: bool) -> list[Json]:
    """Return the parts of a message. `by_model`: whether the model wrote the message."""
    parts = []
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(content, list):
        message = f"{where}: the content is missing; expected a string or a list of parts"
        raise ApiError(400, message, param="input")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            message = f"{where}.content: parts of type {shown(kind)} are not supported; send text"
            raise ApiError(400, message, param="input")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ApiError(400, f"{where}.content: a part's text is missing", param="input")
        if by_model:
            parts.append({"type": "output_text", "text": text, "annotations": []})
        else:
            parts.append({"type": "input_text", "text": text})
    return parts


def _reasoning_parts(parts: Any, kind: str, where: str) -> list[Json]:
    """Return the parts of reasoning, without encrypted_content."""
    read = []
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError(400, f"{where}: a part's text is missing", param="input")
        read.append({"type": kind, "text": text})
    return read


# ── messages ────────────────────────────────────────────────────────────────────────────────────


def messages_of(instructions: str | None, items: Sequence[Json]) -> list[Json]:
    """Return chat messages. Reasoning and calls of one turn become one assistant message."""
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            parts = item["content"] or item["summary"]
            reasoning += "\n".join([part["text"] for part in parts])
            continue
        if kind == "function_call_output":
            output = item["output"]
            content = output if isinstance(output, str) else _chat_parts(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "function_call":
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or reasoning:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(_chat_call(item))
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _chat_parts(item["content"])})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _chat_parts(parts: Sequence[Json]) -> list[Json]:
    return [{"type": "text", "text": part["text"]} for part in parts]


def _chat_call(item: Json) -> Json:
    name = full_name(item["name"], item.get("namespace"))
    function = {"name": name, "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def places_to_cut(messages: Sequence[Json]) -> tuple[int, list[int]]:
    """Return the number of system messages at the start, which are kept, and the indices at which
    the remaining messages may begin. These are the user messages, and the assistant messages after
    the last user message, so that no tool result loses its call."""
    head = 0
    while head < len(messages) and messages[head]["role"] == "system":
        head += 1
    users = [n for n in range(head, len(messages)) if messages[n]["role"] == "user"]
    last = users[-1] if users else head
    answers = [n for n in range(last + 1, len(messages)) if messages[n]["role"] == "assistant"]
    return head, [n for n in (*users, *answers) if n > head]
