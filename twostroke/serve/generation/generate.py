"""The one way of every request that generates text, whatever its route (`chat.py`,
`completions.py`, `responses.py`):

    GenerateRoute   admit ─▶ read the body ─▶ Generation.prepare, off the event loop ─▶ submit
    ResponseStream  engine ─▶ output ─▶ encoded at once ─▶ connection     a reader that keeps up
                                └─▶ unread ─▶ next_chunks()               one that does not
                    engine ─▶ last output of each prompt ─▶ final_outputs()     without streaming

An output becomes bytes when it arrives, so that what a slow reader has not taken yet is small, is
counted, and is cheap to write or to drop (`UnreadBytes`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from uuid import uuid4

from twostroke.engine.api import EngineClient
from twostroke.engine.output_processor import RequestState
from twostroke.errors import EngineError, RequestError
from twostroke.outputs import RequestOutput
from twostroke.plan import BROKEN_LOGITS
from twostroke.request import EngineRequest
from twostroke.serve.error_responses import ApiError, ClientGone, as_api_error
from twostroke.serve.fields.protocol import Body, GenerateRequest, StreamOptions
from twostroke.serve.fields.response_fields import (
    Json,
    ResponseHead,
    TokenCounts,
    cached_tokens,
    progress,
    request_metrics,
    timings,
)
from twostroke.serve.generation.service import Service, UnreadBytes
from twostroke.serve.http.http_request import SSE, DirectWriter, Headers, HttpRequest, IgnoredParts
from twostroke.serve.sse import DONE, Encoded, error_event, event

SUBMITTED_AT_ONCE = 16  # prompts of one request, before other requests get their turn
MAX_REQUEST_ID = 256  # characters
LOGPROB_BYTES = 8  # of a token and its log-probability, as `Logprobs` keeps them

R = TypeVar("R", bound=Body)
G = TypeVar("G", bound="Generation[Any]")


class StreamWriter(Protocol):
    """The events of one streamed response: outputs in, bytes of whole events out."""

    def write(self, prompt_index: int, output: RequestOutput) -> Encoded: ...

    def end(self) -> Encoded: ...

    def fail(self, error: ApiError) -> bytes: ...


class Generation(ABC, Generic[R]):
    """One request of a route, and how its response is written, whole or streamed."""

    request_type: ClassVar[type[Any]]
    id_prefix: ClassVar[str]
    stream_headers: ClassVar[Headers] = SSE
    fields: GenerateRequest  # of every route: the request's own, or what it was translated to
    head: ResponseHead

    def __init__(self, service: Service, request: R) -> None:
        self.service = service
        self.request = request
        if isinstance(request, GenerateRequest):
            self.fields = request
        self.num_choices = 1  # prompts times n
        self.warnings: list[IgnoredParts] = []
        self.num_stored_bytes = 0  # of earlier requests that the prompt is made of, too

    def holding_stored(self) -> AbstractContextManager[None]:
        """Around `prepare`: what is stored and is read there is counted meanwhile."""
        return nullcontext()

    @abstractmethod
    def prepare(self) -> list[EngineRequest]:
        """One for each prompt. Called off the event loop; a refusal is raised."""

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        """Before anything is written. The request's input has been dropped."""
        self.head = head

    @abstractmethod
    def stream_writer(self) -> StreamWriter: ...

    @abstractmethod
    def full_response(self, outputs: Sequence[RequestOutput]) -> Json | list[Json]:
        """The whole answer; `outputs` are the last ones, in the order of the prompts."""


class ChunkWriter(ABC, Generic[G]):
    """What the streams of chat and text completions share: chunks, usage, progress, the end."""

    chunk_object: ClassVar[str]

    def __init__(self, generation: G, options: StreamOptions | None) -> None:
        self.generation = generation
        self.counts = TokenCounts()
        self.finished: list[RequestOutput] = []
        forced = generation.service.settings.force_include_usage
        self.usage_at_end = forced or bool(options and options.include_usage)
        continuous = forced or bool(options and options.continuous_usage_stats)
        self.usage_always = self.usage_at_end and continuous

    @abstractmethod
    def write(self, prompt_index: int, output: RequestOutput) -> Encoded: ...

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        chunk = self.generation.head.as_json(self.chunk_object)
        chunk["choices"] = choices
        return chunk | more

    def progress_event(self, output: RequestOutput) -> bytes:
        if not self.generation.fields.return_progress or not output.num_prefilled:
            return b""
        return event(self.chunk([], prompt_progress=progress(output)))

    def running_usage(self) -> Json:
        return {"usage": self.counts.usage(details=False)} if self.usage_always else {}

    def end(self) -> bytes:
        if not self.usage_at_end:
            return DONE
        self.counts.cached = sum(map(cached_tokens, self.finished))
        more: Json = {"timings": timings(self.finished)}
        if self.generation.service.settings.enable_per_request_metrics:
            more["metrics"] = request_metrics(self.finished)
        return event(self.chunk([], usage=self.counts.usage(), **more)) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error) + DONE


