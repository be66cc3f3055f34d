"""`App`: the ASGI application. Which routes there are and who may use them, how a request that
fails is answered, and `/openapi.json` and `/docs`, made from the route table and the request types.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Any
from uuid import uuid4

import msgspec
from starlette.middleware.cors import CORSMiddleware

from twostroke import __version__
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
from twostroke.serve.fields.body_fields import with_nested
from twostroke.serve.fields.field_limits import add_foreign_fields, add_limits
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
from twostroke.serve.http.browser_guard import BrowserGuard
from twostroke.serve.http.failure_log import FailureLog
from twostroke.serve.http.http_request import HttpRequest, Message, Receive, Send
from twostroke.serve.http.routing import Route, Router
from twostroke.serve.learn.learn_routes import learn_routes
from twostroke.serve.monitor.metrics import CLIENT_GONE
from twostroke.serve.pages.docs import docs_page, index_page
from twostroke.serve.pages.static import ROOT_SUMMARY, TITLES, StaticPages, wants_page
from twostroke.serve.routes.dev_routes import DevRoutes
from twostroke.serve.routes.info_routes import InfoRoutes
from twostroke.serve.routes.pool_routes import pool_routes
from twostroke.serve.routes.profile_routes import profile_routes
from twostroke.serve.routes.record_routes import record_routes
from twostroke.serve.settings import ServeSettings

HTML = ((b"content-type", b"text/html; charset=utf-8"),)
_REF = "#/components/schemas/{name}"


class ApiKeys:
    """API keys, compared in constant time: digests, all of them, every time.

    An admin key is an API key too. It has a number of its own, after those of the others."""

    def __init__(self, settings: ServeSettings) -> None:
        keys, admin_keys = settings.api_keys, settings.admin_api_keys
        self._digests = [sha256(key.encode()).digest() for key in (*keys, *admin_keys)]
        self._num_keys = len(keys)
        self._all_are_admins = not admin_keys and len(keys) < 2

    def check(self, http: HttpRequest) -> None:
        """Note which key it is (`http.key_number`), and whether it is an admin's."""
        given = sha256(_given_key(http)).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        http.key_number = matches.index(True) if any(matches) else None
        http.is_admin = self._all_are_admins or any(matches[self._num_keys :])
        if self._num_keys and http.key_number is None:
            raise ApiError(
                401,
                "a valid API key is needed, as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    def check_admin(self, http: HttpRequest) -> None:
        """Refuse a request that acts on the server with a key that may not."""
        if not http.is_admin:
            raise ApiError(
                403,
                "only an admin key may do this; send one, as 'Authorization: Bearer KEY' (the "
                "server is started with it: --admin-api-key KEY)",
                code="admin_key_needed",
            )


def _given_key(http: HttpRequest) -> bytes:
    scheme, _, key = (http.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return http.header(b"x-api-key") or b""


class App:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.service = Service(client, settings)
        self._info = InfoRoutes(self.service)
        has_dash = settings.ui and settings.dash
        self._dash = DashRoutes(self.service) if has_dash else None
        others = {"/dash": has_dash, "/docs": not settings.api_keys}  # a link cannot carry a key
        linked = [path for path, there in others.items() if there]
        self._pages = StaticPages(linked) if settings.ui else None
        self.routes = self._make_routes()
        self._router = Router(self.routes)
        self.service.metrics.expect_routes(self._router)
        self._keys = ApiKeys(settings)
        self._guard = BrowserGuard(settings)
        self._failures = FailureLog()
        self._root, self._name_requests = settings.root_path, settings.enable_request_id_headers
        description = _openapi(self.routes, bool(settings.api_keys), self._root)
        admission, models = self.service.admission, self.service.models
        schemas = description["components"]["schemas"]
        bodies = {route.body for route in self.routes if route.body is not None}
        add_foreign_fields(schemas, with_nested(bodies), settings.strict_fields)
        add_limits(schemas, client.info, models, admission.max_choices)
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
            Route("POST", "/v1/completions", completions, "Go on a text.", CompletionRequest),
            Route("POST", "/v1/chat/completions/batch", batch, "Several.", BatchChatRequest),
            Route("POST", "/invocations", invocations, "SageMaker's: either.", ChatRequest),
            *responses_routes(service),
            Route("POST", "/v1/embeddings", info.embeddings, "Always 501.", supported=False),
            Route("POST", "/tokenize", info.tokenize, "Text → token ids.", TokenizeRequest),
            Route("POST", "/detokenize", info.detokenize, "Ids → text.", DetokenizeRequest),
            Route("GET", "/v1/models", info.models, "The models that are served."),
            Route("GET", "/models", info.models, "As /v1/models."),
            Route("GET", "/v1/models/{model...}", info.model, "One of them."),
            Route("GET", "/health", info.health, "200 if requests are worked on.", open=health),
            Route("GET", "/ping", info.health, "As /health.", open=health),
            Route("POST", "/ping", info.health, "SageMaker's, as /health.", open=health),
            Route("GET", "/v1/health", info.health, "As /health.", open=health),
            Route("GET", "/version", info.version, "The server's version."),
            Route("GET", "/metrics", info.metrics, "Prometheus.", open=settings.metrics_open),
            Route("GET", "/load", info.load, "Requests that are being answered."),
            Route("GET", "/openapi.json", self._describe, "This description."),
            Route("GET", "/docs", self._show_docs, "The same, to be read."),
            Route("GET", "/", self._show_root, ROOT_SUMMARY, open=settings.ui),
            *record_routes(service),
            *profile_routes(service),
            *pool_routes(service),
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
            raise RuntimeError(f"{scope['type']}: only HTTP is spoken here")
        http = HttpRequest(scope, receive, send, self.service.settings.write_timeout_s)
        path = "unknown"  # a label of the metrics, so not the client's to choose
        if self._root and f"{http.path}/".startswith(f"{self._root}/"):
            http.path = http.path.removeprefix(self._root) or "/"
        if self._name_requests:
            name = http.header(b"x-request-id") or uuid4().hex.encode()
            http.more_headers = ((b"x-request-id", name),)
        form: type[ErrorBody] = ErrorAnswer
        try:
            self._guard.check_host(http)
            route = self._router.find(http)
            if isinstance(route, ApiError):
                self._keys.check(http)  # without a key one does not learn what there is
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
                raise  # part of a response is out: the connection is closed
            failure = as_api_error(error)
            self._failures.add(http, path, failure)
            await http.respond_error(failure, msgspec.json.encode(form.of(failure)))
        finally:
            self.service.metrics.answered(path, http.status)
            if http.late_error is not None:
                self._failures.add(http, path, http.late_error)
            for warning in http.warnings:
                self._failures.warn(http, path, warning)

    async def close(self) -> None:
        """The server has ended."""
        self.service.prompts.close()
        self._info.close()
        if self.service.tracing is not None:
            await self.service.tracing.close()

    async def _describe(self, http: HttpRequest) -> None:
        await http.respond(200, self._description)

    async def _show_docs(self, http: HttpRequest) -> None:
        await http.respond(200, self._docs, HTML)

    async def _show_root(self, http: HttpRequest) -> None:
        """The chat to a browser, which needs no key; the list of routes to other clients."""
        if self._pages is not None and wants_page(http):
            if not http.scope["path"].endswith("/"):  # the page's addresses are relative
                location = self._root.rpartition("/")[2] + "/"
                await http.respond(308, b"", ((b"location", location.encode()),))
                return
            await self._pages.page(http)
            return
        self._keys.check(http)
        await http.respond(200, self._index, (*HTML, (b"vary", b"accept")))


def asgi(app: App) -> Any:
    """The application as a server runs it: with CORS where pages of other sites may ask."""
    origins = app.service.settings.cors_origins
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
    )


# ── /openapi.json ───────────────────────────────────────────────────────────────────────────────


def _openapi(routes: list[Route], with_key: bool, root: str) -> dict[str, Any]:
    routes = [route for route in routes if route.supported]
    named = {kind: None for route in routes for kind in (route.error, route.body) if kind}
    types = list(named)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace("...}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if root:
        described["servers"] = [{"url": root}]
    if with_key:
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
            "200": {"description": "The answer.", "content": _answer(route)},
            "4XX": {"description": "What is wrong with the request.", "content": error},
            "5XX": {"description": "Why it cannot be answered now.", "content": error},
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
