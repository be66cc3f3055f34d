"""`ResponsesGeneration`: a request of `POST /v1/responses`. It makes the prompt, from the request
and stored responses, and the JSON of the response. Output items and events are in
`responses_output.py`, the routes in `responses_routes.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import uuid4

import msgspec

from twostroke.errors import RequestError, shown
from twostroke.outputs import RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.api.responses.response_store import ResponseStore, StoredResponse
from twostroke.serve.api.responses.responses_input import (
    chat_request,
    messages_of,
    namespaces_of,
    places_to_cut,
    read_items,
)
from twostroke.serve.api.responses.responses_output import (
    OutputItems,
    ResponseWriter,
    item_id,
    response_of_item,
    usage_json,
)
from twostroke.serve.error_responses import ApiError, retry_after
from twostroke.serve.fields.protocol import ChatRequest, ResponsesRequest, ResponsesTool
from twostroke.serve.fields.response_json import (
    Json,
    LogprobWriter,
    ResponseHead,
    TokenCounts,
    count_tokens,
    encode_json,
    timings,
)
from twostroke.serve.generation.conversation import ConversationGeneration
from twostroke.serve.generation.service import Service

TOO_LONG = "context_length_exceeded"


class NoRoom(ApiError):  # noqa: N818
    """There is no room to store a background response."""

    def __init__(self, part: str) -> None:
        """`part`: the part of the response that is too long."""
        message = f"there is no room to store {part}; raise --max-stored-response-bytes"
        super().__init__(500, message)


class ResponsesGeneration(ConversationGeneration[ResponsesRequest]):
    request_type = ResponsesRequest
    id_prefix = "resp"
    stored: StoredResponse  # set by `begin`

    def __init__(
        self,
        service: Service,
        request: ResponsesRequest,
        store: ResponseStore,
        owner: int | None = None,
    ) -> None:
        """`owner`: the number of the API key of the request."""
        super().__init__(service, request)
        self._store = store
        self._owner = owner
        self.background = bool(request.background)
        self.streamed = bool(request.stream)
        if self.background:
            self.chat.stream = True  # the status changes with the first output
        as_ids = bool(request.return_tokens_as_token_ids)
        self._namespaces = namespaces_of(request)
        self._logprobs = LogprobWriter(service.token_names, request.top_logprobs or 0, as_ids)
        self._truncated = False  # `truncation` has dropped messages
        self._earlier = self._find_earlier()
        self._previous = self._earlier[-1] if self._earlier else None
        self._referred = self._find_referred()
        self._check_stored_size()
        self._input_items = b""
        self._num_echo_bytes = 0
        self._fixed: Json = {}  # the fields of the response that are equal in all events

    def as_chat(self) -> ChatRequest:
        tools = self.request.tools or []
        self.drop_server_tools([tool.type for tool in tools if not tool.runs_on_client])
        self.request.tools = [tool for tool in tools if tool.runs_on_client]
        return chat_request(self.request)

    # ── stored data ─────────────────────────────────────────────────────────────────────────

    def _find_earlier(self) -> list[StoredResponse]:
        """Return the conversation that the request continues, oldest response first."""
        name = self.request.previous_response_id
        if name is None:
            return []
        last = self._store.get(self._owner, name)
        if last is None:
            raise ApiError(
                400,
                f"previous_response_id: {shown(name)} is not stored (any more); send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if last.status not in ("completed", "incomplete"):
            raise ApiError(
                400,
                f"previous_response_id: {shown(name)} is {last.status}; only a finished "
                "response can be continued",
                param="previous_response_id",
            )
        return list(last.chain())[::-1]

    def _find_referred(self) -> dict[str, StoredResponse]:
        """Return the stored responses of all item_references, by id."""
        content = self.request.input
        found: dict[str, StoredResponse] = {}
        for item in content if isinstance(content, list) else ():
            if item.get("type") == "item_reference" and isinstance(item.get("id"), str):
                response_id, _ = response_of_item(item["id"])
                stored = self._store.get(self._owner, response_id)
                if stored is not None and stored.ended:
                    found[response_id] = stored
        return found

    def _check_stored_size(self) -> None:
        """Apply the limits of a body to the stored responses that the request refers to. With
        `truncation`, drop the oldest responses."""
        bodies = self.service.bodies

        def sizes() -> tuple[int, int]:
            used = {*self._earlier, *self._referred.values()}
            num_bytes = sum(stored.num_bytes for stored in used)
            return num_bytes, sum(stored.json_weight for stored in used)

        num_bytes, weight = sizes()
        while num_bytes > bodies.max_bytes or weight > bodies.max_weight:
            if self.request.truncation != "auto" or not self._earlier:
                raise ApiError(
                    400,
                    f"the stored responses have {num_bytes} bytes and weigh {weight}; "
                    f"the limits are {bodies.max_bytes} and {bodies.max_weight}; start a new "
                    'conversation, or set truncation to "auto"',
                    param="previous_response_id",
                    code=TOO_LONG,
                )
            self._truncated = True
            del self._earlier[: max(1, len(self._earlier) // 8)]
            num_bytes, weight = sizes()
        self.num_stored_bytes = num_bytes

    def holding_stored(self) -> AbstractContextManager[None]:
        return self._store.holding(*self._earlier, *self._referred.values())

    # ── the prompt, off the event loop ──────────────────────────────────────────────────────

    def prepare(self) -> list[EngineRequest]:
        request = self.request
        items = read_items(request.input, self._finder())
        history = [
            item
            for stored in self._earlier
            for item in (*input_items(stored), *output_items(stored))
        ]
        self.chat.messages = messages_of(request.instructions, [*history, *items])
        try:
            if request.store is not False and self._store.max_responses:
                self._input_items = encode_json(items)
            self._fixed = self._echo()
            self._num_echo_bytes = len(encode_json(self._fixed))
        except UnicodeEncodeError:
            raise ApiError(400, "a text of the request has half a surrogate pair") from None
        self._earlier, self._referred = [], {}
        return super().prepare()

    def _finder(self) -> Callable[[str], Json | None]:
        """Return a function that finds an item of the referred stored responses by its id."""
        referred = self._referred

        @lru_cache(None)
        def items_by_id(response_id: str) -> dict[str, Json]:
            stored = referred.get(response_id)
            if stored is None:
                return {}
            return {item["id"]: item for item in input_items(stored) + output_items(stored)}

        return lambda name: items_by_id(response_of_item(name)[0]).get(name)

    def render(self) -> list[int]:
        """Render the prompt. With `truncation`, drop the oldest messages until there is room for
        `max_output_tokens` (default: a quarter of the context, at most half of the context)."""
        if self.request.truncation != "auto":
            return super().render()
        service, chat = self.service, self.chat
        longest = service.client.info.max_model_len
        room = min(self.request.max_output_tokens or longest // 4, longest // 2)
        limit = min(service.prompts.max_tokens, longest - room)
        all_messages = chat.messages
        head, cuts = places_to_cut(all_messages)

        def attempt(start: int) -> list[int] | None:
            """Return the prompt without the messages before `start`; None if it is too long."""
            chat.messages = all_messages[:head] + all_messages[start:]
            try:
                ids = super(ResponsesGeneration, self).render()
            except RequestError as error:
                if error.code == TOO_LONG:
                    return None
                raise
            return ids if len(ids) <= limit else None

        ids = attempt(head)
        if ids is not None or not cuts:
            chat.messages = all_messages
            return super().render() if ids is None else ids
        low, high = 0, len(cuts) - 1  # the range of the first cut that fits
        found: list[int] | None = None
        while low <= high:
            middle = (low + high) // 2
            ids = attempt(cuts[middle])
            if ids is None:
                low = middle + 1
            else:
                found, high = ids, middle - 1
        self._truncated = True
        if found is None:  # even the last turn does not fit: the engine's checks refuse it
            chat.messages = all_messages[:head] + all_messages[cuts[-1] :]
            return super().render()
        return found

    def _echo(self) -> Json:
        """Return the fields that the response repeats, encoded if they may be long."""
        request = self.request
        form = request.text.format if request.text else None
        shown_form: Json = {"type": "text"}
        if form is not None and form.type == "json_schema":
            named = {"name": form.name or "answer", "description": form.description}
            shown_form = {"type": form.type, **named, "schema": form.schema, "strict": form.strict}
        elif form is not None:
            shown_form = {"type": form.type}
        text: Json = {"format": shown_form}
        if request.text and request.text.verbosity is not None:
            text["verbosity"] = request.text.verbosity
        reasoning = request.reasoning
        return {
            "instructions": _raw(request.instructions),
            "metadata": request.metadata or {},
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": _raw("auto" if request.tool_choice is None else request.tool_choice),
            "tools": _raw([_tool_json(tool) for tool in request.tools or ()]),
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "text": _raw(text),
            "top_logprobs": request.top_logprobs or 0,
            "truncation": request.truncation or "disabled",
            "background": self.background,
            "service_tier": None,
            "prompt_cache_key": request.prompt_cache_key,
            "safety_identifier": request.safety_identifier,
            "user": request.user,
        }

    # ── the response ────────────────────────────────────────────────────────────────────────

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        """Open the response in the store. The caller must call `release` afterwards."""
        response_id = head.id.replace("resp-", "resp_", 1)
        if self._store.get(self._owner, response_id) is not None:  # the client reuses a request id
            response_id = f"resp_{uuid4().hex}"
        head = replace(head, id=response_id)
        super().begin(head, requests)
        self.stored = self._open(head.id)
        self._input_items = b""
        self._previous = None
        params = requests[0].params
        first = {"id": head.id, "object": "response", "created_at": head.created}
        sampled = {"temperature": params.temperature, "top_p": params.top_p}
        self._fixed = first | {"model": head.model} | self._fixed | sampled
        self._fixed["store"] = self.stored.keep
        self._fixed["input_truncated"] = self._truncated

    def _open(self, response_id: str) -> StoredResponse:
        """Return a new entry of the store. If there is no room or `store` is false, return an entry
        that is not kept after the request."""
        num_bytes = self._num_echo_bytes
        if self._input_items:
            values = self._owner, response_id, self._previous, self._input_items
            stored = StoredResponse(*values, keep=True, background=self.background)
            if self._store.reserve(stored, num_bytes + len(self._input_items)):
                return stored
        if self.background and not self._store.max_responses:
            message = "background: this server stores no responses (--max-stored-responses)"
            raise ApiError(400, message, param="background")
        stored = StoredResponse(self._owner, response_id, None, b"", keep=False)
        if self.background or not self._store.reserve(stored, num_bytes):
            raise ApiError(
                429,
                "running requests use all the room for stored responses "
                "(--max-stored-responses, --max-stored-response-bytes); try again in a moment",
                code="too_many_bytes",
                headers=retry_after(1),
            )
        return stored

    def release(self) -> None:
        """Release the entry at the end of the request."""
        self._store.release(self.stored)

    def response(
        self, status: str, output: list[Json], usage: Json | None = None, **more: Any
    ) -> Json:
        named = {"status": status, "output": output, "usage": usage}
        return {**self._fixed, **named, "error": None, "incomplete_details": None, **more}

    def new_items(self) -> OutputItems:
        return OutputItems(self.head.id, self._logprobs, self._namespaces)

    def stream_writer(self) -> ResponseWriter:
        return ResponseWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        completion, message = output.outputs[0], self.new_message()
        deltas = message.push(completion.text) + message.flush()
        items = self.new_items()
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        for _ in (*items.push(deltas, completion.logprobs), *items.end(status)):
            pass  # the events are not used
        counts = count_tokens(outputs)
        counts.add_reasoning(self.reasoning_tokens(completion.token_ids))
        return self.ended(status, items, counts, output)

    def ended(
        self, status: str, items: OutputItems, counts: TokenCounts, output: RequestOutput
    ) -> Json:
        """Store the finished response and return it."""
        more: Json = {"timings": timings([output]), "completed_at": int(time.time())}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = usage_json(counts)
        self._keep(self.response(status, items.as_json(False), usage, **more))
        return self.response(status, items.as_json(True), usage, **more)

    def failed(self, items: OutputItems, error: ApiError) -> Json:
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        reason = {"code": codes.get(error.status, "server_error"), "message": error.message}
        return self._stopped(self.response("failed", items.as_json(False), error=reason))

    def cancelled(self, items: OutputItems) -> Json:
        return self._stopped(self.response("cancelled", items.as_json(False)))

    def _stopped(self, response: Json) -> Json:
        if self.background:
            self._keep(response)
        return response

    def _keep(self, response: Json) -> None:
        """Store a response. If there is no room, do not store it; raise `NoRoom` if it is a
        background response."""
        store, stored = self._store, self.stored
        if not stored.keep:
            return
        if store.write(stored, response["status"], encode_json(response)):
            if not self.background:
                store.put(stored)
            return
        response["store"] = self._fixed["store"] = False
        if self.background:
            raise NoRoom("the answer")


def _tool_json(tool: ResponsesTool) -> Json:
    shown_tool: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.tools is not None:
        return shown_tool | {"tools": [_tool_json(inner) for inner in tool.tools]}
    return shown_tool | {"parameters": tool.parameters, "strict": tool.strict}


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode_json(value))


def input_items(stored: StoredResponse) -> list[Json]:
    """Return the input items, each with an id."""
    items: list[Json] = msgspec.json.decode(stored.input_items)
    for n, item in enumerate(items):
        item.setdefault("id", item_id(stored.id, item["type"], f"in{n}"))
    return items


def output_items(stored: StoredResponse) -> list[Json]:
    return read_items(msgspec.json.decode(stored.response)["output"])
