"""`POST /v1/messages` and `/v1/messages/count_tokens`: responses in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import msgspec

from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.anthropic.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    as_chat,
    fill_chat,
)
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import ChatRequest, ErrorBody
from twostroke.serve.fields.response_json import (
    Json,
    ResponseHead,
    TextEventTemplate,
    TokenCounts,
    count_tokens,
    event,
)
from twostroke.serve.generation.conversation import AssistantMessage, ConversationGeneration
from twostroke.serve.generation.generate import GenerateRoute
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from twostroke.serve.parsers.reasoning import Reasoning

PING = event({"type": "ping"}, "ping")


def messages_routes(service: Service) -> list[Route]:
    answer = GenerateRoute(service, MessagesGeneration)
    count = partial(_count_tokens, service)
    return [
        Route(
            "POST",
            "/v1/messages",
            answer,
            "Answer a conversation (Anthropic).",
            MessagesRequest,
            error=MessagesError,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            count,
            "Count the tokens of a conversation (Anthropic).",
            CountTokensRequest,
            error=MessagesError,
        ),
    ]


async def _count_tokens(service: Service, http: HttpRequest) -> None:
    async with service.read(http, CountTokensRequest) as (request, num_bytes):
        service.check_model(request.model)
        conversation = MessagesGeneration(service, request)
        for warning in conversation.warnings:
            http.warn(warning)
        count = await service.prompts.off_loop(request, num_bytes, conversation.count_tokens)
    await http.respond_json({"input_tokens": count})


# ── errors ──────────────────────────────────────────────────────────────────────────────────────

_ERROR_TYPES = {
    413: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}


class MessagesErrorContent(msgspec.Struct, omit_defaults=True):
    type: str
    message: str
    details: dict[str, str] | None = None  # `error_code`, if there is one


class MessagesError(ErrorBody):
    type: Literal["error"]
    error: MessagesErrorContent

    @classmethod
    def from_error(cls, error: ApiError) -> Self:
        error_type = _ERROR_TYPES.get(error.status, error.error_type)
        details = None if error.code is None else {"error_code": error.code}
        return cls("error", MessagesErrorContent(error_type, error.content()["message"], details))


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


class MessagesGeneration(ConversationGeneration[CountTokensRequest]):
    request_type = MessagesRequest
    id_prefix = "msg"

    def as_chat(self) -> ChatRequest:
        tools = self.request.tools or []
        self.drop_server_tools(
            [tool.type for tool in tools if tool.type and not tool.runs_on_client]
        )
        self.request.tools = [tool for tool in tools if tool.runs_on_client]
        return as_chat(self.request)

    def prepare(self) -> list[EngineRequest]:
        fill_chat(self.chat, self.request)
        return super().prepare()

    def count_tokens(self) -> int:
        fill_chat(self.chat, self.request)
        return len(self.render())

    def _requested_reasoning(self, prompt: Sequence[int]) -> Reasoning | None:
        """Return the reasoning to parse. If there is any, apply the request's token budget."""
        reasoning, thinking = super()._requested_reasoning(prompt), self.request.thinking
        if reasoning is not None and thinking is not None:
            self.chat.thinking_token_budget = thinking.budget_tokens
        return reasoning

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        super().begin(head, requests)
        self._max_tokens = requests[0].params.max_tokens

    def stream_writer(self) -> MessagesStreamWriter:
        return MessagesStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        completion = outputs[0].outputs[0]
        message = self.new_message()
        content = blocks(message.push(completion.text) + message.flush())
        counts = count_tokens(outputs)
        counts.add_reasoning(self.reasoning_tokens(completion.token_ids))
        end = self.end(completion, message, counts.completion)
        return self.message(content, usage(counts), **end)

    def message(self, content: list[Json], usage: Json, **end: Any) -> Json:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **end,
            "usage": usage,
        }

    def end(self, completion: CompletionOutput, message: AssistantMessage, num_tokens: int) -> Json:
        reason, sequence = "end_turn", None
        if completion.finish_reason == "length":
            # If the answer has fewer tokens than `max_tokens`, the context is full.
            is_full = self._max_tokens is None or num_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif message.calls:
            reason = "tool_use"
        elif isinstance(completion.stop_reason, str):
            reason, sequence = "stop_sequence", completion.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def usage(counts: TokenCounts) -> Json:
    usage: Json = {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
    }
    if counts.reasoning is not None:
        usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
    return usage


