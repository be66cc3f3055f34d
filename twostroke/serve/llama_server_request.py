"""llama-server's own requests (`/completion`, `/infill`), and how they read as OpenAI's completion
request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from twostroke.errors import shown
from twostroke.serve.errors import ApiError
from twostroke.serve.llama_sampling import LlamaSampling
from twostroke.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Name,
    StructuredFields,
    TokenIds,
)

NEVER = -100.0  # the least `logit_bias`; llama.cpp writes false
# What each sampler does where it is not among `samplers`.
WITHOUT: dict[str, dict[str, float | int]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "penalties": {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
}


class LlamaRequest(LlamaSampling, kw_only=True):
    INPUT: ClassVar[tuple[str, ...]] = (
        "stop",
        "logit_bias",
        "grammar",
        "json_schema",
        "dry_sequence_breakers",
    )
    DECLARED: ClassVar[bool] = False
    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {
        **LlamaSampling.OFF,
        "dry_multiplier": (0.0,),
        "xtc_probability": (0.0,),
        "dynatemp_range": (0.0,),
        "top_n_sigma": (-1.0, 0.0),
        "adaptive_target": (-1.0,),
        "min_keep": (0,),
        "n_cache_reuse": (0,),
        "post_sampling_probs": (False,),
        "lora": ([],),
    }

    model: Name | None = None
    stream: bool | None = None
    n_predict: int | None = None  # -1: until the context is full; 0: only read the prompt
    n_cmpl: int | None = None
    n_probs: int | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[list[tuple[int | str, float | bool]], Meta(max_length=1024)]
        | Annotated[dict[str, float | bool], Meta(max_length=1024)]
        | None
    ) = None
    grammar: str | None = None  # GBNF
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[Name], Meta(max_length=64)] | None = None
    samplers: Annotated[list[Name], Meta(max_length=64)] | None = None  # the others are off
    # Refused unless they are switched off, see `OFF`:
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    dynatemp_range: float | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None
    min_keep: int | None = None
    n_cache_reuse: int | None = None
    post_sampling_probs: bool | None = None
    lora: list[Any] | None = None
    # Without effect: settings of what is off, slots (there are none), ends by indentation or time,
    # and timings, which come last.
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_threshold: float | None = None
    dynatemp_exponent: float | None = None
    adaptive_decay: float | None = None
    id_slot: int | None = None
    n_indent: int | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: int | None = None


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
        ignore_eos=request.ignore_eos,
        logit_bias=None if request.logit_bias is None else _logit_bias(request.logit_bias),
        return_progress=request.return_progress,
    )
    request.apply_to(fields)
    for sampler, values in WITHOUT.items():
        if request.samplers and sampler not in request.samplers:
            for name, value in values.items():
                setattr(fields, name, value)
    if request.grammar or request.json_schema is not None:
        fields.structured_outputs = StructuredFields(
            grammar=request.grammar or None, json=request.json_schema
        )
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
