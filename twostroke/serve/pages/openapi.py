"""The OpenAPI description of the server: routes, request types, and limits of fields.

The request types do not have all limits of their fields: ranges of numbers, token ids of the
vocabulary, names of models. `SamplingParams` and `InputProcessor` check these limits. This module
only describes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from twostroke import __version__
from twostroke.engine.api import EngineInfo
from twostroke.request import MAX_PRIORITY, MAX_SEED
from twostroke.serve.fields.body_fields import Body, with_nested_types
from twostroke.serve.fields.protocol import UNSUPPORTED_IN_BATCH
from twostroke.serve.http.routing import Route
from twostroke.serve.pages.static import TITLES
from twostroke.serve.settings import ServeSettings

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


def openapi(
    routes: Sequence[Route],
    settings: ServeSettings,
    info: EngineInfo,
    models: tuple[str, ...],
    max_n: int,
) -> Schema:
    """Return the content of `/openapi.json`."""
    description = _describe_routes(routes, settings)
    schemas = description["components"]["schemas"]
    bodies = {route.body for route in routes if route.body is not None}
    _add_foreign_fields(schemas, with_nested_types(bodies), settings.strict_fields)
    _add_limits(schemas, info, models, max_n)
    return description


def _add_foreign_fields(schemas: Schema, types: Iterable[type[Body]], strict: bool) -> None:
    """Add the fields of other servers to the schemas of the request types, and allow unknown fields
    unless the server refuses them (`strict`)."""
    for kind in types:
        if (schema := schemas.get(kind.__name__)) is None:
            continue
        properties = schema.setdefault("properties", {})
        for name, foreign in kind.FOREIGN.items():
            properties.setdefault(name, foreign.schema)
        if not (strict or kind.STRICT):
            schema.pop("additionalProperties", None)


def _add_limits(schemas: Schema, info: EngineInfo, models: tuple[str, ...], max_n: int) -> None:
    """Add the limits to the schemas of the request types."""
    limits = _limits(info, models, max_n)
    for name in REQUESTS:
        for field, schema in schemas.get(name, {}).get("properties", {}).items():
            for part in schema.get("anyOf", (schema,)):
                for kind, limit in limits.get(field, {}).items():
                    if part.get("type") == kind:
                        part.update(limit)
    batch = schemas.get("BatchChatRequest", {}).get("properties", {})
    conversation = {"type": "array", "items": MESSAGE, "minItems": 1}
    batch["messages"] = {
        "type": "array",
        "items": conversation,
        "maxItems": max_n,
        "minItems": 1,
    }
    batch["n"] = {"enum": [None, 1]}
    batch |= {name: {"type": "null"} for name in UNSUPPORTED_IN_BATCH}


def _limits(info: EngineInfo, models: tuple[str, ...], max_n: int) -> dict[str, Schema]:
    """Return the limits by field name and by the JSON type of the value."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": info.vocab_size - 1}
    max_logprobs = info.vocab_size if info.max_logprobs < 0 else info.max_logprobs
    logprobs = {
        "integer": {
            "minimum": -1 if max_logprobs >= info.vocab_size else 0,
            "maximum": max_logprobs,
        }
    }
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
        "n": {"integer": {"minimum": 1, "maximum": max_n}},
        "best_of": {"integer": {"minimum": 1, "maximum": max_n}},
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "min_tokens": {"integer": {"minimum": 0, "maximum": info.max_model_len}},
        "logprobs": logprobs,
        "top_logprobs": logprobs,
        "prompt_logprobs": logprobs,
        "logprob_token_ids": {"array": {"items": token, "maxItems": max_logprobs}},
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


def _number(minimum: float, maximum: float) -> Schema:
    return {"number": {"minimum": minimum, "maximum": maximum}}


_REF = "#/components/schemas/{name}"


def _describe_routes(routes: Sequence[Route], settings: ServeSettings) -> Schema:
    routes = [route for route in routes if route.supported]
    named = {kind: None for route in routes for kind in (route.error, route.body) if kind}
    types = list(named)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace("...}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if settings.root_path:
        described["servers"] = [{"url": settings.root_path}]
    if settings.api_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schema_of[route.error]}}
    named = "".join(char if char.isalnum() else "_" for char in route.path)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{named}",
        "responses": {
            "200": {"description": "The response.", "content": _answer(route)},
            "4XX": {"description": "The request is refused.", "content": error},
            "5XX": {"description": "The server cannot process the request.", "content": error},
        },
    }
    if params := [word.strip("{.}") for word in route.path.split("/") if word.startswith("{")]:
        text = {"type": "string"}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in params
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.open:
        operation["security"] = []
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    if route.path in TITLES:
        return {"text/html": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.body is not None and "stream" in route.body.__struct_fields__:
        content[route.stream_type] = {"schema": {"type": "string"}}
    return content
