"""`/openapi.json`, made from the route table and the request types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke import __version__
from twostroke.serve.protocol import ErrorAnswer

if TYPE_CHECKING:
    from twostroke.serve.app import Route

_REF = "#/components/schemas/{name}"


def openapi(routes: Iterable[Route], with_key: bool) -> dict[str, Any]:
    routes = list(routes)
    types = [ErrorAnswer, *(route.body for route in routes if route.body is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_key:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": schema_of[ErrorAnswer]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_').replace('.', '_')}",
        "responses": {
            "200": {"description": "The answer.", "content": _answer(route)},
            "4XX": {"description": "What is wrong with the request.", "content": error},
            "5XX": {"description": "Why it cannot be answered now.", "content": error},
        },
    }
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.open:
        operation["security"] = []
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    if route.path == "/dash":
        return {"text/html": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.body is not None and "stream" in route.body.__struct_fields__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content
