"""The requests the server reads: OpenAI's, with vLLM's and llama.cpp's additions.

Fields of other servers are in the tables of `foreign_fields.py`. A field that is in neither place
is unknown: it is left out, and the answer has a warning; `--strict-fields` refuses it. `null` means
the same as leaving a field out. Ranges of sampling values are checked where they are used
(`SamplingParams`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import Table

Name = Annotated[str, Meta(max_length=1024)]
StopText = Annotated[str, Meta(max_length=4096)]
Stops = Annotated[list[StopText], Meta(max_length=64)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
BadWord = Annotated[str, Meta(max_length=256)]
TokenIds = list[int]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    # Fields that are dropped once the prompt and `SamplingParams` are made of them.
    INPUT: ClassVar[tuple[str, ...]] = ()
    # Whether it has to be declared as JSON; clients of some APIs do not.
    DECLARED: ClassVar[bool] = True
    FOREIGN: ClassVar[Table] = {}  # fields of other servers
    # An unknown field is always refused: the request acts on the server, and is to be understood.
    STRICT: ClassVar[bool] = False

    @classmethod
    def kind_of(cls, body: bytes | bytearray) -> type[Body]:
        """The type that this body has."""
        return cls

    @classmethod
    def decode(cls, body: bytes | bytearray) -> Self:
        # Not strict, as vLLM: "0.7" is a number, "true" a boolean and 1.0 a whole number.
        return msgspec.json.decode(body, type=cls, strict=False)

    def drop_input(self) -> None:
        for name in self.INPUT:
            setattr(self, name, None)


class StructuredFields(Body, kw_only=True):
    """vLLM's `structured_outputs`: one of the first five, or none and what `response_format` or a
    forced tool call asks for."""

    FOREIGN: ClassVar[Table] = foreign_fields.STRUCTURED

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None  # of a schema's objects


class EngineFields(Body, kw_only=True):
    """vLLM's fields of sampling and scheduling, which the requests of all APIs may have."""

    ENGINE_INPUT: ClassVar[tuple[str, ...]] = (
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
    )

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # which end is cut off; left
    structured_outputs: StructuredFields | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Name | None = None

    def engine_fields(self) -> dict[str, Any]:
        """These fields, those that are given."""
        return {
            name: value
            for name in EngineFields.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class IgnoredFields(EngineFields, kw_only=True):
    """OpenAI's fields about accounts, storage and billing: read, and (but for one) without effect
    here."""

    user: Name | None = None
    store: bool | None = None
    metadata: Raw = None  # type: ignore[assignment]
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None  # with several engines: the session, see route/router.py
    prompt_cache_retention: Name | None = None
    prompt_cache_options: Raw = None  # type: ignore[assignment]
    moderation: Raw = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # Each would keep the whole body; nothing has been made of them.
        self.metadata = self.prompt_cache_options = self.moderation = None  # type: ignore[assignment]


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


class GenerateRequest(IgnoredFields, kw_only=True):
    """The fields of every route that generates text."""

    INPUT: ClassVar[tuple[str, ...]] = (
        *EngineFields.ENGINE_INPUT,
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
    return_progress: bool | None = None  # llama.cpp's: events with how much is prefilled
    return_token_gaps: bool | None = None  # the causes of each gap between tokens, in `timings`


class ConversationRequest(GenerateRequest, kw_only=True):
    """The fields of the routes that answer a conversation."""

    INPUT: ClassVar[tuple[str, ...]] = (*GenerateRequest.INPUT, "chat_template_kwargs")

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None  # vLLM's: whether it is in the answer; true if not given
    # llama.cpp's: "none" leaves the reasoning in the content.
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    thinking_token_budget: int | None = None  # vLLM's: tokens of reasoning at most; -1: no limit


class ChatRequest(ConversationRequest, kw_only=True):
    FOREIGN: ClassVar[Table] = foreign_fields.CHAT
    INPUT: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.INPUT,
        "messages",
        "chat_template",
        "documents",
        "tools",
        "tool_choice",
        "response_format",
        "verbosity",
    )

    messages: list[dict[str, Any]]
    echo: bool | None = None  # the answer begins with the last message, if its role is the same
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
    parallel_tool_calls: bool | None = None  # a model's calls are given as it writes them
    reasoning_effort: Name | None = None  # a variable of the chat template
    verbosity: Name | None = None  # has no effect


NOT_IN_A_BATCH = ("stream", "tools", "prompt_logprobs", "return_progress")


class BatchChatRequest(ChatRequest, kw_only=True):
    """vLLM's: several conversations, with one answer each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]


class CompletionRequest(GenerateRequest, kw_only=True):
    FOREIGN: ClassVar[Table] = foreign_fields.COMPLETION
    INPUT: ClassVar[tuple[str, ...]] = (*GenerateRequest.INPUT, "prompt", "response_format")

    prompt: str | list[str | int | TokenIds]  # a text, token ids, or a list of either
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None  # only as n


class InvocationRequest(Body, kw_only=True, forbid_unknown_fields=False):
    """SageMaker's: the request of another route, which is known by what it holds."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET

    @classmethod
    def kind_of(cls, body: bytes | bytearray) -> type[Body]:
        found = msgspec.json.decode(body, type=cls)
        if found.messages is not UNSET:
            return ChatRequest
        if found.prompt is not UNSET:
            return CompletionRequest
        raise ApiError(400, "neither messages nor a prompt is given; give one of them")


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
    type: str  # another than "function" and "namespace", a group of them: OpenAI's server runs it
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ResponsesTool] | None = None  # of a namespace

    @property
    def is_clients(self) -> bool:
        """Whether the client runs the tool."""
        return self.type in ("function", "namespace")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Name | None = None  # a variable of the chat template
    summary: Name | None = None  # has no effect, as all others: reasoning is given as it is


