"""`Service`: what the routes of one server share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TypeVar
from uuid import uuid4

import msgspec

from twostroke import __version__
from twostroke.engine.api import EngineClient
from twostroke.errors import shown
from twostroke.model.tokenizer import Tokenizer
from twostroke.serve.bodies import BodyReader
from twostroke.serve.errors import ApiError, unavailable
from twostroke.serve.http import HttpRequest
from twostroke.serve.limits import Admission, OpenStream, UnreadBytes
from twostroke.serve.metrics import Metrics
from twostroke.serve.prompts import Prompts
from twostroke.serve.protocol import GenerateRequest
from twostroke.serve.response_fields import ResponseHead, TokenNames
from twostroke.serve.settings import ServeSettings
from twostroke.serve.tracing import Tracing

T = TypeVar("T", bound=msgspec.Struct)


class Service:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.client = client
        self.settings = settings
        self.admission = Admission(client, settings.max_queue, settings.max_choices)
        self.token_names = TokenNames(self.tokenizer)
        self.unread = UnreadBytes(settings.max_unread_bytes)
        self.bodies = BodyReader(settings, client.info.max_model_len)
        self.prompts = Prompts(client.input_processor, settings)
        self.models = settings.served_model_names or (client.info.model_name,)
        self.metrics = Metrics(client, self.models[0])
        self.started = int(time.time())
        info = client.info
        setup = f"{info.model_name} {info.dtype} {info.device}"
        self.fingerprint = f"twostroke-{__version__}-{sha256(setup.encode()).hexdigest()[:8]}"
        self.open_streams: set[OpenStream] = set()
        self.tracing: Tracing | None = None
        if settings.otlp_traces_endpoint is not None:
            self.tracing = Tracing(settings.otlp_traces_endpoint, self.models[0])
            client.records.listeners.append(self.tracing)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.client.input_processor.tokenizer

    @asynccontextmanager
    async def read(self, http: HttpRequest, kind: type[T]) -> AsyncIterator[tuple[T, int]]:
        """The request and its size. Leave once a prompt is made of it: its memory is counted."""
        async with self.bodies.read(http, kind) as (request, num_bytes):
            if isinstance(request, GenerateRequest):
                self._apply_settings(http, request)
            yield request, num_bytes
            if isinstance(request, GenerateRequest):
                request.drop_input()

    def _apply_settings(self, http: HttpRequest, request: GenerateRequest) -> None:
        """What the server decides for a request, whatever the request says."""
        settings = self.settings
        if len(settings.api_keys) > 1 and not settings.prefix_cache_sharing:
            # How long a prompt takes tells whether it is cached, so whether another has sent it.
            request.cache_salt = f"{http.key_number}/{request.cache_salt or ''}"
        if not settings.client_priority:
            request.priority = None

    def response_head(self, prefix: str, request_id: str | None, model: str | None) -> ResponseHead:
        name = f"{prefix}-{request_id or uuid4().hex}"
        return ResponseHead(name, int(time.time()), model or self.models[0], self.fingerprint)

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.models:
            raise ApiError(
                404,
                f"the model {shown(model)} does not exist here; there is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )

    def end_streams(self) -> None:
        """Give up what still runs, with an error for those who wait."""
        for stream in list(self.open_streams):
            stream.fail(unavailable("the server was stopped before the answer was finished"))
