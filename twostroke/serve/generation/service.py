"""`Service`: what the routes of one server share, and its limits over all requests: how many
sequences may be open (`Admission`), and how much of what was written may be unread (`UnreadBytes`).
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec

from twostroke import __version__
from twostroke.engine.api import EngineClient
from twostroke.errors import shown
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.serve.error_responses import ApiError, retry_after, unavailable
from twostroke.serve.fields.protocol import Body, GenerateRequest
from twostroke.serve.fields.response_fields import ResponseHead, TokenNames
from twostroke.serve.generation.prompts import Prompts
from twostroke.serve.http.bodies import BodyReader
from twostroke.serve.http.http_request import Headers, HttpRequest
from twostroke.serve.monitor.ceilings_probe import Roof
from twostroke.serve.monitor.metrics import Metrics
from twostroke.serve.monitor.tracing import Tracing
from twostroke.serve.settings import ServeSettings

T = TypeVar("T", bound=Body)
MAX_CHOICES, CHOICES_PER_CORE = 128, 8
MOST_UNREAD = 8  # streams with all that one may have: so much may be unread in total


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
        self.roof = Roof(client)
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
            yield request, num_bytes
            request.drop_input()

    def apply_settings(self, http: HttpRequest, request: GenerateRequest) -> None:
        """What the server decides for a request, whatever the request says."""
        settings = self.settings
        num_keys = len(settings.api_keys) + len(settings.admin_api_keys)
        if num_keys > 1 and not settings.prefix_cache_sharing:
            # How long a prompt takes tells whether it is cached, so whether another has sent it.
            request.cache_salt = f"{http.key_number}/{request.cache_salt or ''}"
        if not settings.client_priority:
            request.priority = None
        if request.prompt_cache_key is None and (session := http.header(b"x-session-id")):
            request.prompt_cache_key = session.decode("latin-1")

    def num_running(self, http: HttpRequest) -> int:
        """Return the number of running sequences that the client may know of."""
        running = self.client.load().running
        if http.is_admin:
            return running
        own = (one.num_running for one in self.open_streams if one.owner == http.key_number)
        return min(running, sum(own))

    def tokens_as_ids(self, request: GenerateRequest) -> bool:
        """Whether log-probabilities name their tokens by id; the request may say."""
        asked = request.return_tokens_as_token_ids
        return self.settings.return_tokens_as_token_ids if asked is None else asked

    def response_head(self, prefix: str, request_id: str | None, model: str | None) -> ResponseHead:
        name = f"{prefix}-{request_id or uuid4().hex}"
        return ResponseHead(name, int(time.time()), model or self.models[0], self.fingerprint)

    def load_report(self, http: HttpRequest) -> Headers:
        """How busy the engine is, for a load balancer that asks by ORCA's header."""
        form = (http.header(b"endpoint-load-metrics-format") or b"").upper()
        if form not in (b"TEXT", b"JSON"):
            return ()
        load = self.client.load()
        figures = {
            "kv_cache_usage_perc": load.kv.taken,
            "num_requests_waiting": float(load.waiting),
        }
        if form == b"JSON":
            told = msgspec.json.encode({"named_metrics": figures})
        else:
            told = ", ".join(f"named_metrics.{name}={figures[name]}" for name in figures).encode()
        return ((b"endpoint-load-metrics", form + b" " + told),)

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


# ── limits over all requests ────────────────────────────────────────────────────────────────────


class Admission:
    """Counts the sequences this server has open, so that they cannot pile up without bound."""

    def __init__(self, client: EngineClient, max_queue: int, max_choices: int | None) -> None:
        self._client = client
        self._max_queue = max_queue
        # They run side by side, so every step of every stream takes longer by all of them.
        on_gpu = client.info.device.startswith("cuda")
        most = MAX_CHOICES if on_gpu else min(MAX_CHOICES, CHOICES_PER_CORE * (os.cpu_count() or 1))
        self.max_choices = max_choices or most
        self.num_open = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Raises `ApiError` if `count` more sequences cannot be taken; also called early, before a
        prompt is read."""
        if self.draining:
            raise unavailable("the server is shutting down; ask another one")
        if self._client.asleep:
            raise unavailable("the engine sleeps; POST /wake_up first")
        if not self._client.healthy:
            raise unavailable("the engine is not running; try again in a moment")
        # The engine's count may be a moment old, and memory may hold fewer than
        # max_num_seqs: so both counts are looked at.
        limit = self._client.info.max_num_seqs + self._max_queue
        most = min(limit, self.max_choices)
        if count > most:
            raise ApiError(
                400,
                f"n: {count} texts are asked for at once (prompts times n), and at most {most} may "
                "be; send several requests, or raise --max-choices",
                param="n",
            )
        waiting = self._client.load().waiting
        if self.num_open + count > limit or (waiting and waiting + count > self._max_queue):
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and at most {self._max_queue} may; try again "
                "in a moment",
                code="queue_full",
                headers=retry_after(1),
            )

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Count them as open meanwhile."""
        self.check(count)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count


class OpenStream(Protocol):
    """A response being streamed (`ResponseStream`)."""

    @property
    def owner(self) -> int | None: ...

    @property
    def num_running(self) -> int: ...

    def fail(self, error: Exception) -> None: ...

    def cancel(self, error: Exception) -> None: ...


class UnreadBytes:
    """Bytes that streams have written and their clients have not read: limited for each stream, and
    in total."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_total_bytes = MOST_UNREAD * max_bytes
        self._bytes: dict[OpenStream, int] = {}
        self.num_bytes = 0

    def add(self, stream: OpenStream, count: int) -> None:
        """One output may have any size, but then nothing more may wait behind it."""
        before = self._bytes.get(stream, 0)
        self._bytes[stream] = before + count
        self.num_bytes += count
        if before and before + count > self._max_bytes:
            self._end(stream)
        elif self.num_bytes > self.max_total_bytes and len(self._bytes) > 1:
            self._end(max(self._bytes, key=lambda one: self._bytes[one]))

    def remove(self, stream: OpenStream, count: int | None = None) -> None:
        """`count` bytes have been read, or were dropped; None: all of them."""
        held = self._bytes.pop(stream, 0)
        left = 0 if count is None else max(0, held - count)
        self.num_bytes -= held - left
        if left:
            self._bytes[stream] = left

    def _end(self, stream: OpenStream) -> None:
        count = self._bytes[stream]
        stream.cancel(
            ApiError(
                408,
                f"the stream was not read: {count} bytes of it were waiting, and at most "
                f"{self._max_bytes} may (--max-unread-bytes); read faster, or ask for less",
                code="slow_reader",
            )
        )
