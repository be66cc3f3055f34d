"""`Service`: the objects that all routes share. `Admission` limits the open sequences of all
requests, `UnreadBytes` the bytes that clients have not read.
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
from twostroke.serve.fields.body_fields import Body
from twostroke.serve.fields.protocol import GenerateRequest
from twostroke.serve.fields.response_json import ResponseHead, TokenNames
from twostroke.serve.generation.prompts import PromptProcessor
from twostroke.serve.http.bodies import BodyReader
from twostroke.serve.http.http_request import Headers, HttpRequest
from twostroke.serve.monitor.ceilings_probe import CeilingsProbe
from twostroke.serve.monitor.metrics import ServerMetrics
from twostroke.serve.monitor.tracing import Tracing
from twostroke.serve.settings import ServeSettings

T = TypeVar("T", bound=Body)
MAX_CHOICES, CHOICES_PER_CORE = 128, 8
# The limit for the unread bytes of all streams is this multiple of the limit for one stream.
TOTAL_UNREAD_FACTOR = 8


class Service:
    def __init__(self, client: EngineClient, settings: ServeSettings) -> None:
        self.client = client
        self.settings = settings
        self.admission = Admission(client, settings.max_queue, settings.max_choices)
        self.token_names = TokenNames(self.tokenizer)
        self.unread = UnreadBytes(settings.max_unread_bytes)
        self.bodies = BodyReader(settings, client.info.max_model_len)
        self.prompts = PromptProcessor(client.input_processor, settings)
        self.models = settings.served_model_names or (client.info.model_name,)
        self.metrics = ServerMetrics(client, self.models[0])
        self.started = int(time.time())
        info = client.info
        setup = f"{info.model_name} {info.dtype} {info.device}"
        self.fingerprint = f"twostroke-{__version__}-{sha256(setup.encode()).hexdigest()[:8]}"
        # The salt of each key's prefixes. A salt depends on the key itself, not on the position of
        # the key in the list: the list may change while prefixes are kept on a disk.
        keys = (*settings.api_keys, *settings.admin_api_keys)
        self._salts = [sha256(f"salt {key}".encode()).hexdigest() for key in keys]
        self.open_streams: set[OpenStream] = set()
        self.ceilings_probe = CeilingsProbe(client)  # measures the hardware (roofline)
        self.tracing: Tracing | None = None
        if settings.otlp_traces_endpoint is not None:
            self.tracing = Tracing(settings.otlp_traces_endpoint, self.models[0])
            client.records.listeners.append(self.tracing)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.client.input_processor.tokenizer

    @asynccontextmanager
    async def read(self, http: HttpRequest, request_type: type[T]) -> AsyncIterator[tuple[T, int]]:
        """Read the body of a request; yield the request and the size of the body in bytes.

        The size counts as memory in use until the context ends, so end the context as soon as the
        prompt has been made."""
        async with self.bodies.read(http, request_type) as (request, num_bytes):
            yield request, num_bytes
            request.drop_large_fields()

    def apply_settings(self, http: HttpRequest, request: GenerateRequest) -> None:
        """Apply the server's settings that override the request."""
        settings = self.settings
        if len(self._salts) > 1 and not settings.prefix_cache_sharing:
            # The prefill time would reveal whether another client has sent the same prompt.
            salt = "" if http.key_number is None else self._salts[http.key_number]
            request.cache_salt = f"{salt}/{request.cache_salt or ''}"
        if not settings.client_priority:
            request.priority = None
        if request.prompt_cache_key is None and (session := http.header(b"x-session-id")):
            request.prompt_cache_key = session.decode("latin-1")

    def num_running(self, http: HttpRequest) -> int:
        """Return the number of running sequences that this client may see: with an admin key all
        sequences, with another key only the sequences of the same key."""
        running = self.client.load().running
        if http.is_admin:
            return running
        of_key = (s.num_running for s in self.open_streams if s.owner == http.key_number)
        return min(running, sum(of_key))

    def shows_token_ids(self, request: GenerateRequest) -> bool:
        """Return whether log-probabilities show tokens as ids ("token_id:42") instead of text. The
        request's field overrides the server's setting."""
        requested = request.return_tokens_as_token_ids
        return self.settings.return_tokens_as_token_ids if requested is None else requested

    def response_head(self, prefix: str, request_id: str | None, model: str | None) -> ResponseHead:
        name = f"{prefix}-{request_id or uuid4().hex}"
        return ResponseHead(name, int(time.time()), model or self.models[0], self.fingerprint)

    def load_report(self, http: HttpRequest) -> Headers:
        """Return ORCA's load header if the load balancer asks for it."""
        load_format = (http.header(b"endpoint-load-metrics-format") or b"").upper()
        if load_format not in (b"TEXT", b"JSON"):
            return ()
        load = self.client.load()
        metrics = {
            "kv_cache_usage_perc": load.kv.taken,  # from 0 to 1, as in vLLM
            "num_requests_waiting": float(load.waiting),
        }
        if load_format == b"JSON":
            report = msgspec.json.encode({"named_metrics": metrics})
        else:
            report = ", ".join(f"named_metrics.{name}={metrics[name]}" for name in metrics).encode()
        return ((b"endpoint-load-metrics", load_format + b" " + report),)

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.models:
            raise ApiError(
                404,
                f"the model {shown(model)} does not exist on this server, which has "
                f"{', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )

    def end_streams(self) -> None:
        """End all running streams with an error."""
        for stream in list(self.open_streams):
            stream.fail(unavailable("the server was stopped before the answer was finished"))


# ── limits over all requests ────────────────────────────────────────────────────────────────────


class Admission:
    """Limits the number of open sequences."""

    def __init__(self, client: EngineClient, max_queue: int, max_choices: int | None) -> None:
        self._client = client
        self._max_queue = max_queue
        # All choices of a request run in the same steps. So many choices slow down every stream,
        # above all on a CPU.
        on_gpu = client.info.device.startswith("cuda")
        cores = os.cpu_count() or 1
        default = MAX_CHOICES if on_gpu else min(MAX_CHOICES, CHOICES_PER_CORE * cores)
        self.max_choices = max_choices or default
        self.num_open = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Raise `ApiError` if `count` more sequences cannot be admitted. Also called before the
        body is read, to refuse early."""
        if self.draining:
            raise unavailable("the server is shutting down; send the request to another server")
        if self._client.asleep:
            raise unavailable("the engine sleeps; POST /wake_up first")
        if not self._client.healthy:
            raise unavailable("the engine is not running; try again in a moment")
        limit = self._client.info.max_num_seqs + self._max_queue
        max_count = min(limit, self.max_choices)
        if count > max_count:
            flag = "--max-choices" if self.max_choices < limit else "--max-queue"
            raise ApiError(
                400,
                f"n: the request asks for {count} choices (prompts times n), and at most "
                f"{max_count} are allowed; send several requests, or raise {flag}",
                param="n",
            )
        # Two counts are checked, because neither is enough. `num_open` is exact, but does not tell
        # how many sequences wait: with little memory, fewer than max_num_seqs sequences run. The
        # engine's count of waiting requests may be outdated.
        waiting = self._client.load().waiting
        if self.num_open + count > limit or (waiting and waiting + count > self._max_queue):
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and the queue has room for {self._max_queue}; "
                "try again in a moment",
                code="queue_full",
                headers=retry_after(1),
            )

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Count the sequences as open inside the block."""
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

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the chunks that are ready."""

    def cancel(self, error: Exception) -> None:
        """Abort the requests, drop the chunks that are ready, and end the stream with an error."""


class UnreadBytes:
    """Bytes that streams have written and clients have not read, limited for each stream and in
    total."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.max_total_bytes = TOTAL_UNREAD_FACTOR * max_bytes
        self._bytes: dict[OpenStream, int] = {}
        self.num_bytes = 0

    def add(self, stream: OpenStream, count: int) -> None:
        """Add `count` bytes that a stream has written. Cancel the stream if it had unread bytes
        before and now has more than allowed: the first write may have any size. If all streams
        together have too many, cancel the stream with the most unread bytes."""
        before = self._bytes.get(stream, 0)
        self._bytes[stream] = before + count
        self.num_bytes += count
        if before and before + count > self._max_bytes:
            self._end(stream)
        elif self.num_bytes > self.max_total_bytes and len(self._bytes) > 1:
            self._end(max(self._bytes, key=lambda other: self._bytes[other]))

    def remove(self, stream: OpenStream, count: int | None = None) -> None:
        """Subtract `count` bytes that were read or dropped. None: all bytes of the stream."""
        unread = self._bytes.pop(stream, 0)
        left = 0 if count is None else max(0, unread - count)
        self.num_bytes -= unread - left
        if left:
            self._bytes[stream] = left

    def _end(self, stream: OpenStream) -> None:
        count = self._bytes[stream]
        stream.cancel(
            ApiError(
                408,
                f"the client did not read the stream: {count} bytes were unread, and the limit is "
                f"{self._max_bytes} (--max-unread-bytes); read faster, or request fewer tokens",
                code="slow_reader",
            )
        )