class GenerateRoute:
    """The handler of a route that generates. `kind` is what is particular to the route."""

    def __init__(self, service: Service, kind: type[Generation[Any]]) -> None:
        self._service = service
        self._kind = kind
        self._request_type: type[Body] = kind.request_type

    async def __call__(self, http: HttpRequest) -> None:
        generation, requests = await self.prepare(http)
        await self.respond(http, generation, requests)

    def new_generation(self, http: HttpRequest, request: Any) -> Generation[Any]:
        return self._kind(self._service, request)

    async def prepare(self, http: HttpRequest) -> tuple[Generation[Any], list[EngineRequest]]:
        """What was asked for, ready to run; nothing of the body is held any more."""
        service = self._service
        service.admission.check()
        async with service.read(http, self._request_type) as (request, num_bytes):
            generation = self.new_generation(http, request)
            for warning in generation.warnings:
                http.warn(warning)
            fields = generation.fields
            service.check_model(fields.model)
            service.apply_settings(http, fields)
            service.admission.check(generation.num_choices)
            num_bytes += generation.num_stored_bytes
            make = service.prompts.prepare_off_loop
            with generation.holding_stored(), http.ended_by_disconnect():
                requests = await make(fields, num_bytes, generation.prepare)
        requests = [replace(request, owner=http.key_number) for request in requests]
        fields.drop_input()
        request_id = _request_id(http) or fields.request_id
        head = service.response_head(generation.id_prefix, request_id, fields.model)
        http.response_id = head.id
        generation.begin(head, requests)
        return generation, requests

    async def respond(
        self, http: HttpRequest, generation: Generation[Any], requests: Sequence[EngineRequest]
    ) -> None:
        """Run it and send its answer, whole or streamed."""
        http.more_headers += self._service.load_report(http)
        writer = generation.stream_writer() if generation.fields.stream else None
        write = None if writer is None else writer.write
        async with self.running(http, requests, generation.head.id, write) as stream:
            if writer is not None:
                await stream.send(http, writer, generation.stream_headers)
                return
            outputs = await stream.final_outputs()
        await http.respond_json(generation.full_response(outputs))

    @asynccontextmanager
    async def running(
        self,
        http: HttpRequest,
        requests: Sequence[EngineRequest],
        response_id: str,
        write: Callable[[int, RequestOutput], Encoded] | None,
        *,
        without_client: bool = False,
    ) -> AsyncIterator[ResponseStream]:
        """The engine at work on a response, for as long as the client is there or also
        `without_client`; leaving aborts it."""
        service = self._service
        self._check_logprobs_size(requests, whole=write is None)
        tracing = service.tracing
        with service.admission.enter(sum(request.params.n for request in requests)):
            # A client may use an id again; the engine's name for a request is never another's.
            name = f"{response_id}-{uuid4().hex[:8]}"
            stream = ResponseStream(service.client, requests, name, service.unread, write)
            service.open_streams.add(stream)
            if tracing is not None:
                params = [request.params for request in requests]
                tracing.begin(stream.engine_ids, response_id, http, params)
            try:
                with nullcontext() if without_client else http.watch_disconnect(stream.fail):
                    async with stream:
                        yield stream
            finally:
                service.open_streams.discard(stream)
                if tracing is not None:
                    tracing.end(stream.engine_ids)

    def _check_logprobs_size(self, requests: Sequence[EngineRequest], whole: bool) -> None:
        """Refuse an answer whose log-probabilities would take too much memory. Those of a prompt
        come at once, even in a stream."""
        longest = self._service.client.info.max_model_len
        limit = self._service.unread.max_total_bytes
        num_bytes = 0
        for request in requests:
            params, prompt = request.params, len(request.prompt_token_ids)
            if params.prompt_logprobs is not None:
                num_bytes += prompt * (1 + params.prompt_logprobs) * LOGPROB_BYTES
            if params.logprobs is not None and whole:
                tokens = min(params.max_tokens or longest, longest - prompt)
                told = 1 + max(params.logprobs, len(params.logprob_token_ids or ()))
                num_bytes += params.n * tokens * told * LOGPROB_BYTES
        if num_bytes > limit:
            raise ApiError(
                400,
                f"the log-probabilities of this answer may take {num_bytes} bytes, and at most "
                f"{limit} are kept (8 times --max-unread-bytes); stream it, or lower n, "
                "max_tokens, logprobs or prompt_logprobs",
            )


def _request_id(http: HttpRequest) -> str | None:
    """The name that the client gives its request in a header."""
    given = http.header(b"x-request-id")
    if given is not None and len(given) > MAX_REQUEST_ID:
        raise ApiError(400, f"X-Request-Id has more than {MAX_REQUEST_ID} characters")
    return given.decode("latin-1") if given else None


