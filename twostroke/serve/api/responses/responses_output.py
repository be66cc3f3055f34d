"""The output of `/v1/responses`: `OutputItems` (reasoning, messages and calls), and
`ResponseWriter`, which writes the events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import ChatRequest
from twostroke.serve.fields.response_json import (
    Encoded,
    Json,
    LazyList,
    LogprobWriter,
    TokenCounts,
    concat,
    count_tokens,
    encode_json,
    event,
    long_event,
)
from twostroke.serve.generation.conversation import AssistantMessage
from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta

_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
Event = tuple[str, Json]  # type and content


def item_id(response_id: str, kind: str, number: int | str) -> str:
    return f"{_PREFIX.get(kind, 'item')}_{response_id.removeprefix('resp_')}_{number}"


def response_of_item(name: str) -> tuple[str, str]:
    """Return the id of an item's response, and the item's number."""
    response_id, _, number = name.partition("_")[2].rpartition("_")
    return f"resp_{response_id}", number


@dataclass(slots=True)
class OutputItem:
    kind: str  # message, reasoning, function_call
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)  # text, or the arguments of a call
    logprobs: Logprobs | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, writer: LogprobWriter | None) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        logprobs = _listed(writer, self.logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def as_json(self, writer: LogprobWriter | None = None) -> Json:
        """Return the item's JSON; without `writer`, it has no log-probabilities. An item in
        progress has no content."""
        shown: Json = {"id": self.id, "type": self.kind, "status": self.status}
        in_progress = self.status == "in_progress"
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name}
            if self.namespace is not None:
                call["namespace"] = self.namespace
            return shown | call | {"arguments": "" if in_progress else self.text}
        shown["content"] = [] if in_progress else [self.part(writer)]
        if self.kind == "reasoning":
            return shown | {"summary": [], "encrypted_content": None}
        return shown | {"role": "assistant"}


class OutputItems:
    """The output items of one response. `push` and `end` change the items and yield the events."""

    def __init__(
        self,
        response_id: str,
        logprobs: LogprobWriter,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """`namespaces`: (name, namespace) of functions, by the joined name that the model uses."""
        self.items: list[OutputItem] = []
        self._response_id = response_id
        self._writer = logprobs
        self._namespaces = namespaces or {}
        self._held: Logprobs | None = None  # of tokens whose text the parser holds back

    @property
    def current(self) -> OutputItem | None:
        last = self.items[-1] if self.items else None
        return last if last is not None and last.status == "in_progress" else None

    def as_json(self, with_logprobs: bool) -> list[Json]:
        return [item.as_json(self._writer if with_logprobs else None) for item in self.items]

    def push(self, deltas: Sequence[Delta], logprobs: Logprobs | None) -> Iterator[Event]:
        if logprobs is not None:
            self._held = self._held or Logprobs()
            self._held.extend(logprobs)
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                if delta.text or self._held:
                    yield from self._text("message", delta.text)
            elif isinstance(delta, ReasoningDelta):
                yield from self._text("reasoning", delta.text)
            else:
                if delta.id is not None:
                    yield from self._begin("function_call", delta.id, delta.name or "")
                if delta.arguments:
                    yield from self._arguments(delta.arguments)
                self._held = None

    def end(self, status: str) -> Iterator[Event]:
        """End the last item, or an empty one, with `status`: "completed" or "incomplete"."""
        if not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Event]:
        yield from self._close("completed")
        index = len(self.items)
        name, namespace = self._namespaces.get(name, (name, None))
        own_id = item_id(self._response_id, kind, index)
        item = OutputItem(kind, own_id, index, call_id, name, namespace)
        self.items.append(item)
        yield "response.output_item.added", {"output_index": index, "item": item.as_json()}
        if kind != "function_call":
            yield "response.content_part.added", {**_place(item), "part": item.part(None)}

    def _close(self, status: str) -> Iterator[Event]:
        item = self.current
        if item is None:
            return
        item.status = status
        index, place, text = item.index, _place(item), item.text
        if item.kind == "function_call":
            done = {"item_id": item.id, "output_index": index, "name": item.name, "arguments": text}
            yield "response.function_call_arguments.done", done
        else:
            done = {**place, "text": text}
            if item.kind == "message":
                done["logprobs"] = _listed(self._writer, item.logprobs)
            yield _TEXT_EVENTS[item.kind] + ".done", done
            yield "response.content_part.done", {**place, "part": item.part(self._writer)}
        yield (
            "response.output_item.done",
            {"output_index": index, "item": item.as_json(self._writer)},
        )

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        item = self.current
        if item is None or item.kind != kind:
            yield from self._begin(kind)
            item = self.items[-1]
        item.texts.append(text)
        delta: Json = {**_place(item), "delta": text}
        if kind == "message":
            held, self._held = self._held, None
            if held is not None:
                item.logprobs = item.logprobs or Logprobs()
                item.logprobs.extend(held)
            delta["logprobs"] = _listed(self._writer, held)
        else:
            self._held = None
        yield _TEXT_EVENTS[kind] + ".delta", delta

    def _arguments(self, text: str) -> Iterator[Event]:
        item = self.items[-1]
        item.texts.append(text)
        place = {"item_id": item.id, "output_index": item.index}
        yield "response.function_call_arguments.delta", {**place, "delta": text}


def _place(item: OutputItem) -> Json:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _listed(writer: LogprobWriter | None, entries: Logprobs | None) -> LazyList:
    return LazyList(() if writer is None or entries is None else writer.chat(entries))


class ResponseSource(Protocol):
    """Makes the JSON of the response for events (implemented by `ResponsesGeneration`). The last
    three methods also store the response."""

    chat: ChatRequest

    def new_message(self) -> AssistantMessage: ...

    def new_items(self) -> OutputItems: ...

    def response(self, status: str, output: list[Json]) -> Json: ...

    def ended(
        self, status: str, items: OutputItems, counts: TokenCounts, output: RequestOutput
    ) -> Json: ...

    def failed(self, items: OutputItems, error: ApiError) -> Json: ...

    def cancelled(self, items: OutputItems) -> Json: ...


class ResponseWriter:
    """Writes the numbered events of one response. `write`, `end` and `fail` return bytes for a
    stream; `events`, `last_events` and `failed_events` return the same events one by one."""

    def __init__(self, generation: ResponseSource) -> None:
        self._generation = generation
        self.output = generation.new_items()
        self._message = generation.new_message()
        self._number = 0
        self._begun = False
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        # Set when all further text belongs to one message: the message, and the bytes that its
        # events begin with.
        self._plain_item: OutputItem | None = None
        self._plain_head = b""

    def write(self, _: int, output: RequestOutput) -> Encoded:
        """Encode an output. Usually this is one text event, of which only the text is encoded."""
        item, completions = self._plain_item, output.outputs
        if item is None or len(completions) != 1 or output.finished:
            return concat(self.events(output))
        text = completions[0].text
        item.texts.append(text)
        self._num_tokens += len(completions[0].token_ids)
        number, self._number = self._number, self._number + 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (
            self._plain_head,
            number,
            encode_json(text),
        )

    def end(self) -> Encoded:
        return concat(self.last_events())

    def fail(self, error: ApiError) -> bytes:
        return b"".join(self.failed_events(error))

    # ── event by event ──────────────────────────────────────────────────────────────────────

    def queued_events(self) -> list[bytes]:
        """Return the events of a background response before it runs."""
        waiting = self._generation.response("queued", [])
        kinds = ("response.created", "response.queued")
        return [self._short(kind, {"response": waiting}) for kind in kinds]

    def events(self, output: RequestOutput) -> list[Encoded]:
        if output.finished:
            self._last = output
        events: list[Encoded] = []
        if not self._begun:
            self._begun = True
            running = {"response": self._generation.response("in_progress", [])}
            kinds = ["response.in_progress"]
            if not self._number:
                kinds.insert(0, "response.created")
            events += [self._short(kind, running) for kind in kinds]
        for completion in output.outputs:
            self._num_tokens += len(completion.token_ids)
            events += self._completion(completion)
        return events

    def _completion(self, completion: CompletionOutput) -> list[Encoded]:
        deltas = self._message.push(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            deltas = deltas + self._message.flush()
        events = [self._encoded(*each) for each in self.output.push(deltas, completion.logprobs)]
        item = self.output.current
        plain = self._message.is_plain and not self._generation.chat.logprobs
        if plain and item is not None and item.kind == "message" and item is not self._plain_item:
            kind = "response.output_text.delta"
            start = encode_json({"type": kind, **_place(item), "logprobs": []})[:-1]
            self._plain_item, self._plain_head = item, f"event: {kind}\ndata: ".encode() + start
        return events

    def last_events(self) -> list[Encoded]:
        last = self._last
        assert last is not None
        status = "incomplete" if last.outputs[0].finish_reason == "length" else "completed"
        events = [self._encoded(*each) for each in self.output.end(status)]
        counts = count_tokens([last])
        counts.completion = self._num_tokens
        counts.add_reasoning(self._message.reasoning_tokens)
        response = self._generation.ended(status, self.output, counts, last)
        return [*events, self._encoded(f"response.{status}", {"response": response})]

    def failed_events(self, error: ApiError) -> list[bytes]:
        self._cut_output()
        response = self._generation.failed(self.output, error)
        failure = {
            "code": error.code or error.error_type,
            "message": error.message,
            "param": error.param,
        }
        return [
            self._short("error", failure),
            self._short("response.failed", {"response": response}),
        ]

    def cancelled_events(self) -> list[bytes]:
        self._cut_output()
        response = self._generation.cancelled(self.output)
        return [self._short("response.cancelled", {"response": response})]

    def _cut_output(self) -> None:
        """Mark the current item as incomplete, without further events for it."""
        if (item := self.output.current) is not None:
            item.status = "incomplete"

    def _short(self, kind: str, content: Json) -> bytes:
        return event(self._numbered(kind, content), kind)

    def _encoded(self, kind: str, content: Json) -> Encoded:
        """Encode an event; events with log-probabilities may be long."""
        if self._generation.chat.logprobs and not kind.endswith("delta"):
            return long_event(self._numbered(kind, content), kind)
        return self._short(kind, content)

    def _numbered(self, kind: str, content: Json) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **content}


def usage_json(counts: TokenCounts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
        "total_tokens": counts.prompt + counts.completion,
    }
