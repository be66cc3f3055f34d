"""The request types of OpenAI's routes and of twostroke's own routes.

A request type has OpenAI's fields and the fields of vLLM and llama.cpp that change an answer. The
tables of `foreign_fields.py` list further fields of these and other servers, which are translated,
ignored or refused. A field in neither place is unknown: the server ignores it and adds a warning to
the response, or refuses it (`--strict-fields`). A field with the value `null` is not set.
`SamplingParams` checks the ranges of sampling values.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.body_fields import (
    AccountFields,
    Body,
    EngineFields,
    Name,
    Stops,
    StopText,
    TokenIds,
)
from twostroke.serve.fields.foreign_fields import ForeignTable

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # has no effect


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionTool


class GenerateRequest(AccountFields, kw_only=True):
    """The fields of every route that generates text."""

    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *EngineFields.LARGE_ENGINE_FIELDS,
        "stop",
        "logit_bias",
        "logprob_token_ids",
    )

    model: Name | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: StopText | Stops | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Annotated[TokenIds, Meta(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None  # llama.cpp's: events with the progress of prefill
    return_token_gaps: bool | None = None  # the causes of each gap between tokens, in `timings`


class ConversationRequest(GenerateRequest, kw_only=True):
    """The fields of the routes that answer a conversation."""

    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *GenerateRequest.LARGE_FIELDS,
        "chat_template_kwargs",
    )

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None  # vLLM's: include reasoning in the answer; default true
    # llama.cpp's: "none" leaves the reasoning in the content.
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    thinking_token_budget: int | None = None  # vLLM's: max. reasoning tokens; -1: no limit


class PredictionPart(Body, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class PredictedContent(Body, kw_only=True):
    """OpenAI's predicted output."""

    type: Literal["content"] = "content"
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(ConversationRequest, kw_only=True):
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.CHAT
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.LARGE_FIELDS,
        "messages",
        "chat_template",
        "documents",
        "tools",
        "tool_choice",
        "response_format",
        "verbosity",
        "prediction",
    )

    messages: list[dict[str, Any]]
    # Begin the answer with the text of the last message, if the role of this message is the role of
    # the answer ("assistant").
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call is returned
    reasoning_effort: Name | None = None  # a variable of the chat template
    verbosity: Name | None = None  # has no effect
    prediction: PredictedContent | None = None  # the expected answer, for speculative decoding


# Fields that `BatchChatRequest` refuses.
UNSUPPORTED_IN_BATCH = ("stream", "tools", "prompt_logprobs", "return_progress")


class BatchChatRequest(ChatRequest, kw_only=True):
    """A request to vLLM's `/v1/chat/completions/batch`: several conversations, with one
    answer each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]


class CompletionRequest(GenerateRequest, kw_only=True):
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.COMPLETION
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *GenerateRequest.LARGE_FIELDS,
        "prompt",
        "response_format",
    )

    prompt: str | list[str | int | TokenIds]  # a text, token ids, or a list of either
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None  # begin the answer with the prompt
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None  # must equal n


class InvocationRequest(Body, kw_only=True, forbid_unknown_fields=False):
    """A request to SageMaker's `/invocations`: a chat request if it has `messages`, a completion
    request if it has `prompt`."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET

    @classmethod
    def type_of(cls, body: bytes | bytearray) -> type[Body]:
        found = msgspec.json.decode(body, type=cls)
        if found.messages is not UNSET:
            return ChatRequest
        if found.prompt is not UNSET:
            return CompletionRequest
        raise ApiError(400, "the request has neither messages nor prompt; send one of them")


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    type: str  # "function", "namespace" (a group of functions), or a tool that OpenAI runs
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None  # of a namespace

    @property
    def runs_on_client(self) -> bool:
        """Return whether the client runs the tool."""
        return self.type in ("function", "namespace")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Name | None = None  # a variable of the chat template
    summary: Name | None = None  # has no effect: reasoning is returned in full


class ResponsesRequest(ConversationRequest, kw_only=True):
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.RESPONSES
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.LARGE_FIELDS,
        "input",
        "instructions",
        "text",
        "include",
        "tools",
        "tool_choice",
    )

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    include: list[Name] | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # has no effect: it limits calls of OpenAI's built-in tools
    previous_response_id: Name | None = None
    background: bool | None = None
    # The answer repeats it, so it has OpenAI's limits.
    metadata: Metadata | None = None  # type: ignore[assignment]
    client_metadata: Raw = None  # type: ignore[assignment]  # of Codex; has no effect

    def __post_init__(self) -> None:
        # As in `AccountFields`, but `metadata` is kept.
        self.prompt_cache_options = self.moderation = None  # type: ignore[assignment]
        self.client_metadata = None  # type: ignore[assignment]


class TokenizeRequest(Body, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`)."""

    FOREIGN: ClassVar[ForeignTable] = foreign_fields.TOKENIZE

    model: Name | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None


TemplatedRequest = ChatRequest | TokenizeRequest  # requests with fields for the chat template


class DetokenizeRequest(Body, kw_only=True):
    tokens: TokenIds
    model: Name | None = None


class LearnRunRequest(Body, kw_only=True):
    """An experiment of `/learn`. "text" uses the fields from `text` to `top_p`; "predict" uses the
    last four fields; the other experiments have no settings."""

    experiment: Literal[
        "text", "predict", "calibration", "stall", "prefix", "full_cache", "batch", "context"
    ]
    text: Annotated[str, Meta(max_length=16384)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=64)] = 24
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    prompt_tokens: Annotated[int, Meta(ge=1, le=2048)] = 256
    output_tokens: Annotated[int, Meta(ge=2, le=128)] = 32
    streams: Annotated[int, Meta(ge=1, le=16)] = 1
    rounds: Annotated[int, Meta(ge=1, le=5)] = 1


class LearnPredictRequest(Body, kw_only=True):
    """A request for a prediction: the times of `streams` equal requests that arrive together at an
    idle engine."""

    prompt_tokens: Annotated[int, Meta(ge=1, le=2048)] = 256
    output_tokens: Annotated[int, Meta(ge=2, le=128)] = 32
    streams: Annotated[int, Meta(ge=1, le=16)] = 1


class LearnAttentionRequest(Body, kw_only=True):
    """A request for the attention of one head over a short prompt. `tokens`: token ids that the
    experiment "text" has returned."""

    tokens: Annotated[TokenIds, Meta(min_length=1, max_length=64)]
    layer: Annotated[int, Meta(ge=0)] = 0
    head: Annotated[int, Meta(ge=0)] = 0


class PoolsRequest(Body, kw_only=True):
    """The new number of engines in each pool; a pool that is not named does not change."""

    STRICT: ClassVar[bool] = True

    prefill_engines: int | None = msgspec.field(default=None, name="prefill")
    decode_engines: int | None = msgspec.field(default=None, name="decode")
    data_parallel_size: int | None = None  # engines that do both phases
    drain_timeout: float = 120.0  # seconds until requests of a leaving engine move to another one


class ErrorContent(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error in the JSON format of an API."""

    @classmethod
    def from_error(cls, error: ApiError) -> Self:
        raise NotImplementedError


class ErrorAnswer(ErrorBody):
    """An error in OpenAI's format."""

    error: ErrorContent

    @classmethod
    def from_error(cls, error: ApiError) -> Self:
        return cls(ErrorContent(**error.content()))
