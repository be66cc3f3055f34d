"""Ollama's requests (`/api/chat`, `/api/generate`) and their translation into OpenAI's chat
request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.body_fields import EngineFields, Name
from twostroke.serve.fields.foreign_fields import ForeignTable
from twostroke.serve.fields.llama_sampling import LlamaSampling
from twostroke.serve.fields.protocol import ChatRequest, JsonSchema, ResponseFormat, Tool
from twostroke.serve.fields.response_json import Json


class Options(LlamaSampling, kw_only=True):
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.OLLAMA_OPTIONS

    num_predict: int | None = None  # below 0: until the context is full


class OllamaRequest(EngineFields, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *EngineFields.LARGE_ENGINE_FIELDS,
        "format",
        "options",
        "think",
    )
    REQUIRES_JSON_CONTENT_TYPE: ClassVar[bool] = False

    model: Name | None = None
    stream: bool | None = None  # default true
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # No effect: the model stays loaded, and a prompt that is too long is refused, not truncated.
    keep_alive: Raw = None  # type: ignore[assignment]
    truncate: bool | None = None
    shift: bool | None = None

    def __post_init__(self) -> None:
        self.keep_alive = None  # type: ignore[assignment]  # it would keep the whole body in memory


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None  # refused


class OllamaChatRequest(OllamaRequest, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (*OllamaRequest.LARGE_FIELDS, "messages", "tools")

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *OllamaRequest.LARGE_FIELDS,
        "prompt",
        "system",
        "suffix",
    )
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.OLLAMA_GENERATE

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None  # fill in the middle
    raw: bool | None = None
    images: Any = None  # refused


# ── as a chat request ───────────────────────────────────────────────────────────────────────────


def as_chat(request: OllamaRequest, models: Sequence[str]) -> ChatRequest:
    """Return the chat request without messages and tools. `models`: names of the model."""
    chat = ChatRequest(
        messages=[],
        model=served_name(request.model, models),
        stream=request.stream is not False,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        response_format=_response_format(request.format),
        **request.engine_fields(),
    )
    if request.options is not None:
        for name, value in request.options.engine_fields().items():
            setattr(chat, name, value)
        request.options.apply_to(chat)
        num_predict = request.options.num_predict
        if num_predict is not None and num_predict >= 0:
            chat.max_tokens = num_predict
    if request.think is not None:
        thinks = bool(request.think)
        chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
        if isinstance(request.think, str):
            chat.reasoning_effort = request.think
    return chat


def served_name(model: str | None, models: Sequence[str]) -> str | None:
    """Return a model's name without ":latest", if only that name is served."""
    if model is None or model in models:
        return model
    plain = model.removesuffix(":latest")
    return plain if plain in models else model


def _response_format(form: str | Json | None) -> ResponseFormat | None:
    if not form:
        return None
    if isinstance(form, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form))
    if form != "json":
        raise ApiError(400, 'format must be "json" or a JSON schema', param="format")
    return ResponseFormat(type="json_object")


def chat_messages(messages: Sequence[OllamaMessage]) -> list[Json]:
    """Return chat messages. Ollama's tool calls may have no ids: such calls get an id, and the
    results belong to them in order."""
    found: list[Json] = []
    waiting: list[str] = []  # ids of calls that have no result yet
    num_calls = 0
    for n, message in enumerate(messages):
        refuse_images(message.images, f"messages[{n}].images")
        chat_message: Json = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            chat_message["reasoning_content"] = message.thinking
        if message.tool_calls:
            chat_message["tool_calls"] = calls = []
            waiting = []
            for call in message.tool_calls:
                num_calls += 1
                call_id = call.id or f"call{num_calls:05}"  # Mistral requires nine characters
                waiting.append(call_id)
                arguments = json.dumps(call.function.arguments)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
        if message.role == "tool":
            sent_id = message.tool_call_id
            chat_message["tool_call_id"] = sent_id or (waiting.pop(0) if waiting else "call00000")
            if message.tool_name:
                chat_message["name"] = message.tool_name
        found.append(chat_message)
    return found


def refuse_images(images: Any, where: str) -> None:
    if images:
        raise ApiError(400, f"{where}: images are not supported; this server reads text only")
