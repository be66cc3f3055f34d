"""`POST /v1/responses`: text in, text out. Nothing is kept: a request brings all it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.outputs import Logprobs, RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.errors import ApiError
from twostroke.serve.generate import Generation
from twostroke.serve.params import responses_params
from twostroke.serve.protocol import ResponsesRequest, TokenizeRequest
from twostroke.serve.response_fields import (
    Json,
    LogprobWriter,
    ResponseHead,
    TokenCounts,
    count_tokens,
    timings,
)
from twostroke.serve.service import Service
from twostroke.serve.sse import LazyList, encode_json, event, long_event

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesGeneration(Generation[ResponsesRequest]):
    request_type = ResponsesRequest
    id_prefix = "resp"

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        super().__init__(service, request)
        _refuse_unsupported(request)
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = LogprobWriter(service.token_names, request.top_logprobs or 0, as_ids)
        self.item_id = ""
        self._fixed: Json = {}  # fields that are the same from the first event to the last

    def prepare(self) -> list[EngineRequest]:
        service, request = self.service, self.request
        params = responses_params(request, service.client.info, service.settings)
        variables: Json = {}
        if request.reasoning and isinstance(request.reasoning.get("effort"), str):
            variables["reasoning_effort"] = request.reasoning["effort"]
        template = TokenizeRequest(chat_template_kwargs=request.chat_template_kwargs)
        ids = service.prompts.render(messages_of(request), template, **variables)
        return [service.prompts.prepare(ids, params, request)]

    def begin(self, head: ResponseHead, requests: Sequence[EngineRequest]) -> None:
        super().begin(head, requests)
        request, params = self.request, requests[0].params
        self.item_id = head.id.replace("resp-", "msg-", 1)
        self._fixed = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "max_output_tokens": request.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "previous_response_id": None,
            "text": {"format": self._format()},
            "truncation": "disabled",
            "background": False,
            "store": False,
            "service_tier": None,
            "user": request.user,
        }

    def _format(self) -> Json:
        form = self.request.text.format if self.request.text else None
        if form is None or form.type == "text":
            return {"type": "text"}
        if form.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "name": form.name or "answer", "schema": form.schema}

    def response(
        self, status: str, output: list[Json], usage: Json | None = None, **more: Any
    ) -> Json:
        named = {"status": status, "output": output, "usage": usage}
        return {**self._fixed, **named, "error": None, "incomplete_details": None, **more}

    def stream_writer(self) -> ResponsesStreamWriter:
        return ResponsesStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        completion = output.outputs[0]
        logprobs = self.logprobs(completion.logprobs)
        item = self.item(completion.text, logprobs, completion.finish_reason)
        return self.ended(item, completion.finish_reason, count_tokens(outputs), output)

    def ended(
        self, item: Json, reason: str | None, counts: TokenCounts, output: RequestOutput
    ) -> Json:
        more: Json = {"timings": timings([output])}
        if reason == "length":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        status = "incomplete" if reason == "length" else "completed"
        return self.response(status, [item], _usage(counts), **more)

    def item(self, text: str, logprobs: LazyList, reason: str | None) -> Json:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if reason == "length" else "completed",
            "content": [self.part(text, logprobs)],
        }

    def part(self, text: str, logprobs: LazyList) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, entries: Logprobs | None) -> LazyList:
        return LazyList(() if entries is None else self._logprobs.chat(entries))


def _usage(counts: TokenCounts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.completion,
    }


class ResponsesStreamWriter:
    """The events of one streamed response, numbered in their order."""

    def __init__(self, generation: ResponsesGeneration) -> None:
        self._generation = generation
        self._number = 0
        self._texts: list[str] = []
        self._num_tokens = 0
        self._logprobs: Logprobs | None = None  # of all of them
        self._last: RequestOutput | None = None
        where = {"item_id": generation.item_id, "output_index": 0, "content_index": 0}
        self._where = where
        delta = {"type": "response.output_text.delta", **where}
        self._delta_head = b"event: response.output_text.delta\ndata: " + encode_json(delta)[:-1]

    def write(self, _: int, output: RequestOutput) -> bytes:
        if output.finished:
            self._last = output
        begin = b"" if self._number else self._begin()
        deltas = []
        for completion in output.outputs:
            self._texts.append(completion.text)
            self._num_tokens += len(completion.token_ids)
            if completion.logprobs is not None:
                self._logprobs = self._logprobs or Logprobs()
                self._logprobs.extend(completion.logprobs)
            logprobs = self._generation.logprobs(completion.logprobs)
            deltas.append(self._delta(completion.text, logprobs))
        return begin + b"".join(deltas)

    def _delta(self, text: str, logprobs: LazyList) -> bytes:
        """One event a token, so only what changes is encoded."""
        number = self._number
        self._number += 1
        listed = encode_json(logprobs)
        return b'%b,"logprobs":%b,"sequence_number":%d,"delta":%b}\n\n' % (
            self._delta_head,
            listed,
            number,
            encode_json(text),
        )

    def _begin(self) -> bytes:
        generation = self._generation
        started = generation.response("in_progress", [])
        empty = {**generation.item("", LazyList(()), None), "status": "in_progress", "content": []}
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event("response.output_item.added", output_index=0, item=empty)
            + self._event(
                "response.content_part.added", **self._where, part=generation.part("", LazyList(()))
            )
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        number = self._number
        self._number += 1
        return event({"type": kind, "sequence_number": number, **content}, kind)

    def end(self) -> Iterator[bytes]:
        generation, last = self._generation, self._last
        assert last is not None
        reason = last.outputs[0].finish_reason
        text = "".join(self._texts)
        counts = count_tokens([last])
        counts.completion = self._num_tokens

        def logprobs() -> LazyList:
            return generation.logprobs(self._logprobs)

        def item() -> Json:
            return generation.item(text, logprobs(), reason)

        part = generation.part(text, logprobs())
        done = "response.incomplete" if reason == "length" else "response.completed"
        events: list[tuple[str, Json]] = [
            ("response.output_text.done", {**self._where, "logprobs": logprobs(), "text": text}),
            ("response.content_part.done", {**self._where, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": item()}),
            (done, {"response": generation.ended(item(), reason, counts, last)}),
        ]
        for number, (kind, content) in enumerate(events, self._number):
            yield from long_event({"type": kind, "sequence_number": number, **content}, kind)

    def fail(self, error: ApiError) -> bytes:
        reason = {"code": "server_error", "message": error.message}
        response = self._generation.response("failed", [], error=reason)
        return self._event("response.failed", response=response)


# ── the request ─────────────────────────────────────────────────────────────────────────────────


def messages_of(request: ResponsesRequest) -> list[Json]:
    """Instructions and input items as a chat's messages."""
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for n, item in enumerate(request.input):
        kind = item.get("type", "message")
        if kind != "message":
            raise ApiError(
                400, f"input[{n}]: items of type {kind!r} are not supported; send messages"
            )
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": _content(item.get("content"), n)})
    return messages


def _content(content: Any, n: int) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise ApiError(400, f"input[{n}].content: parts of type {kind!r} are not supported")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _refuse_unsupported(request: ResponsesRequest) -> None:
    kept = "nothing is kept between requests; send the whole conversation as input"
    instead = {
        "previous_response_id": kept,
        "conversation": kept,
        "background": "wait for the answer, or stream it",
        "prompt": "send instructions and input",
        "context_management": "shorten the input",
        "tools": "use /v1/chat/completions",
        "max_tool_calls": "use /v1/chat/completions",
    }
    for name, advice in instead.items():
        if getattr(request, name):
            raise ApiError(400, f"{name} is not supported; {advice}", param=name)
    if request.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation: only 'disabled' is supported", param="truncation")
