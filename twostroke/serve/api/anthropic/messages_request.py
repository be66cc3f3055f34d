"""Anthropic's request (`POST /v1/messages`) and its translation into OpenAI's chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.body_fields import EngineFields, Name, Stops
from twostroke.serve.fields.foreign_fields import ForeignTable
from twostroke.serve.fields.protocol import (
    ChatRequest,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    Tool,
)
from twostroke.serve.fields.response_json import Json

BILLING = "x-anthropic-billing-header:"

# ── blocks; their other fields (cache_control, citations, …) have no effect ─────────────────────


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Reasoning encrypted by Anthropic. It is skipped."""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(msgspec.Struct, tag="image"):
    """Not supported: refused."""


class DocumentBlock(msgspec.Struct, tag="document"):
    """Not supported: refused."""


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
)


class MessageParam(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(msgspec.Struct):
    name: str
    type: str | None = None  # another type than "custom": a tool that Anthropic defines or runs
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def runs_on_client(self) -> bool:
        """Return whether the client defines and runs the tool."""
        return self.type in (None, "custom")


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None  # a variable of the chat template
    format: OutputFormat | None = None


class CountTokensRequest(EngineFields, kw_only=True):
    """A request to count the tokens of a prompt: the fields of `MessagesRequest` that change the
    prompt, and fields without effect."""

    FOREIGN: ClassVar[ForeignTable] = foreign_fields.MESSAGES
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *EngineFields.LARGE_ENGINE_FIELDS,
        "messages",
        "system",
        "tools",
        "tool_choice",
        "output_config",
        "output_format",
        "chat_template_kwargs",
    )
    IGNORED: ClassVar[tuple[str, ...]] = (
        "cache_control",
        "context_management",
        "diagnostics",
        "fallbacks",
        "metadata",
    )

    messages: list[MessageParam]
    model: Name | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # The following fields have no effect: billing, regions, and caching, which is always on.
    cache_control: Raw = None  # type: ignore[assignment]
    context_management: Raw = None  # type: ignore[assignment]
    diagnostics: Raw = None  # type: ignore[assignment]
    fallbacks: Raw = None  # type: ignore[assignment]
    metadata: Raw = None  # type: ignore[assignment]
    fallback_credit_token: Name | None = None
    speed: Name | None = None
    service_tier: Name | None = None
    inference_geo: Name | None = None
    user_profile_id: Name | None = None
    workspace_id: Name | None = None

    def __post_init__(self) -> None:
        for name in self.IGNORED:  # a raw value refers to the whole body and keeps it in memory
            setattr(self, name, None)


class MessagesRequest(CountTokensRequest, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (*CountTokensRequest.LARGE_FIELDS, "stop_sequences")

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Stops | None = None


# ── as a chat request ───────────────────────────────────────────────────────────────────────────


def as_chat(request: CountTokensRequest) -> ChatRequest:
    """Return the chat request without messages and tools, which `fill_chat` adds."""
    choice, config = request.tool_choice, request.output_config or OutputConfig()
    form = config.format or request.output_format
    prefilled = _is_prefilled(request.messages)
    chat = ChatRequest(
        messages=[],
        model=request.model,
        reasoning_effort=config.effort,
        add_generation_prompt=False if prefilled else None,
        continue_final_message=prefilled or None,
        **request.engine_fields(),
    )
    chat.chat_template_kwargs = request.chat_template_kwargs
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
        chat.chat_template_kwargs = variables | (request.chat_template_kwargs or {})
    if choice is not None:
        chat.tool_choice = _tool_choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if form is not None:
        chat.response_format = ResponseFormat(
            type="json_schema", json_schema=JsonSchema(schema=form.schema)
        )
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stream = request.stream
        chat.temperature, chat.top_p = request.temperature, request.top_p
        chat.top_k, chat.stop = request.top_k, request.stop_sequences
    return chat


def fill_chat(chat: ChatRequest, request: CountTokensRequest) -> None:
    """Add messages and tools. Called off the event loop, since a long conversation takes long."""
    found = chat.messages
    if text := _system_text(request.system or "", "system"):
        found.append({"role": "system", "content": text})
    reminders: list[str] = []  # system messages that follow an assistant message
    for n, message in enumerate(request.messages):
        where = f"messages[{n}]"
        if message.role != "system":
            found += _after(reminders, _chat_messages(message, where))
            reminders = []
        elif text := _system_text(message.content, f"{where}.content"):
            if found and found[-1]["role"] == "assistant":
                reminders.append(text)
            elif found:
                found[-1]["content"] = _joined(found[-1]["content"], text)
            else:
                found.append({"role": "system", "content": text})
    found += _after(reminders, [])
    if request.tools:
        chat.tools = [_chat_tool(tool, n) for n, tool in enumerate(request.tools)]


def _system_text(content: str | Sequence[Block], where: str) -> str:
    """Return the text of a system message without the billing line of Anthropic's programs. This
    line differs in each request, so with the line no prompt would be found in the prefix cache."""
    texts = [
        text.partition("\n")[2] if text.startswith(BILLING) else text
        for text in _texts(content, where)
    ]
    return "\n".join(text for text in texts if text)


def _after(reminders: Sequence[str], messages: list[Json]) -> list[Json]:
    """Return `messages`, which follow the system messages `reminders`. Few templates support system
    messages within a conversation, so the reminders become part of a user message or of a tool
    result."""
    if not reminders:
        return messages
    if not messages or messages[-1]["role"] == "assistant":
        return [{"role": "user", "content": _joined(*reminders)}, *messages]
    last = messages[-1]
    is_user = last["role"] == "user"
    texts = [*reminders, last["content"]] if is_user else [last["content"], *reminders]
    return [*messages[:-1], {**last, "content": _joined(*texts)}]


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _is_prefilled(messages: Sequence[MessageParam]) -> bool:
    """Return whether the last message is the beginning of the answer."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    last = content[-1] if content and isinstance(content, list) else content
    return bool(last.text if isinstance(last, TextBlock) else isinstance(last, str) and last)


def _tool_choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing; name a tool", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _chat_tool(tool: ToolParam, n: int) -> Tool:
    if tool.input_schema is None:
        raise ApiError(400, f"tools[{n}].input_schema: a JSON schema is needed", param="tools")
    function = FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _chat_messages(message: MessageParam, where: str) -> list[Json]:
    """Translate a message: return one chat message for each tool result, then one for the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    results: list[Json] = []
    for n, block in enumerate(message.content):
        place = f"{where}.content[{n}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            text = "\n".join(_texts(block.content or "", f"{place}.content"))
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _no_text(block, place)
    if calls and message.role != "assistant":
        raise ApiError(400, f"{where}: tool_use is allowed only in an assistant's message")
    if results and message.role != "user":
        raise ApiError(400, f"{where}: tool_result is allowed only in a user's message")
    if not texts and results:
        return results
    last: Json = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        last["reasoning_content"] = "\n".join(thoughts)
    if calls:
        last["tool_calls"] = calls
    return [*results, last]


def _texts(content: str | Sequence[Block], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for n, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _no_text(block, f"{where}[{n}]")
        texts.append(block.text)
    return texts


def _no_text(block: Any, where: str) -> ApiError:
    kind = type(block).__struct_config__.tag
    message = f"{where}: blocks of type {kind!r} are not supported; this server reads text only"
    return ApiError(400, message, param="messages")