def blocks(deltas: Sequence[Delta]) -> list[Json]:
    """Return the content blocks of a message from all its deltas."""
    found: list[Json] = []
    arguments: dict[int, str] = {}  # of calls, by the index of the block
    for delta in deltas:
        if not _continues_block(delta, found[-1]["type"] if found else ""):
            found.append(_first_block(delta))
        last = found[-1]
        if isinstance(delta, ToolCallDelta):
            at = len(found) - 1
            arguments[at] = arguments.get(at, "") + delta.arguments
        else:
            last[last["type"]] += delta.text
    for at, text in arguments.items():
        found[at]["input"] = parsed_arguments(text)
    return [block for block in found if block.get("text") != ""]


def _continues_block(delta: Delta, kind: str) -> bool:
    """Return whether a delta belongs to the open block. `kind`: the type of this block."""
    if isinstance(delta, ToolCallDelta):
        return delta.id is None
    return kind == ("text" if isinstance(delta, ContentDelta) else "thinking")


def _first_block(delta: Delta) -> Json:
    if isinstance(delta, ContentDelta):
        return {"type": "text", "text": ""}
    if isinstance(delta, ReasoningDelta):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}


def parsed_arguments(text: str) -> Json:
    """Return the arguments of a call; {} if the text is not a complete JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


class MessagesStreamWriter:
    """Writes the events of a streamed answer. One content block is open at a time."""

    def __init__(self, generation: MessagesGeneration) -> None:
        self._generation = generation
        self._message = generation.new_message()
        self._begun = False
        self._index = -1  # of the open block, or of the last one
        self._kind = ""  # the type of the open block
        self._text_template: TextEventTemplate | None = None  # of the open text block
        self._num_tokens = 0
        self._last: RequestOutput | None = None

    def write(self, _: int, output: RequestOutput) -> bytes:
        events = [] if self._begun else [self._begin(output)]
        for completion in output.outputs:
            self._num_tokens += len(completion.token_ids)
            deltas = self._message.push(completion.text, completion.token_ids)
            if completion.finish_reason is not None:
                self._last = output
                deltas += self._message.flush()
            events += [self._delta(delta) for delta in deltas]
        return b"".join(events)

    def _begin(self, output: RequestOutput) -> bytes:
        self._begun = True
        counts = TokenCounts(len(output.prompt_token_ids), output.num_cached_tokens, 0)
        message = self._generation.message([], usage(counts))
        return event({"type": "message_start", "message": message}, "message_start") + PING

    def _delta(self, delta: Delta) -> bytes:
        if not isinstance(delta, ToolCallDelta) and not delta.text:
            return b""
        begin = b"" if _continues_block(delta, self._kind) else self._close() + self._open(delta)
        if isinstance(delta, ToolCallDelta):
            if not delta.arguments:
                return begin
            return begin + self._block_delta("input_json_delta", partial_json=delta.arguments)
        if isinstance(delta, ReasoningDelta):
            return begin + self._block_delta("thinking_delta", thinking=delta.text)
        if self._text_template is None:
            self._text_template = TextEventTemplate(
                lambda text: self._block_delta("text_delta", text=text)
            )
        return begin + self._text_template.encode(delta.text)

    def _open(self, delta: Delta) -> bytes:
        block = _first_block(delta)
        self._index += 1
        self._kind, self._text_template = block["type"], None
        return self._event("content_block_start", content_block=block)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return self._event("content_block_stop")

    def _block_delta(self, kind: str, **content: str) -> bytes:
        return self._event("content_block_delta", delta={"type": kind, **content})

    def _event(self, kind: str, **content: Any) -> bytes:
        return event({"type": kind, "index": self._index, **content}, kind)

    def end(self) -> bytes:
        last = self._last
        assert last is not None
        counts = count_tokens([last])
        counts.completion = self._num_tokens
        counts.add_reasoning(self._message.reasoning_tokens)
        end = self._generation.end(last.outputs[0], self._message, self._num_tokens)
        done = {"type": "message_delta", "delta": end, "usage": usage(counts)}
        return (
            self._close()
            + event(done, "message_delta")
            + event({"type": "message_stop"}, "message_stop")
        )

    def fail(self, error: ApiError) -> bytes:
        return event(MessagesError.from_error(error), "error")
