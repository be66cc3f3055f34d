"""The limits of fields that a type does not say, as `/openapi.json` has them: ranges of numbers,
ids of the model's vocabulary, the names that are served. They are checked elsewhere
(`SamplingParams`, `InputProcessor`), with messages that say more than a schema could."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twostroke.engine.api import EngineInfo
from twostroke.request import MAX_PRIORITY, MAX_SEED
from twostroke.serve.fields.protocol import NOT_IN_A_BATCH, Body

Schema = dict[str, Any]
REQUESTS = (
    "ChatRequest",
    "BatchChatRequest",
    "CompletionRequest",
    "ResponsesRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
)
MAX_INT = 2**31 - 1
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}},
}


def add_foreign_fields(schemas: Schema, types: Iterable[type[Body]], strict: bool) -> None:
    """Add the fields of other servers to the schemas of the requests' types, and allow unknown
    fields unless they are refused (`strict`)."""
    for kind in types:
        if (schema := schemas.get(kind.__name__)) is None:
            continue
        properties = schema.setdefault("properties", {})
        for name, foreign in kind.FOREIGN.items():
            properties.setdefault(name, foreign.schema)
        if not (strict or kind.STRICT):
            schema.pop("additionalProperties", None)


def add_limits(schemas: Schema, info: EngineInfo, models: tuple[str, ...], most_n: int) -> None:
    """Change the requests' schemas in place."""
    limits = _limits(info, models, most_n)
    for name in REQUESTS:
        for field, schema in schemas.get(name, {}).get("properties", {}).items():
            for part in schema.get("anyOf", (schema,)):
                for kind, limit in limits.get(field, {}).items():
                    if part.get("type") == kind:
                        part.update(limit)
    batch = schemas.get("BatchChatRequest", {}).get("properties", {})
    conversation = {"type": "array", "items": MESSAGE, "minItems": 1}
    batch["messages"] = {"type": "array", "items": conversation, "maxItems": most_n, "minItems": 1}
    batch["n"] = {"enum": [None, 1]}
    batch |= {name: {"type": "null"} for name in NOT_IN_A_BATCH}


def _limits(info: EngineInfo, models: tuple[str, ...], most_n: int) -> dict[str, Schema]:
    """By field and by the type that its value has."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": info.vocab_size - 1}
    told = info.vocab_size if info.max_logprobs < 0 else info.max_logprobs
    logprobs = {"integer": {"minimum": -1 if told >= info.vocab_size else 0, "maximum": told}}
    text = {"type": "string", "minLength": 1}
    tokens = {"integer": {"minimum": 1, "maximum": MAX_INT}}
    return {
        "model": {"string": {"enum": list(models)}},
        "temperature": _number(0, 10_000),
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "top_k": {"integer": {"minimum": -1, "maximum": MAX_INT}},
        "min_p": _number(0, 1),
        "repetition_penalty": _number(1e-6, 1e6),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "seed": {"integer": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED}},
        "n": {"integer": {"minimum": 1, "maximum": most_n}},
        "best_of": {"integer": {"minimum": 1, "maximum": most_n}},
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "min_tokens": {"integer": {"minimum": 0, "maximum": info.max_model_len}},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "logprob_token_ids": {"array": {"items": token, "maxItems": told}},
        "priority": {"integer": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}},
        "truncate_prompt_tokens": {"integer": {"minimum": -1, "maximum": info.max_model_len - 1}},
        "stop": {
            "string": {"minLength": 1},
            "array": {"items": {**text, "maxLength": 4096}},
        },
        "bad_words": {"array": {"items": {**text, "maxLength": 256}}},
        "stop_token_ids": {"array": {"items": token}},
        "allowed_token_ids": {"array": {"items": token, "minItems": 1}},
        "tokens": {"array": {"items": token, "maxItems": info.max_model_len}},
        "logit_bias": {
            "object": {
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        },
        "messages": {"array": {"items": MESSAGE, "minItems": 1}},
    }


def _number(least: float, most: float) -> Schema:
    return {"number": {"minimum": least, "maximum": most}}
