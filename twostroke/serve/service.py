"""`Service`: what every route that generates shares. It owns the open feeds."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar
from uuid import uuid4

import msgspec

from twostroke import __version__
from twostroke.engine.api import EngineClient
from twostroke.engine.intake import Prepared
from twostroke.errors import shown
from twostroke.model.tokenizer import Tokenizer
from twostroke.serve.bodies import Bodies
from twostroke.serve.errors import ApiError, unavailable
from twostroke.serve.exchange import Exchange
from twostroke.serve.feed import Feed, Unread
from twostroke.serve.metrics import Metrics
from twostroke.serve.parts import Json, TokenNames
from twostroke.serve.prompts import Prompts
from twostroke.serve.protocol import Generating
from twostroke.serve.security import Admission
from twostroke.serve.settings import ServeSettings
from twostroke.serve.stream import EventWriter
from twostroke.serve.tracing import Tracing

LOGPROB_BYTES = 8  # of a token and its log-probability, as `Logprobs` keeps them
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_json(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "service_tier": None,
        }


class Service:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.client = client
        self.settings = settings
        self.admission = Admission(client, settings.max_queue, settings.max_choices)
        self.names = TokenNames(client.intake.tokenizer)
        self.unread = Unread(settings.max_unread_bytes)
        self.bodies = Bodies(settings, client.info.max_model_len)
        self.prompts = Prompts(client.intake, settings)
        self.models = settings.served_model_names or (client.info.model_name,)
        self.metrics = Metrics(client, self.models[0])
        self.started = int(time.time())
        info = client.info
        setup = f"{info.model_name} {info.dtype} {info.device}"
        self.fingerprint = f"twostroke-{__version__}-{sha256(setup.encode()).hexdigest()[:8]}"
        self._feeds: set[Feed] = set()
        self.tracing: Tracing | None = None
        if settings.otlp_traces_endpoint is not None:
            self.tracing = Tracing(settings.otlp_traces_endpoint, self.models[0])
            client.records.listeners.append(self.tracing)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.client.intake.tokenizer

    @asynccontextmanager
    async def read(self, exchange: Exchange, kind: type[T]) -> AsyncIterator[tuple[T, int]]:
        """The request and its size. Leave once a prompt is made of it: its memory is counted."""
        async with self.bodies.read(exchange, kind) as (request, num_bytes):
            if isinstance(request, Generating):
                self._settle(exchange, request)
            yield request, num_bytes
            if isinstance(request, Generating):
                request.drop_input()

    def _settle(self, exchange: Exchange, request: Generating) -> None:
        """What the server says of a request, whatever the request says."""
        settings = self.settings
        if len(settings.api_keys) > 1 and not settings.prefix_cache_sharing:
            # How long a prompt takes tells whether it is cached, so whether another has sent it.
            request.cache_salt = f"{exchange.key_number}/{request.cache_salt or ''}"
        if not settings.client_priority:
            request.priority = None

    def head(self, prefix: str, request_id: str | None, model: str | None) -> Head:
        name = f"{prefix}-{request_id or uuid4().hex}"
        return Head(name, int(time.time()), model or self.models[0], self.fingerprint)

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.models:
            raise ApiError(
                404,
                f"the model {shown(model)} does not exist here; there is {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )

    @asynccontextmanager
    async def running(
        self,
        exchange: Exchange,
        prepared: Sequence[Prepared],
        name: str,
        writer: EventWriter | None = None,
    ) -> AsyncIterator[Feed]:
        """The engine at work on an answer, for as long as there is somebody to have it. `writer`
        makes the events of a streamed one."""
        self._check_size(prepared, streamed=writer is not None)
        tracing = self.tracing
        with self.admission.enter(sum(one.params.n for one in prepared)):
            # A client may use an id again; the engine's name for a request is never another's.
            write = None if writer is None else writer.write
            feed = Feed(self.client, prepared, f"{name}-{uuid4().hex[:8]}", self.unread, write)
            self._feeds.add(feed)
            if tracing is not None:
                tracing.begin(feed.names, name, exchange, [one.params for one in prepared])
            try:
                with exchange.watched(feed.fail):
                    async with feed:
                        yield feed
            finally:
                self._feeds.discard(feed)
                if tracing is not None:
                    tracing.end(feed.names)

    def _check_size(self, prepared: Sequence[Prepared], streamed: bool) -> None:
        """Refuse an answer that would take too much memory before it could be sent."""
        longest = self.client.info.max_model_len
        num_bytes = 0
        for one in prepared:
            params = one.params
            if params.logprobs is not None and not streamed:
                tokens = min(params.max_tokens or longest, longest - len(one.ids))
                num_bytes += params.n * tokens * (1 + params.logprobs) * LOGPROB_BYTES
        if num_bytes > self.unread.max_total_bytes:
            raise ApiError(
                400,
                f"the log-probabilities of this answer may take {num_bytes} bytes, and at most "
                f"{self.unread.max_total_bytes} are kept for one that is sent whole; stream it, or "
                "lower n, max_tokens or logprobs",
            )

    @property
    def num_feeds(self) -> int:
        return len(self._feeds)

    def end_all(self) -> None:
        """Give up what still runs, with an error for those who wait."""
        for feed in list(self._feeds):
            feed.fail(unavailable("the server was stopped before the answer was finished"))
