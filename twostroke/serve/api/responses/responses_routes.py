"""The routes of `/v1/responses`: create (also in the background), get, follow, cancel, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from twostroke.errors import did_you_mean, shown
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.responses.response_store import ResponseStore, StoredResponse
from twostroke.serve.api.responses.responses import (
    NoRoom,
    ResponsesGeneration,
    input_items,
    output_items,
)
from twostroke.serve.error_responses import ApiError, ClientGone, as_api_error
from twostroke.serve.fields.protocol import ResponsesRequest
from twostroke.serve.fields.response_json import Json, encode_json
from twostroke.serve.generation.generate import GenerateRoute, Generation, ResponseStream
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import WRITE_BYTES, HttpRequest
from twostroke.serve.http.routing import Route

DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # input items in one page, as in OpenAI's API


def responses_routes(service: Service) -> list[Route]:
    routes = ResponsesRoutes(service)
    path = "/v1/responses/{response_id}"
    return [
        Route("POST", "/v1/responses", routes, "Answer an input.", ResponsesRequest),
        Route(
            "POST",
            "/v1/responses/input_tokens",
            routes.count_tokens,
            "Count the tokens of an input.",
            ResponsesRequest,
        ),
        Route("GET", path, routes.get, "A stored response, or its events (?stream=true)."),
        Route("DELETE", path, routes.delete, "Delete a stored response."),
        Route("POST", f"{path}/cancel", routes.cancel, "Stop a background response."),
        Route("GET", f"{path}/input_items", routes.input_items, "The input items of a response."),
    ]


class Cancelled(Exception):  # noqa: N818
    """A client has cancelled or deleted the response."""


class BackgroundRun:
    """A background response from its acceptance to its end. Its events are stored, not sent."""

    def __init__(self, generation: ResponsesGeneration, store: ResponseStore) -> None:
        self.generation = generation
        self.stored = generation.stored
        self.writer = generation.stream_writer()
        self.stream: ResponseStream | None = None  # set when the response starts to run
        self.changed = asyncio.Event()  # `notify` wakes all tasks that wait for it
        self._store = store
        waiting = generation.response("queued", [])
        if not store.write(self.stored, "queued", encode_json(waiting)):
            raise ApiError(429, "there is no room for another stored response; try again later")
        store.put(self.stored)
        if generation.streamed:
            self.stored.events = []
            self._add(self.writer.queued_events())

    def write(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """Store the events of an output. Return no bytes, because no client is connected."""
        if self.stored.status == "queued":
            running = self.generation.response("in_progress", [])
            self._store.write(self.stored, "in_progress", encode_json(running))
        self._add(self.writer.events(output))
        return b""

    def end(self, error: Exception | None = None) -> None:
        """Set the final status and add the last events. `error`: why the response is not complete.
        If the last events cannot be stored, the response fails too."""
        if error is None or isinstance(error, Cancelled):
            writer = self.writer
            try:
                self._add(writer.last_events() if error is None else writer.cancelled_events())
            except Exception as raised:
                self._fail(as_api_error(raised))
        else:
            self._fail(as_api_error(error))
        self.generation.release()
        self.notify()

    def _fail(self, error: ApiError) -> None:
        """Store the failed response and its last events. If there is no room for the events, remove
        all events. If there is no room for the failed response either, remove the response. Clients
        that follow the events at this moment get all events in any case."""
        followed_events = self.stored.events
        if isinstance(error, NoRoom):
            self._store.drop_events(self.stored)
        try:
            events = self.writer.failed_events(error)
        except NoRoom:
            self._store.remove(self.stored)
            self.stored.status, events = "failed", []
        if followed_events is None:
            return
        for event in events:
            if self.stored.events is None or not self._store.add_event(self.stored, event):
                self._store.drop_events(self.stored)
                followed_events.append(event)

    def _add(self, events: Sequence[Any]) -> None:
        if self.stored.events is None:
            return
        for event in events:
            if not self._store.add_event(self.stored, event):
                raise NoRoom("the events of the response")
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed.clear()


class ResponsesRoutes(GenerateRoute):
    """The handlers of `/v1/responses`. They own the stored responses and the background runs."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, ResponsesGeneration)
        settings = service.settings
        self.store = ResponseStore(
            settings.max_stored_responses,
            settings.max_stored_response_bytes,
            settings.stored_response_ttl_s,
        )
        self._runs: dict[StoredResponse, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ── POST /v1/responses ──────────────────────────────────────────────────────────────────

    def new_generation(self, http: HttpRequest, request: Any) -> ResponsesGeneration:
        return ResponsesGeneration(self._service, request, self.store, http.key_number)

    async def respond(
        self, http: HttpRequest, generation: Generation[Any], requests: Sequence[EngineRequest]
    ) -> None:
        assert isinstance(generation, ResponsesGeneration)
        if not generation.background:
            try:
                await super().respond(http, generation, requests)
            finally:
                generation.release()
            return
        run = await self._start(http, generation, requests)
        if generation.streamed:
            await self._follow(http, run.stored, 0)
        else:
            await self._send_stored(http, run.stored)

    async def count_tokens(self, http: HttpRequest) -> None:
        """Count the prompt tokens of a request, without running or storing it."""
        generation, requests = await self.prepare(http)
        assert isinstance(generation, ResponsesGeneration)
        generation.release()
        (request,) = requests
        answer = {"object": "response.input_tokens", "input_tokens": len(request.prompt_token_ids)}
        await http.respond_json(answer)

    async def _start(
        self, http: HttpRequest, generation: ResponsesGeneration, requests: Sequence[EngineRequest]
    ) -> BackgroundRun:
        """Start a background response. Raise `ApiError` if the request is refused."""
        try:
            run = BackgroundRun(generation, self.store)
        except BaseException:
            self.store.remove(generation.stored)
            generation.release()
            raise
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._work(http, run, requests, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(started)
        except ApiError:
            self.store.remove(run.stored)  # the client does not get its id
            raise
        return run

    async def _work(
        self,
        http: HttpRequest,
        run: BackgroundRun,
        requests: Sequence[EngineRequest],
        started: asyncio.Future[None],
    ) -> None:
        self._runs[run.stored] = run
        error: Exception | None = None
        response_id = run.stored.id
        try:
            async with self.running(
                http, requests, response_id, run.write, without_client=True
            ) as stream:
                run.stream = stream
                started.set_result(None)
                await stream.next_chunks()  # returns at the end, because `write` returns no bytes
        except Exception as raised:
            error = raised
        del self._runs[run.stored]
        run.end(error)
        if not started.done():
            assert error is not None
            started.set_exception(as_api_error(error))

    # ── stored data ─────────────────────────────────────────────────────────────────────────

    def _find(self, http: HttpRequest) -> StoredResponse:
        response_id = http.path_params["response_id"]
        stored = self.store.get(http.key_number, response_id)
        if stored is None:
            message = (
                f"there is no response {shown(response_id)}; it was not stored, or has been removed"
            )
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored

    async def get(self, http: HttpRequest) -> None:
        query = _query(http, "stream", "starting_after", "include", "include_obfuscation")
        stored = self._find(http)
        if query.get("include"):
            message = "include: this server supports no optional fields of stored responses"
            raise ApiError(400, message, param="include")
        if not _flag(query, "stream"):
            await self._send_stored(http, stored)
            return
        if stored.events is None:
            raise ApiError(
                400,
                "stream: only a response that was created with both background and stream has "
                "events to follow; get it without stream",
                param="stream",
            )
        await self._follow(http, stored, _whole_number(query, "starting_after", -1) + 1)

    async def delete(self, http: HttpRequest) -> None:
        stored = self._find(http)
        self.store.remove(stored)
        if (run := self._runs.get(stored)) is not None and run.stream is not None:
            run.stream.fail(Cancelled())
        await http.respond_json({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> None:
        stored = self._find(http)
        if not stored.background:
            raise ApiError(
                400,
                "only a response that was created with background can be cancelled; to stop any "
                "other response, close its connection",
                param="response_id",
            )
        if (run := self._runs.get(stored)) is not None and run.stream is not None:
            run.stream.fail(Cancelled())
            while not stored.ended:
                await run.changed.wait()
        await self._send_stored(http, stored)

    async def input_items(self, http: HttpRequest) -> None:
        query = _query(http, "after", "limit", "order", "include")
        stored = self._find(http)
        limit = _whole_number(query, "limit", DEFAULT_LIMIT)
        if not 1 <= limit <= MAX_LIMIT:
            raise ApiError(400, f"limit must be from 1 to {MAX_LIMIT}", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, 'order must be "asc" or "desc"', param="order")
        page = partial(_page_of, stored, order == "desc", query.get("after"), limit)
        num_bytes = sum(response.num_bytes for response in stored.chain())
        with self.store.holding(stored):
            listed = await self._service.prompts.off_loop(None, num_bytes, page)
        await http.respond_json(listed)

    async def _send_stored(self, http: HttpRequest, stored: StoredResponse) -> None:
        with self.store.holding(stored):
            await http.respond(200, stored.response)

    async def _follow(self, http: HttpRequest, stored: StoredResponse, first: int) -> None:
        """Send the events from number `first`, and future events as they arrive."""
        events, run = stored.events, self._runs.get(stored)
        assert events is not None
        next_event, disconnected = first, False

        def on_disconnect(_: Exception) -> None:
            nonlocal disconnected
            disconnected = True
            if run is not None:
                run.notify()

        with self.store.holding(stored), http.watch_disconnect(on_disconnect):
            await http.start_stream()
            while not disconnected:
                if batch := _batch(events, next_event):
                    next_event += len(batch)
                    await http.write(b"".join(batch))
                elif stored.ended or run is None:
                    await http.finish()
                    return
                else:
                    await run.changed.wait()
            raise ClientGone


def _batch(events: Sequence[bytes], first: int) -> Sequence[bytes]:
    """Return the events for the next write, from number `first`: about `WRITE_BYTES`."""
    end, size = first, 0
    while end < len(events) and size < WRITE_BYTES:
        size += len(events[end])
        end += 1
    return events[first:end]


def _page_of(stored: StoredResponse, newest_first: bool, after: str | None, limit: int) -> Json:
    """Return a page of the input items of a response, including the earlier conversation. The items
    are generated lazily, so that only the stored responses of the page are decoded."""

    def items() -> Iterator[Json]:
        chain = list(stored.chain())
        for response in chain if newest_first else reversed(chain):
            found = input_items(response) + ([] if response is stored else output_items(response))
            yield from reversed(found) if newest_first else found

    listed = items()
    if after is not None and not any(item["id"] == after for item in listed):
        raise ApiError(400, f"after: there is no item {shown(after)}", param="after")
    page = list(islice(listed, limit))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": next(listed, None) is not None,
    }


def _query(http: HttpRequest, *known: str) -> dict[str, str]:
    """Return the query parameters; raise `ApiError` for unknown ones."""
    sent = parse_qs(http.scope.get("query_string", b"").decode("latin-1"))
    fields = {name.removesuffix("[]"): values[-1] for name, values in sent.items()}
    for name in fields:
        if name not in known:
            message = f"unknown field {shown(name)}{did_you_mean(name, known)}"
            raise ApiError(400, message, param=name, code="unknown_field")
    return fields


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ApiError(400, f"{name} must be true or false, not {shown(text)}", param=name)
    return text == "true"


def _whole_number(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(400, f"{name} must be a whole number, not {shown(text)}", param=name)
    return int(text)
