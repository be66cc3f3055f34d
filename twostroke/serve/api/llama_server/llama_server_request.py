"""llama-server's own requests (`/completion`, `/infill`), and how they read as OpenAI's completion
request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from twostroke.errors import shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import WITHOUT, Table
from twostroke.serve.fields.llama_sampling import LlamaSampling
from twostroke.serve.fields.protocol import (
    ChatRequest,
    CompletionRequest,
    EngineFields,
    Name,
    TokenIds,
)

NEVER = -100.0  # the least `logit_bias`; llama.cpp writes false


class LlamaRequest(LlamaSampling, kw_only=True):
    INPUT: ClassVar[tuple[str, ...]] = (
        *EngineFields.ENGINE_INPUT,
        "stop",
        "logit_bias",
    )
    DECLARED: ClassVar[bool] = False
    FOREIGN: ClassVar[Table] = foreign_fields.LLAMA_COMPLETION

    model: Name | None = None
    stream: bool | None = None
    n_predict: int | None = None  # -1: until the context is full; 0: only read the prompt
    n_cmpl: int | None = None
    n_probs: int | None = None
    logit_bias: (
        Annotated[list[tuple[int | str, float | bool]], Meta(max_length=1024)]
        | Annotated[dict[str, float | bool], Meta(max_length=1024)]
        | None
    ) = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[Name], Meta(max_length=64)] | None = None
    samplers: Annotated[list[Name], Meta(max_length=64)] | None = None  # the others are off


class LlamaCompletionRequest(LlamaRequest, kw_only=True):
    INPUT: ClassVar[tuple[str, ...]] = (*LlamaRequest.INPUT, "prompt")

    prompt: str | list[str | int | TokenIds]


class ApplyTemplateRequest(ChatRequest, kw_only=True):
    DECLARED: ClassVar[bool] = False


class ExtraFile(msgspec.Struct):
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaRequest, kw_only=True):
    INPUT: ClassVar[tuple[str, ...]] = (
        *LlamaRequest.INPUT,
        "input_prefix",
        "input_suffix",
        "input_extra",
        "prompt",
    )

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None  # files to be known beside this one
    prompt: str | None = None  # the beginning of what is to be written


def as_completion(request: LlamaRequest, max_model_len: int) -> CompletionRequest:
    """Without the prompt."""
    max_tokens = -1 if request.n_predict is None else request.n_predict
    fields = CompletionRequest(
        prompt="",
        model=request.model or None,
        stream=request.stream,
        n=request.n_cmpl,
        max_tokens=max_model_len if max_tokens < 0 else max(max_tokens, 1),
        logprobs=request.n_probs if (request.n_probs or 0) > 0 else None,
        logit_bias=None if request.logit_bias is None else _logit_bias(request.logit_bias),
        return_progress=request.return_progress,
        **request.engine_fields(),
    )
    request.apply_to(fields)
    for sampler, values in WITHOUT.items():
        if request.samplers and sampler not in request.samplers:
            for name, value in values.items():
                setattr(fields, name, value)
    return fields


def _logit_bias(given: Any) -> dict[str, float]:
    """As pairs or by token; only by token ids."""
    found = {}
    for token, bias in given.items() if isinstance(given, dict) else given:
        if isinstance(token, str) and not token.isdecimal():
            raise ApiError(
                400,
                f"logit_bias: tokens are given by their ids here, not as {shown(token)}; /tokenize "
                "has them",
                param="logit_bias",
            )
        found[str(token)] = NEVER if bias is False else float(bias)
    return found
