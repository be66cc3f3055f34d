"""The routes of `/v1/responses`: create, also in the background, get, follow, cancel and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from twostroke.errors import nearest, shown
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.responses.response_store import StoredResponse, StoredResponses
from twostroke.serve.api.responses.responses import (
    NoRoom,
    ResponsesGeneration,
    input_items,
    output_items,
)
from twostroke.serve.error_responses import ApiError, ClientGone, as_api_error
from twostroke.serve.fields.protocol import ResponsesRequest
from twostroke.serve.fields.response_fields import Json
from twostroke.serve.generation.generate import GenerateRoute, Generation, ResponseStream
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import WRITE_BYTES, HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.sse import encode_json

PAGE, MAX_PAGE = 20, 100  # OpenAI's, of input items


def responses_routes(service: Service) -> list[Route]:
    routes = ResponsesRoutes(service)
    one = "/v1/responses/{response_id}"
    return [
        Route("POST", "/v1/responses", routes, "Answer an input.", ResponsesRequest),
        Route("POST", "/v1/responses/input_tokens", routes.count, "Its tokens.", ResponsesRequest),
        Route("GET", one, routes.get, "A stored response, or its events (?stream=true)."),
        Route("DELETE", one, routes.delete, "Forget a stored response."),
        Route("POST", f"{one}/cancel", routes.cancel, "Stop one that runs in the background."),
        Route("GET", f"{one}/input_items", routes.input_items, "What it was made from."),
    ]


class Cancelled(Exception):  # noqa: N818
    """A client wants no more of a response."""


class BackgroundRun:
    """A response that is being written while nobody has to wait for it."""

    def __init__(self, generation: ResponsesGeneration, store: StoredResponses) -> None:
        self.generation = generation
        self.stored = generation.stored
        self.writer = generation.stream_writer()
        self.stream: ResponseStream | None = None  # once it runs
        self.changed = asyncio.Event()  # is set for a moment when there are new events, and an end
        self._store = store
        waiting = generation.response("queued", [])
        if not store.write(self.stored, "queued", encode_json(waiting)):
            raise ApiError(429, "there is no room for another stored response; try again later")
        store.put(self.stored)
        if generation.streamed:
            self.stored.events = []
            self._add(self.writer.queued_events())

    def write(self, _: int, output: RequestOutput) -> bytes:
        """Record what is written, instead of sending it."""
        if self.stored.status == "queued":
            running = self.generation.response("in_progress", [])
            self._store.write(self.stored, "in_progress", encode_json(running))
        self._add(self.writer.events(output))
        return b""

    def end(self, error: Exception | None = None) -> None:
        """However it ended, its status says so."""
        try:
            if error is None:
                self._add(self.writer.last_events())
            elif isinstance(error, Cancelled):
                self._add(self.writer.cancelled_events())
            else:
                raise error
        except Exception as raised:
            self._fail(as_api_error(raised))
        self.generation.release()
        self.notify()

    def _fail(self, error: ApiError) -> None:
        following = self.stored.events
        if isinstance(error, NoRoom):
            self._store.drop_events(self.stored)
        try:
            events = self.writer.failed_events(error)
        except NoRoom:  # not even for that
            self._store.remove(self.stored)
            self.stored.status, events = "failed", []
        if following is None:
            return
        for event in events:
            if self.stored.events is None or not self._store.add_event(self.stored, event):
                self._store.drop_events(self.stored)
                following.append(event)  # only for those who follow now

    def _add(self, events: Sequence[Any]) -> None:
        if self.stored.events is None:
            return
        for event in events:
            if not self._store.add_event(self.stored, event):
                raise NoRoom("its events are")
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed.clear()


class ResponsesRoutes(GenerateRoute):
    def __init__(self, service: Service) -> None:
        super().__init__(service, ResponsesGeneration)
        settings = service.settings
        self.store = StoredResponses(
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
            await self._give(http, run.stored)

    async def count(self, http: HttpRequest) -> None:
        """How many tokens the model would read; nothing is run or stored."""
        generation, requests = await self.prepare(http)
        assert isinstance(generation, ResponsesGeneration)
        generation.release()
        (request,) = requests
        told = {"object": "response.input_tokens", "input_tokens": len(request.prompt_token_ids)}
        await http.respond_json(told)

    async def _start(
        self, http: HttpRequest, generation: ResponsesGeneration, requests: Sequence[EngineRequest]
    ) -> BackgroundRun:
        """Set a response going that needs no client. Its refusal is raised."""
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
            self.store.remove(run.stored)  # nobody has its id
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
        name = run.stored.id
        try:
            async with self.running(http, requests, name, run.write, without_client=True) as stream:
                run.stream = stream
                started.set_result(None)
                await stream.next_chunks()  # nothing is ready until it has ended: `write` keeps it
        except Exception as raised:
            error = raised
        del self._runs[run.stored]
        run.end(error)
        if not started.done():
            assert error is not None
            started.set_exception(as_api_error(error))

    # ── what is stored ──────────────────────────────────────────────────────────────────────

    def _find(self, http: HttpRequest) -> StoredResponse:
        name = http.path_params["response_id"]
        stored = self.store.get(http.key_number, name)
        if stored is None:
            message = f"there is no response {shown(name)}; it was not stored, or is no more"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored

    async def get(self, http: HttpRequest) -> None:
        query = _query(http, "stream", "starting_after", "include", "include_obfuscation")
        stored = self._find(http)
        if query.get("include"):
            message = "include: nothing is stored that would have to be asked for"
            raise ApiError(400, message, param="include")
        if not _flag(query, "stream"):
            await self._give(http, stored)
            return
        if stored.events is None:
            raise ApiError(
                400,
                "stream: only a response that was created with both background and stream has "
                "events to follow; get it without stream",
                param="stream",
            )
        await self._follow(http, stored, _whole(query, "starting_after", -1) + 1)

    async def delete(self, http: HttpRequest) -> None:
        stored = self._find(http)
        self.store.remove(stored)
        if (run := self._runs.get(stored)) is not None and run.stream is not None:
            run.stream.fail(Cancelled())
        await http.respond_json({"id": stored.id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> None:
        stored = self._find(http)
        if not stored.background:
            message = "only a response that was created with background can be cancelled"
            raise ApiError(400, f"{message}; close the connection of another", param="response_id")
        if (run := self._runs.get(stored)) is not None and run.stream is not None:
            run.stream.fail(Cancelled())
            while not stored.ended:
                await run.changed.wait()
        await self._give(http, stored)

    async def input_items(self, http: HttpRequest) -> None:
        query = _query(http, "after", "limit", "order", "include")
        stored = self._find(http)
        limit = _whole(query, "limit", PAGE)
        if not 1 <= limit <= MAX_PAGE:
            raise ApiError(400, f"limit must be from 1 to {MAX_PAGE}", param="limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, 'order must be "asc" or "desc"', param="order")
        page = partial(_page_of, stored, order == "desc", query.get("after"), limit)
        num_bytes = sum(one.num_bytes for one in stored.chain())
        with self.store.holding(stored):
            listed = await self._service.prompts.off_loop(None, num_bytes, page)
        await http.respond_json(listed)

    async def _give(self, http: HttpRequest, stored: StoredResponse) -> None:
        with self.store.holding(stored):
            await http.respond(200, stored.response)

    async def _follow(self, http: HttpRequest, stored: StoredResponse, at: int) -> None:
        """Send the events from number `at` on, those that are there and those to come."""
        events, run = stored.events, self._runs.get(stored)
        assert events is not None
        gone = False

        def leave(_: Exception) -> None:
            nonlocal gone
            gone = True
            if run is not None:
                run.notify()

        with self.store.holding(stored), http.watch_disconnect(leave):
            await http.start_stream()
            while not gone:
                if batch := _batch(events, at):
                    at += len(batch)
                    await http.write(b"".join(batch))
                elif stored.ended or run is None:
                    await http.finish()
                    return
                else:
                    await run.changed.wait()
            raise ClientGone


def _batch(events: Sequence[bytes], at: int) -> Sequence[bytes]:
    """Those from `at` on that are written at once."""
    end, size = at, 0
    while end < len(events) and size < WRITE_BYTES:
        size += len(events[end])
        end += 1
    return events[at:end]


def _page_of(stored: StoredResponse, newest_first: bool, after: str | None, limit: int) -> Json:
    """Of the items that a response was made from, those of the conversation before it among
    them. One response after the other is decoded, and no more than the page needs."""

    def items() -> Iterator[Json]:
        chain = list(stored.chain())
        for one in chain if newest_first else reversed(chain):
            some = input_items(one) + ([] if one is stored else output_items(one))
            yield from reversed(some) if newest_first else some

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
    """The fields behind the path's `?`; of several the last."""
    given = parse_qs(http.scope.get("query_string", b"").decode("latin-1"))
    fields = {name.removesuffix("[]"): values[-1] for name, values in given.items()}
    for name in fields:
        if name not in known:
            message = f"unknown field {shown(name)}{nearest(name, known)}"
            raise ApiError(400, message, param=name, code="unknown_field")
    return fields


def _flag(query: dict[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ApiError(400, f"{name} must be true or false, not {shown(text)}", param=name)
    return text == "true"


def _whole(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(400, f"{name} must be a whole number, not {shown(text)}", param=name)
    return int(text)
