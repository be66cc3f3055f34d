"""`App`: the ASGI application. Which routes there are, who may use them, and how a request that
goes wrong is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware

from twostroke.engine.api import EngineClient
from twostroke.serve.chat import Chat
from twostroke.serve.completions import Completions
from twostroke.serve.dash import Dash
from twostroke.serve.errors import ApiError, ClientGone, as_api_error
from twostroke.serve.exchange import Exchange, Message, Receive, Send
from twostroke.serve.openapi import openapi
from twostroke.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from twostroke.serve.responses import Responses
from twostroke.serve.security import Keys, check_head
from twostroke.serve.service import Service
from twostroke.serve.settings import ServeSettings
from twostroke.serve.telling import Telling

CLIENT_GONE = 499  # nginx's number for it; nobody sees it but the metrics


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[Exchange], Awaitable[None]]
    summary: str
    body: type[msgspec.Struct] | None = None
    open: bool = False  # answers without a key


class App:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.service = Service(client, settings)
        self._telling = Telling(self.service)
        self.routes = self._make_routes()
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            self._by_path.setdefault(route.path, {})[route.method] = route
        self.service.metrics.expect(self._by_path)
        self._keys = Keys(settings.api_keys)
        self._max_head_bytes = settings.max_header_bytes
        self._description = msgspec.json.encode(openapi(self.routes, bool(settings.api_keys)))

    def _make_routes(self) -> list[Route]:
        service, settings = self.service, self.service.settings
        tell = self._telling
        chat, completions, responses = Chat(service), Completions(service), Responses(service)
        health = settings.open_health
        routes = [
            Route("POST", "/v1/chat/completions", chat, "Answer a conversation.", ChatRequest),
            Route("POST", "/v1/completions", completions, "Go on a text.", CompletionRequest),
            Route("POST", "/v1/responses", responses, "Answer an input.", ResponsesRequest),
            Route("POST", "/v1/embeddings", tell.embeddings, "Not supported: always 501."),
            Route("POST", "/tokenize", tell.tokenize, "Text → token ids.", TokenizeRequest),
            Route("POST", "/detokenize", tell.detokenize, "Ids → text.", DetokenizeRequest),
            Route("GET", "/v1/models", tell.models, "The models that are served."),
            Route("GET", "/health", tell.health, "200 if requests are worked on.", open=health),
            Route("GET", "/ping", tell.health, "As /health.", open=health),
            Route("GET", "/version", tell.version, "The server's version."),
            Route("GET", "/metrics", tell.metrics, "Prometheus.", open=settings.metrics_open),
            Route("GET", "/openapi.json", self._describe, "This description."),
        ]
        if settings.dash:
            dash = Dash(service)
            routes += [
                Route("GET", "/dash", dash.page, "A page that shows the engine live.", open=True),
                Route("GET", "/dash/feed", dash.feed, "What the page shows, as JSON."),
            ]
        return routes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: only HTTP is spoken here")
        exchange = Exchange(scope, receive, send, self.service.settings.write_timeout_s)
        path = "unknown"  # a label of the metrics, so not the client's to choose
        try:
            check_head(exchange, self._max_head_bytes)
            route = self._find(exchange)
            if isinstance(route, ApiError):
                self._keys.check(exchange)  # without a key one does not learn what there is
                raise route
            path = route.path
            if not route.open:
                self._keys.check(exchange)
            await route.handler(exchange)
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception as error:
            if exchange.status:
                raise  # half an answer is out: the connection is closed
            await exchange.refuse(as_api_error(error))
        finally:
            self.service.metrics.answered(path, exchange.status)

    def _find(self, exchange: Exchange) -> Route | ApiError:
        methods = self._by_path.get(exchange.path)
        if methods is None:
            return ApiError(404, f"there is no {exchange.path[:200]!r} here", code="not_found")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in methods:
            allow = ((b"allow", ", ".join(methods).encode()),)
            return ApiError(405, f"{exchange.path} takes {' and '.join(methods)}", headers=allow)
        return methods[method]

    async def close(self) -> None:
        """The server has ended."""
        self.service.prompts.close()
        self._telling.close()
        if self.service.tracing is not None:
            await self.service.tracing.close()

    async def _describe(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._description)


def asgi(app: App) -> Any:
    """The application as a server runs it: with CORS where pages of other sites may ask."""
    origins = app.service.settings.cors_origins
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )
