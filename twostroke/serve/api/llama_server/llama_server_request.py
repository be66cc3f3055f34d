"""llama-server's requests (`/completion`, `/infill`) and their translation into OpenAI's completion
request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from twostroke.errors import shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.body_fields import EngineFields, Name, TokenIds
from twostroke.serve.fields.foreign_fields import SAMPLER_OFF, ForeignTable
from twostroke.serve.fields.llama_sampling import LlamaSampling
from twostroke.serve.fields.protocol import ChatRequest, CompletionRequest

NEVER = -100.0  # the lowest `logit_bias`, for llama.cpp's `false`: the token is never sampled


class LlamaRequest(LlamaSampling, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *EngineFields.LARGE_ENGINE_FIELDS,
        "stop",
        "logit_bias",
    )
    REQUIRES_JSON_CONTENT_TYPE: ClassVar[bool] = False
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.LLAMA_COMPLETION

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
    # Samplers that are not in this list are off.
    samplers: Annotated[list[Name], Meta(max_length=64)] | None = None


class LlamaCompletionRequest(LlamaRequest, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (*LlamaRequest.LARGE_FIELDS, "prompt")

    prompt: str | list[str | int | TokenIds]


class ApplyTemplateRequest(ChatRequest, kw_only=True):
    REQUIRES_JSON_CONTENT_TYPE: ClassVar[bool] = False


class ExtraFile(msgspec.Struct):
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaRequest, kw_only=True):
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = (
        *LlamaRequest.LARGE_FIELDS,
        "input_prefix",
        "input_suffix",
        "input_extra",
        "prompt",
    )

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None  # other files for context
    prompt: str | None = None  # the beginning of the text to write


def as_completion(request: LlamaRequest, max_model_len: int) -> CompletionRequest:
    """Return the completion request without the prompt."""
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
    for sampler, values in SAMPLER_OFF.items():
        if request.samplers and sampler not in request.samplers:
            for name, value in values.items():
                setattr(fields, name, value)
    return fields


def _logit_bias(biases: Any) -> dict[str, float]:
    """Convert (token id, bias) pairs, or an object. Refuse tokens that are given as text."""
    found = {}
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        if isinstance(token, str) and not token.isdecimal():
            raise ApiError(
                400,
                f"logit_bias: tokens must be ids, not {shown(token)}; /tokenize returns the ids",
                param="logit_bias",
            )
        found[str(token)] = NEVER if bias is False else float(bias)
    return found