class ResponseStream:
    """The outputs of one HTTP request, from the engine to its connection. Use as `async with`:
    leaving it aborts what still runs."""

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineRequest],
        name: str,
        unread: UnreadBytes,
        write: Callable[[int, RequestOutput], Encoded] | None = None,
    ) -> None:
        """`write` encodes a stream's events; None: only the last outputs are wanted."""
        self._client = client
        self._requests = requests
        several = len(requests) > 1
        self.engine_ids = [f"{name}.{n}" if several else name for n in range(len(requests))]
        self._unread = unread
        self._write = write
        self._ready: list[Encoded] = []
        self._num_handed = 0  # bytes that `next_chunks` has given last
        self._last_outputs: dict[int, RequestOutput] = {}  # by prompt
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: DirectWriter | None = None  # the connection, once the response has begun
        self._running: dict[int, RequestState] = {}  # by prompt

    @property
    def owner(self) -> int | None:
        return self._requests[0].owner

    @property
    def num_running(self) -> int:
        """Sequences that have not ended, waiting ones included."""
        return sum(self._requests[index].params.n for index in self._running)

    async def __aenter__(self) -> ResponseStream:
        try:
            for index, request in enumerate(self._requests):
                if index and index % SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if self._error is None:
                    listen = partial(self._on_output, index)
                    name = self.engine_ids[index]
                    self._running[index] = self._client.submit(request, listen, listen, name)
        except BaseException:
            self._abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort()
        self._drop()

    def _abort(self) -> None:
        for state in self._running.values():
            self._client.leave(state)
        self._running.clear()

    def _drop(self) -> None:
        self._ready.clear()
        self._unread.remove(self)

    def fail(self, error: Exception) -> None:
        """End it for its reader, after what is ready; the first reason counts."""
        self._error = self._error or error
        if isinstance(error, ClientGone):
            self._drop()
        self._wake()

    def cancel(self, error: Exception) -> None:
        """`fail`, and keep nothing: the reader may never look at it."""
        self._abort()
        self._drop()
        self.fail(error)

    # ── from the engine ─────────────────────────────────────────────────────────────────────

    def _on_output(self, index: int, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._running.pop(index, None)
            self.fail(output)
            return
        if self._error is not None:  # what comes after a failure is dropped
            return
        if output.finished:
            self._running.pop(index, None)
            if error := _failure(output):
                self.fail(error)
                return
        if self._write is None:
            self._last_outputs[index] = output
            if not self._running:
                self._wake()
            return
        try:
            self._emit(self._write(index, output), output.finished)
        except Exception as error:
            self.fail(error)

    def _emit(self, encoded: Encoded, last: bool) -> None:
        direct = self._direct
        if (
            self._waiter is not None
            and direct is not None
            and not (last or self._ready)
            and isinstance(encoded, bytes)
            and direct.ready()
        ):
            if encoded:
                direct.write(encoded)
            return
        if encoded:
            self._ready.append(encoded)
            self._unread.add(self, _size(encoded))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ── to the connection ───────────────────────────────────────────────────────────────────

    async def final_outputs(self) -> list[RequestOutput]:
        """The last output of every prompt, in order."""
        while self._error is None and self._running:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._last_outputs[index] for index in range(len(self._requests))]

    async def next_chunks(self) -> list[Encoded]:
        """What there is to be written, at least something; nothing once all has been. Until the
        next call it counts as unread."""
        self._unread.remove(self, self._num_handed)
        self._num_handed = 0
        while not self._ready and self._error is None and self._running:
            await self._wait()
        if self._error is not None and not self._ready:
            raise self._error
        ready, self._ready = self._ready, []
        self._num_handed = sum(map(_size, ready))
        return ready

    async def send(self, http: HttpRequest, writer: StreamWriter, headers: Headers) -> None:
        """Until the last event is out. Before the first output a failure is still a status."""
        try:
            while ready := await self.next_chunks():
                if not http.status:
                    await http.start_stream(headers)
                await _write_chunks(http, ready)
                self._direct = http.direct
            last = writer.end()
            if not http.status:  # nothing was written before
                await http.start_stream(headers)
            if isinstance(last, bytes):
                await http.finish(last)
            else:
                await _write_chunks(http, [last])
                await http.finish()
        except ClientGone:
            raise
        except Exception as error:
            if not http.status:
                raise
            http.late_error = as_api_error(error)
            await http.finish(writer.fail(http.late_error))


async def _write_chunks(http: HttpRequest, ready: list[Encoded]) -> None:
    """Small ones together; long ones chunk by chunk, with the loop's other work in between."""
    small: list[bytes] = []
    for encoded in ready:
        if isinstance(encoded, bytes):
            small.append(encoded)
            continue
        if small:
            await http.write(b"".join(small))
            small.clear()
        for chunk in encoded:
            await http.write(chunk)
            await asyncio.sleep(0)
    if small:
        await http.write(b"".join(small))


def _size(encoded: Encoded) -> int:
    """What is not encoded yet takes no room, but makes what comes after it wait."""
    return len(encoded) if isinstance(encoded, bytes) else 1


def _failure(output: RequestOutput) -> Exception | None:
    if output.error == BROKEN_LOGITS:
        return ApiError(500, output.error, code="broken_logits")
    if output.error:
        return RequestError(output.error) if output.impossible else EngineError(output.error)
    ends = {completion.finish_reason for completion in output.outputs}
    if ends & {"abort", "error"}:
        return EngineError("the engine ended the request early")
    return None
