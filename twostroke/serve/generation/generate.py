"""The path of a request that generates text, the same for all routes:

    GenerateRoute   admit ─▶ read the body ─▶ Generation.prepare, off the event loop ─▶ submit
    ResponseStream  engine ─▶ output ─▶ encode ─▶ connection            if the client reads fast
                                          └─▶ queue ─▶ next_chunks()    if it reads slowly
                    engine ─▶ last output of each prompt ─▶ final_outputs()    without streaming

An output is encoded when it arrives. So the data that waits for a slow client is small, counted
(`UnreadBytes`), and cheap to write or to drop.
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
from twostroke.serve.fields.body_fields import Body
from twostroke.serve.fields.protocol import GenerateRequest, StreamOptions
from twostroke.serve.fields.response_json import (
    DONE,
    Encoded,
    Json,
    ResponseHead,
    TokenCounts,
    cached_tokens,
    error_event,
    event,
    predicted_tokens,
    progress,
    request_metrics,
    timings,
)
from twostroke.serve.generation.service import Service, UnreadBytes
from twostroke.serve.http.http_request import SSE, DirectWriter, Headers, HttpRequest, IgnoredParts

SUBMITTED_AT_ONCE = 16  # prompts of one request; then other tasks run
MAX_REQUEST_ID = 256  # characters
LOGPROB_BYTES = 8  # memory for one token id and its log-probability in `Logprobs`

R = TypeVar("R", bound=Body)
G = TypeVar("G", bound="Generation[Any]")


class StreamWriter(Protocol):
    """Encodes one streamed response: takes outputs, returns the bytes of whole events."""

    def write(self, prompt_index: int, output: RequestOutput) -> Encoded: ...

    def end(self) -> Encoded: ...

    def fail(self, error: ApiError) -> bytes: ...


class Generation(ABC, Generic[R]):
    """One API request: prepares the engine's requests and writes the response."""

    request_type: ClassVar[type[Any]]
    id_prefix: ClassVar[str]
    stream_headers: ClassVar[Headers] = SSE
    fields: GenerateRequest  # `request`, or its translation into OpenAI's fields
    head: ResponseHead

    def __init__(self, service: Service, request: R) -> None:
        self.service = service
        self.request = request
        if isinstance(request, GenerateRequest):
            self.fields = request
        self.num_choices = 1  # prompts times n
        self.warnings: list[IgnoredParts] = []
        self.num_stored_bytes = 0  # of the stored responses that the prompt includes

    def holding_stored(self) -> AbstractContextManager[None]:
        """Return a context for `prepare`. In this context the memory of the stored responses that
        `prepare` reads counts as used, even if they are deleted."""
        return nullcontext()

    @abstractmethod
    def prepare(self) -> list[EngineRequest]:
        """Return one request for each prompt, or raise an error. Called off the event loop."""

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        """Set the head of the response. Called before the response is written, and after the
        request's input has been dropped."""
        self.head = head

    @abstractmethod
    def stream_writer(self) -> StreamWriter: ...

    @abstractmethod
    def full_response(self, outputs: Sequence[RequestOutput]) -> Json | list[Json]:
        """Return the whole answer from the last output of each prompt, in order."""


class ChunkWriter(ABC, Generic[G]):
    """The base of the stream writers of chat and text completions."""

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
        self.counts.predicted = predicted_tokens(self.finished)
        more: Json = {"timings": timings(self.finished)}
        if self.generation.service.settings.enable_per_request_metrics:
            metrics = request_metrics(self.finished)
            if metrics is not None:  # as in vLLM, a stream has no null values, a whole answer does
                known = {name: value for name, value in metrics.items() if value is not None}
                more["metrics"] = known
        return event(self.chunk([], usage=self.counts.usage(), **more)) + DONE

    def fail(self, error: ApiError) -> bytes:
        return error_event(error) + DONE