class ResponsesRequest(ConversationRequest, kw_only=True):
    FOREIGN: ClassVar[Table] = foreign_fields.RESPONSES
    INPUT: ClassVar[tuple[str, ...]] = (
        *ConversationRequest.INPUT,
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
    max_tool_calls: int | None = None  # has no effect: it counts calls of OpenAI's own tools
    previous_response_id: Name | None = None
    background: bool | None = None
    # Given back in the answer, so within OpenAI's limits.
    metadata: Metadata | None = None  # type: ignore[assignment]
    client_metadata: Raw = None  # type: ignore[assignment]  # Codex's; has no effect

    def __post_init__(self) -> None:
        self.prompt_cache_options = self.moderation = None  # type: ignore[assignment]
        self.client_metadata = None  # type: ignore[assignment]


class TokenizeRequest(Body, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`)."""

    FOREIGN: ClassVar[Table] = foreign_fields.TOKENIZE

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


TemplatedRequest = ChatRequest | TokenizeRequest  # with fields for the chat template


class DetokenizeRequest(Body, kw_only=True):
    tokens: TokenIds
    model: Name | None = None


class LearnRunRequest(Body, kw_only=True):
    """An experiment of `/learn`. `text` and the fields below it are those of "text"; the last four
    those of "predict"."""

    experiment: Literal[
        "text", "predict", "calibration", "stall", "prefix", "full_cache", "batch", "context"
    ]
    text: Annotated[str, Meta(max_length=4096)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=64)] = 24
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    prompt_tokens: Annotated[int, Meta(ge=1, le=2048)] = 256
    output_tokens: Annotated[int, Meta(ge=2, le=128)] = 32
    streams: Annotated[int, Meta(ge=1, le=16)] = 1
    rounds: Annotated[int, Meta(ge=1, le=5)] = 1


class LearnPredictRequest(Body, kw_only=True):
    """Requests that arrive together at an idle engine."""

    prompt_tokens: Annotated[int, Meta(ge=1, le=2048)] = 256
    output_tokens: Annotated[int, Meta(ge=2, le=128)] = 32
    streams: Annotated[int, Meta(ge=1, le=16)] = 1


class LearnAttentionRequest(Body, kw_only=True):
    """The attention of one head over a short prompt: token ids, as "text" returned them."""

    tokens: Annotated[TokenIds, Meta(min_length=1, max_length=64)]
    layer: Annotated[int, Meta(ge=0)] = 0
    head: Annotated[int, Meta(ge=0)] = 0


class PoolsRequest(Body, kw_only=True):
    """How many engines each pool is to have; one that is not named stays as it is."""

    STRICT: ClassVar[bool] = True

    prefill_engines: int | None = msgspec.field(default=None, name="prefill")
    decode_engines: int | None = msgspec.field(default=None, name="decode")
    data_parallel_size: int | None = None  # engines that do both phases
    drain_timeout: float = 120.0  # seconds; what has not ended in an engine by then is moved


class ErrorContent(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error as an API writes it."""

    @classmethod
    def of(cls, error: ApiError) -> Self:
        raise NotImplementedError


class ErrorAnswer(ErrorBody):
    """As OpenAI writes it."""

    error: ErrorContent

    @classmethod
    def of(cls, error: ApiError) -> Self:
        return cls(ErrorContent(**error.content()))
