"""Converts the fields of a request into `SamplingParams`, with the model's recommended defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twostroke.engine.api import EngineInfo
from twostroke.request import SamplingParams, StructuredOutputs
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.body_fields import StructuredFields
from twostroke.serve.fields.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ResponseFormat,
)
from twostroke.serve.settings import ServeSettings

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens for /v1/completions; a chat has no default

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "logprob_token_ids",
)


def chat_params(
    request: ChatRequest,
    info: EngineInfo,
    settings: ServeSettings,
    forced: StructuredOutputs | None = None,
) -> SamplingParams:
    """`forced`: the grammar of a required tool call, which overrides the request's grammar."""
    _check_stream_options(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = request.max_completion_tokens
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(
        request,
        info,
        n=request.n,
        max_tokens=_capped(max_tokens, settings),
        logprobs=_count_logprobs(request, num_logprobs),
        structured=_structured(request, settings, request.response_format, forced),
    )


def completion_params(
    request: CompletionRequest, info: EngineInfo, settings: ServeSettings
) -> SamplingParams:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of must equal n: completions are not ranked", param="best_of")
    _check_stream_options(request)
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1  # a step writes at least one token; `completions.py` drops it
    params = _params(
        request,
        info,
        n=request.n,
        max_tokens=_capped(max_tokens, settings),
        logprobs=_count_logprobs(request, request.logprobs),
        structured=_structured(request, settings, request.response_format),
    )
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=request.logprobs)
    return params


def _params(
    request: GenerateRequest,
    info: EngineInfo,
    *,
    n: int | None,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    sampling: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None
    }
    if structured is not None:
        sampling["structured_outputs"] = structured
    output_kind = "delta" if request.stream else "final_only"
    return replace(
        info.sampling,
        n=1 if n is None else n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        output_kind=output_kind,
        **sampling,
    )


def _count_logprobs(request: GenerateRequest, requested: int | None) -> int | None:
    """Return the number of top log-probabilities: 0 if `logprob_token_ids` selects the tokens."""
    if not request.logprob_token_ids:
        return requested
    if requested is None:
        raise ApiError(400, "logprob_token_ids needs logprobs", param="logprob_token_ids")
    return 0


def _check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def _capped(max_tokens: int | None, settings: ServeSettings) -> int | None:
    cap = settings.max_output_tokens
    if cap is None or (max_tokens is not None and max_tokens <= cap):
        return max_tokens
    return cap


# ── structured output ───────────────────────────────────────────────────────────────────────


def _structured(
    request: GenerateRequest,
    settings: ServeSettings,
    form: ResponseFormat | None,
    forced: StructuredOutputs | None = None,
) -> StructuredOutputs | None:
    """Return the grammar: `forced`, or `structured_outputs`, or `response_format`, in this
    order."""
    fields = request.structured_outputs or StructuredFields()
    requested = fields.disable_additional_properties
    closed = settings.disable_additional_properties if requested is None else requested
    if forced is not None:
        return replace(forced, disable_additional_properties=closed)
    kinds = {
        name: value
        for name in ("json", "regex", "choice", "grammar", "json_object")
        if (value := getattr(fields, name)) is not None and value is not False
    }
    if not kinds and form is not None and form.type == "json_object":
        kinds["json_object"] = True
    elif not kinds and form is not None and form.type == "json_schema":
        kinds["json"] = _schema(form)
    if not kinds and (request.structured_outputs is None or requested is not None):
        return None
    return StructuredOutputs(**kinds, disable_additional_properties=closed)


def _schema(form: ResponseFormat) -> dict[str, Any]:
    schema = None if form.json_schema is None else form.json_schema.schema
    if schema is None:
        where = "response_format.json_schema.schema"
        raise ApiError(400, f"{where}: a JSON schema is needed here", param=where)
    return schema
