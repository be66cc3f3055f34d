"""A request's fields → `SamplingParams`, over what the model's makers recommend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twostroke.engine.api import EngineInfo
from twostroke.request import SamplingParams, StructuredOutputs
from twostroke.serve.errors import ApiError
from twostroke.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ResponseFormat,
)
from twostroke.serve.settings import ServeSettings

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context

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
)


def chat_params(
    request: ChatRequest,
    info: EngineInfo,
    settings: ServeSettings,
    forced: StructuredOutputs | None = None,
) -> SamplingParams:
    """`forced`: the grammar of a required tool call, which overrides the request's own."""
    _refuse_unsupported(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    max_tokens = request.max_completion_tokens
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    return _params(
        request,
        info,
        n=request.n,
        max_tokens=_capped(max_tokens, settings),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured=forced or _structured(request, request.response_format),
    )


def completion_params(
    request: CompletionRequest, info: EngineInfo, settings: ServeSettings
) -> SamplingParams:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of must equal n; nothing is ranked here", param="best_of")
    if request.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", param="suffix")
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1  # a step has to write one; `completions.py` leaves it out
    params = _params(
        request,
        info,
        n=request.n,
        max_tokens=_capped(max_tokens, settings),
        logprobs=request.logprobs,
        structured=_structured(request, request.response_format),
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
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None
    }
    if structured is not None:
        given["structured_outputs"] = structured
    kind = "delta" if request.stream else "final_only"
    return replace(
        info.sampling,
        n=n or 1 if n != 0 else 0,
        max_tokens=max_tokens,
        logprobs=logprobs,
        output_kind=kind,
        **given,
    )


def _capped(max_tokens: int | None, settings: ServeSettings) -> int | None:
    cap = settings.max_output_tokens
    if cap is None or (max_tokens is not None and max_tokens <= cap):
        return max_tokens
    return cap


def _refuse_unsupported(request: ChatRequest) -> None:
    instead = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server writes text only",
        "prediction": "leave it out",
        "web_search_options": "leave it out",
    }
    for name, advice in instead.items():
        if getattr(request, name) is not None:
            raise ApiError(400, f"{name} is not supported; {advice}", param=name)
    if request.modalities not in (None, [], ["text"]):
        raise ApiError(400, 'modalities: only ["text"] is supported', param="modalities")


# ── structured output ───────────────────────────────────────────────────────────────────────


def _structured(request: GenerateRequest, form: ResponseFormat | None) -> StructuredOutputs | None:
    fields = request.structured_outputs
    if fields is not None:
        kinds = {
            name: value
            for name in fields.__struct_fields__
            if (value := getattr(fields, name)) is not None and value is not False
        }
        return StructuredOutputs(**kinds)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    schema = form.json_schema.schema if form.json_schema is not None else None
    if schema is None:
        where = "response_format.json_schema.schema"
        raise ApiError(400, f"{where}: a JSON schema is needed here", param=where)
    return StructuredOutputs(json=schema)
