"""`App`: the ASGI application. It has the route table, dispatches requests, sends error responses,
and serves `/openapi.json` and `/docs`.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec

from twostroke.engine.api import EngineClient
from twostroke.serve.api.anthropic.messages import messages_routes
from twostroke.serve.api.llama_server.llama_server_routes import llama_server_routes
from twostroke.serve.api.ollama.ollama_routes import ollama_routes
from twostroke.serve.api.openai.batch_chat import BatchChatGeneration, InvocationsRoute
from twostroke.serve.api.openai.chat_completions import ChatGeneration
from twostroke.serve.api.openai.completions import CompletionGeneration
from twostroke.serve.api.responses.responses_routes import responses_routes
from twostroke.serve.dashboard.dash import DashRoutes
from twostroke.serve.error_responses import ApiError, ClientGone, as_api_error
from twostroke.serve.fields.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorAnswer,
    ErrorBody,
    TokenizeRequest,
)
from twostroke.serve.generation.generate import GenerateRoute
from twostroke.serve.generation.service import Service
from twostroke.serve.http.failure_log import FailureLog
from twostroke.serve.http.http_request import HttpRequest, Message, Receive, Send
from twostroke.serve.http.routing import ApiKeys, BrowserGuard, Cors, Route, RouteTable
from twostroke.serve.learn.learn_routes import learn_routes
from twostroke.serve.monitor.metrics import CLIENT_GONE
from twostroke.serve.pages.docs import docs_page, index_page
from twostroke.serve.pages.openapi import openapi
from twostroke.serve.pages.static import ROOT_SUMMARY, StaticPages, wants_page
from twostroke.serve.routes.dev_routes import DevRoutes
from twostroke.serve.routes.info_routes import InfoRoutes
from twostroke.serve.routes.pool_advice import advice_routes
from twostroke.serve.routes.pool_routes import pool_routes
from twostroke.serve.routes.profile_routes import profile_routes
from twostroke.serve.routes.record_routes import record_routes
from twostroke.serve.settings import ServeSettings

HTML = ((b"content-type", b"text/html; charset=utf-8"),)


class App:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.service = Service(client, settings)
        self._info = InfoRoutes(self.service)
        has_dash = settings.ui and settings.dash
        self._dash = DashRoutes(self.service) if has_dash else None
        linked = ["/dash"] if has_dash else []
        if not settings.api_keys:  # a browser that follows a link to /docs sends no key
            linked.append("/docs")
        self._pages = StaticPages(linked) if settings.ui else None
        self.routes = self._make_routes()
        self._router = RouteTable(self.routes)
        self.service.metrics.expect_routes(self._router)
        self._keys = ApiKeys(settings)
        self._guard = BrowserGuard(settings)
        self._failures = FailureLog()
        self._root, self._adds_request_id = settings.root_path, settings.enable_request_id_headers
        limits = (client.info, self.service.models, self.service.admission.max_choices)
        description = openapi(self.routes, settings, *limits)
        self._description = msgspec.json.encode(description)
        self._docs = docs_page(description)
        self._index = index_page(self.routes, self.service.models[0], self._root)

    def _make_routes(self) -> list[Route]:
        service, settings, info = self.service, self.service.settings, self._info
        chat = GenerateRoute(service, ChatGeneration)
        completions = GenerateRoute(service, CompletionGeneration)
        batch = GenerateRoute(service, BatchChatGeneration)
        invocations = InvocationsRoute(service)
        health = settings.open_health
        routes = [
            Route("POST", "/v1/chat/completions", chat, "Answer a conversation.", ChatRequest),
            Route("POST", "/v1/completions", completions, "Continue a text.", CompletionRequest),
            Route("POST", "/v1/chat/completions/batch", batch, "Several chats.", BatchChatRequest),
            Route("POST", "/invocations", invocations, "For SageMaker: a chat.", ChatRequest),
            *responses_routes(service),
            Route("POST", "/v1/embeddings", info.embeddings, "Always 501.", supported=False),
            Route("POST", "/tokenize", info.tokenize, "Text → token ids.", TokenizeRequest),
            Route("POST", "/detokenize", info.detokenize, "Ids → text.", DetokenizeRequest),
            Route("GET", "/v1/models", info.models, "The models of this server."),
            Route("GET", "/models", info.models, "The same as /v1/models."),
            Route("GET", "/v1/models/{model...}", info.model, "One model."),
            Route("GET", "/health", info.health, "200 if the server is healthy.", open=health),
            Route("GET", "/ping", info.health, "The same as /health.", open=health),
            Route("POST", "/ping", info.health, "For SageMaker: as /health.", open=health),
            Route("GET", "/v1/health", info.health, "The same as /health.", open=health),
            Route("GET", "/version", info.version, "The server's version."),
            Route("GET", "/metrics", info.metrics, "Prometheus.", open=settings.metrics_open),
            Route("GET", "/load", info.load, "The number of open requests."),
            Route("GET", "/openapi.json", self._describe, "This description as JSON."),
            Route("GET", "/docs", self._show_docs, "This description as a page."),
            Route("GET", "/", self._show_root, ROOT_SUMMARY, open=settings.ui),
            *record_routes(service),
            *profile_routes(service),
            *pool_routes(service),
            *advice_routes(service),
        ]
        routes += messages_routes(service)
        routes += ollama_routes(service)
        routes += llama_server_routes(service)
        if settings.enable_tokenizer_info_endpoint:
            text = "Special tokens and the chat template."
            routes.append(Route("GET", "/tokenizer_info", info.tokenizer_info, text))
        if settings.dev_mode:
            routes += DevRoutes(service).routes()
        if self._dash is not None:
            routes += self._dash.routes()
        if self._pages is not None:
            routes += [*self._pages.routes(), *learn_routes(service)]
        return routes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: this application supports only HTTP")
        http = HttpRequest(scope, receive, send, self.service.settings.write_timeout_s)
        path = "unknown"  # a label of the metrics; the client must not choose its value
        if self._root and f"{http.path}/".startswith(f"{self._root}/"):
            http.path = http.path.removeprefix(self._root) or "/"
        if self._adds_request_id:
            request_id = http.header(b"x-request-id") or uuid4().hex.encode()
            http.more_headers = ((b"x-request-id", request_id),)
        form: type[ErrorBody] = ErrorAnswer
        try:
            self._guard.check_host(http)
            route = self._router.find(http)
            if isinstance(route, ApiError):
                self._keys.check(http)  # a client without a key must not learn which routes exist
                raise route
            path, form = route.path, route.error
            if not route.open:
                self._keys.check(http)
            if route.acts:
                self._guard.check_page(http)
                self._keys.check_admin(http)
            await route.handler(http)
        except ClientGone:
            http.status = CLIENT_GONE
        except Exception as error:
            if http.status:
                raise  # the response has begun: uvicorn closes the connection
            failure = as_api_error(error)
            self._failures.add(http, path, failure)
            await http.respond_error(failure, msgspec.json.encode(form.from_error(failure)))
        finally:
            self.service.metrics.answered(path, http.status)
            if http.late_error is not None:
                self._failures.add(http, path, http.late_error)
            for warning in http.warnings:
                self._failures.warn(http, path, warning)

    async def close(self) -> None:
        """Release resources after the server has stopped."""
        self.service.prompts.close()
        self._info.close()
        if self.service.tracing is not None:
            await self.service.tracing.close()

    async def _describe(self, http: HttpRequest) -> None:
        await http.respond(200, self._description)

    async def _show_docs(self, http: HttpRequest) -> None:
        await http.respond(200, self._docs, HTML)

    async def _show_root(self, http: HttpRequest) -> None:
        """Send the chat page to a browser (no key needed), or the list of routes."""
        if self._pages is not None and wants_page(http):
            if not http.scope["path"].endswith("/"):  # the page has relative addresses
                location = self._root.rpartition("/")[2] + "/"
                await http.respond(308, b"", ((b"location", location.encode()),))
                return
            await self._pages.page(http)
            return
        self._keys.check(http)
        await http.respond(200, self._index, (*HTML, (b"vary", b"accept")))


def asgi(app: App) -> Any:
    """Return the application for uvicorn: with CORS headers if `cors_origins` are configured."""
    origins = app.service.settings.cors_origins
    if not origins:
        return app
    return Cors(app, origins)