class GenerateRoute:
    """The handler of a route that generates text. `generation_type`: the route's `Generation`."""

    def __init__(self, service: Service, generation_type: type[Generation[Any]]) -> None:
        self._service = service
        self._generation_type = generation_type
        self._request_type: type[Body] = generation_type.request_type

    async def __call__(self, http: HttpRequest) -> None:
        generation, requests = await self.prepare(http)
        await self.respond(http, generation, requests)

    def new_generation(self, http: HttpRequest, request: Any) -> Generation[Any]:
        return self._generation_type(self._service, request)

    async def prepare(self, http: HttpRequest) -> tuple[Generation[Any], list[EngineRequest]]:
        """Read the request and return the engine's requests. Release the memory of the body."""
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
        fields.drop_large_fields()
        request_id = _request_id(http) or fields.request_id
        head = service.response_head(generation.id_prefix, request_id, fields.model)
        http.response_id = head.id
        generation.begin(head, requests)
        return generation, requests

    async def respond(
        self, http: HttpRequest, generation: Generation[Any], requests: Sequence[EngineRequest]
    ) -> None:
        """Run the requests and send the answer, whole or streamed."""
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
        """Run the requests in the engine. They are aborted at the end of the block, and if the
        client disconnects (unless `without_client`)."""
        service = self._service
        self._check_logprobs_size(requests, whole=write is None)
        tracing = service.tracing
        with service.admission.enter(sum(request.params.n for request in requests)):
            # Clients may reuse an id; the engine's name for a request is unique.
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
        """Refuse an answer whose log-probabilities would take too much memory. The
        log-probabilities of a prompt arrive in one piece, even in a stream."""
        longest = self._service.client.info.max_model_len
        limit = self._service.unread.max_total_bytes
        num_bytes = 0
        for request in requests:
            params, prompt = request.params, len(request.prompt_token_ids)
            if params.prompt_logprobs is not None:
                num_bytes += prompt * (1 + params.prompt_logprobs) * LOGPROB_BYTES
            if params.logprobs is not None and whole:
                tokens = min(params.max_tokens or longest, longest - prompt)
                entries = 1 + max(params.logprobs, len(params.logprob_token_ids or ()))
                num_bytes += params.n * tokens * entries * LOGPROB_BYTES
        if num_bytes > limit:
            raise ApiError(
                400,
                f"the log-probabilities of this answer may take {num_bytes} bytes, and at most "
                f"{limit} are kept (8 times --max-unread-bytes); stream it, or lower n, "
                "max_tokens, logprobs or prompt_logprobs",
            )


def _request_id(http: HttpRequest) -> str | None:
    """Return the request id in the client's X-Request-Id header."""
    name = http.header(b"x-request-id")
    if name is not None and len(name) > MAX_REQUEST_ID:
        raise ApiError(400, f"X-Request-Id has more than {MAX_REQUEST_ID} characters")
    return name.decode("latin-1") if name else None


class ResponseStream:
    """The outputs of one HTTP request, from the engine to the connection. Use with `async with`:
    the requests that still run at the end of the block are aborted."""

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineRequest],
        name: str,
        unread: UnreadBytes,
        write: Callable[[int, RequestOutput], Encoded] | None = None,
    ) -> None:
        """`write` encodes an output as events of a stream. None: no streaming; keep only the last
        output of each prompt."""
        self._client = client
        self._requests = requests
        several = len(requests) > 1
        self.engine_ids = [f"{name}.{n}" if several else name for n in range(len(requests))]
        self._unread = unread
        self._write = write
        self._ready: list[Encoded] = []
        self._num_handed = 0  # bytes returned by the last `next_chunks`
        self._last_outputs: dict[int, RequestOutput] = {}  # by prompt
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: DirectWriter | None = None  # set when the response has begun
        self._running: dict[int, RequestState] = {}  # by prompt

    @property
    def owner(self) -> int | None:
        return self._requests[0].owner

    @property
    def num_running(self) -> int:
        """The number of sequences that have not ended, including waiting sequences."""
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
        """End the stream with an error after the ready chunks. Keep only the first error."""
        self._error = self._error or error
        if isinstance(error, ClientGone):
            self._drop()
        self._wake()

    def cancel(self, error: Exception) -> None:
        """Abort the requests, drop all chunks, which the client may never read, and fail."""
        self._abort()
        self._drop()
        self.fail(error)

    # ── from the engine ─────────────────────────────────────────────────────────────────────

    def _on_output(self, index: int, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._running.pop(index, None)
            self.fail(output)
            return
        if self._error is not None:  # outputs after a failure are dropped
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
        """Wait for the last output of every prompt; return them in order."""
        while self._error is None and self._running:
            await self._wait()
        if self._error is not None:
            raise self._error
        return [self._last_outputs[index] for index in range(len(self._requests))]

    async def next_chunks(self) -> list[Encoded]:
        """Wait for chunks and return them; return [] after the last chunk. The chunks count as
        unread until the next call."""
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
        """Send the whole stream. Raise an error that occurs before the response has begun; send a
        later error as an event."""
        try:
            while ready := await self.next_chunks():
                if not http.status:
                    await http.start_stream(headers)
                await _write_chunks(http, ready)
                self._direct = http.direct
            last = writer.end()
            if not http.status:  # the response has not begun
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
    """Write small chunks together, and long chunks in pieces between which other tasks run."""
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
    """The size of a chunk. A chunk that is not encoded yet counts as one byte."""
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
