"""Anthropic's request (`POST /v1/messages`), and how it reads as OpenAI's chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import Table
from twostroke.serve.fields.protocol import (
    ChatRequest,
    EngineFields,
    FunctionTool,
    JsonSchema,
    Name,
    ResponseFormat,
    Stops,
    Tool,
)
from twostroke.serve.fields.response_fields import Json

BILLING = "x-anthropic-billing-header:"

# ── blocks: what they have besides these fields (cache_control, citations …) has no effect ──────


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Which no model here has written, nor can read."""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(msgspec.Struct, tag="image"):
    """Refused by name."""


class DocumentBlock(msgspec.Struct, tag="document"):
    """Refused by name."""


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
    type: str | None = None  # another than "custom": a tool that Anthropic's server runs or knows
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_clients(self) -> bool:
        """Whether the client runs the tool and has described it."""
        return self.type in (None, "custom")


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None  # a variable of the chat template
    format: OutputFormat | None = None


class CountTokensRequest(EngineFields, kw_only=True):
    """What a prompt is made of."""

    FOREIGN: ClassVar[Table] = foreign_fields.MESSAGES
    INPUT: ClassVar[tuple[str, ...]] = (
        *EngineFields.ENGINE_INPUT,
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
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    # Without effect here: billing, regions, and what is cached anyway.
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
        for name in self.IGNORED:  # each would keep the whole body
            setattr(self, name, None)


class MessagesRequest(CountTokensRequest, kw_only=True):
    INPUT: ClassVar[tuple[str, ...]] = (*CountTokensRequest.INPUT, "stop_sequences")

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Stops | None = None


# ── as a chat request ───────────────────────────────────────────────────────────────────────────


def as_chat(request: CountTokensRequest) -> ChatRequest:
    """Without messages and tools, which `fill_chat` adds: they may be many."""
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
    """Takes long for long conversations: off the event loop."""
    found = chat.messages
    if said := _system_text(request.system or "", "system"):
        found.append({"role": "system", "content": said})
    reminders: list[str] = []  # of the system, after what the assistant said
    for n, message in enumerate(request.messages):
        where = f"messages[{n}]"
        if message.role != "system":
            found += _after(reminders, _chat_messages(message, where))
            reminders = []
        elif said := _system_text(message.content, f"{where}.content"):
            if found and found[-1]["role"] == "assistant":
                reminders.append(said)
            elif found:
                found[-1]["content"] = _joined(found[-1]["content"], said)
            else:
                found.append({"role": "system", "content": said})
    found += _after(reminders, [])
    if request.tools:
        chat.tools = [_chat_tool(tool, n) for n, tool in enumerate(request.tools)]


def _system_text(content: str | Sequence[Block], where: str) -> str:
    """Without the line by which Anthropic bills its own programs: it is another one in each
    request, so that no prompt would be found in the prefix cache."""
    texts = [
        text.partition("\n")[2] if text.startswith(BILLING) else text
        for text in _texts(content, where)
    ]
    return "\n".join(text for text in texts if text)


def _after(reminders: Sequence[str], messages: list[Json]) -> list[Json]:
    """Messages with what the system said before them. Few templates take a system message in the
    middle of a conversation: it becomes a part of the user's next one, or of a tool's result."""
    if not reminders:
        return messages
    if not messages or messages[-1]["role"] == "assistant":
        return [{"role": "user", "content": _joined(*reminders)}, *messages]
    last = messages[-1]
    first_said = last["role"] == "user"
    texts = [*reminders, last["content"]] if first_said else [last["content"], *reminders]
    return [*messages[:-1], {**last, "content": _joined(*texts)}]


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _is_prefilled(messages: Sequence[MessageParam]) -> bool:
    """Whether the last message is the beginning of the answer, to be gone on with."""
    if not messages or messages[-1].role != "assistant":
        return False
    content = messages[-1].content
    last = content[-1] if content and isinstance(content, list) else content
    return bool(last.text if isinstance(last, TextBlock) else isinstance(last, str) and last)


def _tool_choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: the tool's name is needed", param="tool_choice")
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
    """One message; with results of tools one for each of them, before what else was said."""
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
            said = "\n".join(_texts(block.content or "", f"{place}.content"))
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _no_text(block, place)
    if calls and message.role != "assistant":
        raise ApiError(400, f"{where}: tool_use belongs into an assistant's message")
    if results and message.role != "user":
        raise ApiError(400, f"{where}: tool_result belongs into a user's message")
    if not texts and results:
        return results
    said_last: Json = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        said_last["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said_last["tool_calls"] = calls
    return [*results, said_last]


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
