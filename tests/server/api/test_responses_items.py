"""Items of `/v1/responses`: input items as chat messages, output items as typed events."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from twostroke.outputs import Logprobs
from twostroke.plan import TokenLogprobs
from twostroke.serve.api.responses.responses_input import (
    chat_request,
    messages_of,
    namespaces_of,
    places_to_cut,
    read_items,
)
from twostroke.serve.api.responses.responses_output import OutputItems, response_of_item
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import ResponsesRequest, ResponsesTool
from twostroke.serve.fields.response_json import LogprobWriter, TokenNames, encode_json
from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
ITEM: Any = pydantic.TypeAdapter(ResponseOutputItem)
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "c1", "output": "3"}
THOUGHT: Any = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}


def messages(*items: Any, instructions: str | None = None) -> list[Any]:
    return messages_of(instructions, read_items(items))


def text(said: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": said}]


def test_a_turn_of_reasoning_text_and_calls_is_one_message() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    more = {**CALL, "call_id": "c2", "namespace": "n"}
    asked = {"role": "developer", "content": "brief"}
    assert messages(asked, THOUGHT, said, CALL, more, RESULT, instructions="short") == [
        {"role": "system", "content": "short"},
        {"role": "system", "content": text("brief")},
        {
            "role": "assistant",
            "content": text("I look"),
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "n.f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    # Without text, and thought about anew after a result.
    first, result, second = messages(CALL, RESULT, THOUGHT, CALL)
    assert first["content"] == second["content"] == ""
    assert (first.get("reasoning_content"), second["reasoning_content"]) == (None, "hm")
    assert result["role"] == "tool"
    # What was thought of an answer that did not come is not the user's.
    assert messages(THOUGHT, {"role": "user", "content": "x"}) == [
        {"role": "user", "content": text("x")}
    ]


def test_an_item_is_referred_to_once() -> None:
    named = {"type": "item_reference", "id": "fc_a_0"}
    assert read_items([named], {"fc_a_0": CALL}.get) == [{**CALL, "status": "completed"}]
    with pytest.raises(ApiError, match="is referenced twice"):
        read_items([named, named], {"fc_a_0": CALL}.get)
    assert response_of_item("fc_my_own_id_0") == ("resp_my_own_id", "0")
    assert response_of_item("nothing")[0] == "resp_"


def test_the_oldest_may_be_cut_where_no_call_loses_its_result() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    assert places_to_cut([{"role": role} for role in roles]) == (1, [5, 6])
    roles = ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert places_to_cut([{"role": role} for role in roles]) == (1, [2, 4])
    assert places_to_cut([{"role": "user"}]) == (0, [])
    assert places_to_cut([]) == (0, [])


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    inner = [ResponsesTool(type="function", name="open"), ResponsesTool(type="function", name="to")]
    tools = [ResponsesTool(type="namespace", name="door", tools=inner)]
    request = ResponsesRequest(input="", tools=tools)
    chat = chat_request(request)
    assert [tool.function.name for tool in chat.tools or ()] == ["door.open", "door.to"]
    items = new_items(namespaces_of(request))
    list(items.push([ToolCallDelta(0, "c", "door.open")], None))
    list(items.end("completed"))
    (item,) = items.as_json(False)
    assert (item["name"], item["namespace"]) == ("open", "door")
    inner.append(ResponsesTool(type="namespace", name="deeper"))
    with pytest.raises(ApiError, match=r"tools\[0\].tools\[2\]: this server runs no tools of type"):
        chat_request(request)


# ── out ─────────────────────────────────────────────────────────────────────────────────────


def new_items(namespaces: Any = None) -> OutputItems:
    return OutputItems("resp_a", LogprobWriter(TokenNames(None), 1, False), namespaces)


def valid(kind: str, content: Any) -> Any:
    """The event as a type of the official client."""
    encoded = encode_json({"type": kind, "sequence_number": 0, **content})
    return EVENT.validate_json(encoded)


def test_reasoning_text_and_calls_are_items_one_after_the_other() -> None:
    deltas: list[list[Delta]] = [
        [ReasoningDelta("the ")],
        [ReasoningDelta("fox")],
        [ContentDelta("I "), ToolCallDelta(0, "call_1", "f", '{"a"')],
        [ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "call_2", "g", "{}")],
        [ContentDelta("so")],
    ]
    items = new_items()
    events = [valid(*event) for some in deltas for event in items.push(some, None)]
    events += [valid(*event) for event in items.end("incomplete")]
    begin = ["response.output_item.added", "response.content_part.added"]
    end = ["response.content_part.done", "response.output_item.done"]
    called = [f"response.function_call_arguments.{which}" for which in ("delta", "done")]
    said = [f"response.output_text.{which}" for which in ("delta", "done")]
    thought = [f"response.reasoning_text.{which}" for which in ("delta", "done")]
    assert [event.type for event in events] == [
        *begin, thought[0], thought[0], thought[1], *end,
        *begin, *said, *end,
        begin[0], called[0], called[0], called[1], end[1],
        begin[0], *called, end[1],
        *begin, *said, *end,
    ]  # fmt: skip
    ids = ["rs_a_0", "msg_a_1", "fc_a_2", "fc_a_3", "msg_a_4"]
    for event in events:
        place = event.output_index
        assert (event.item.id if hasattr(event, "item") else event.item_id) == ids[place]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    listed = [ITEM.validate_json(encode_json(item)) for item in items.as_json(False)]
    assert listed == done
    assert [item.status for item in listed] == [*["completed"] * 4, "incomplete"]
    assert listed[0].content[0].text == "the fox"
    assert (listed[2].call_id, listed[2].arguments) == ("call_1", '{"a": 1}')
    assert listed[4].content[0].text == "so"


def test_logprobs_go_with_the_text_they_are_of() -> None:
    def one(token: int) -> Logprobs:
        entry = Logprobs()
        entry.add(TokenLogprobs((token, token), (-0.5, -0.5), 1))
        return entry

    items = new_items()
    pushed: list[tuple[list[Delta], int]] = [
        ([ReasoningDelta("x")], 1),
        ([ContentDelta("a")], 2),
        ([], 3),  # held back
        ([ContentDelta("bc")], 4),
        ([ToolCallDelta(0, "c", "f")], 5),
    ]
    events = [valid(*event) for deltas, token in pushed for event in items.push(deltas, one(token))]
    list(items.end("completed"))
    told = [
        [entry.token for entry in event.logprobs]
        for event in events
        if event.type == "response.output_text.delta"
    ]
    assert told == [["token_id:2"], ["token_id:3", "token_id:4"]]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.token for entry in done.logprobs] == ["token_id:2", "token_id:3", "token_id:4"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    items = new_items()
    assert list(items.push([ContentDelta("")], None)) == []
    events = [valid(*event) for event in items.end("completed")]
    assert [event.type for event in events][-1] == "response.output_item.done"
    assert items.as_json(False)[0]["content"][0]["text"] == ""
