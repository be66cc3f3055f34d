"""`/v1/responses` with the official client: tools, stored answers, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.running import Running, running
from tests.tiny import tiny_folder, tiny_llm

EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
COLOURS = ["red", "green", "blue"]
PAINT: Any = {
    "type": "function",
    "name": "paint",
    "description": "Paint the fox.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": COLOURS}},
        "required": ["colour"],
        "additionalProperties": False,
    },
    "strict": True,
}
SLEEP: Any = {"type": "function", "name": "sleep"}
MAX_LEN = 1024
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 24}
CALLING: Any = {**GREEDY, "max_output_tokens": 200}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=MAX_LEN)
    with running(tiny_llm(folder), api_keys=("a", "b")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)


def call_of(answer: Any) -> Any:
    (call,) = [item for item in answer.output if item.type == "function_call"]
    return call


# ── tools ───────────────────────────────────────────────────────────────────────────────────


def test_a_tool_loop_with_items_sent_back_and_with_previous_response_id(
    client: openai.OpenAI,
) -> None:
    asked: Any = [{"role": "user", "content": "the fox"}]
    more: Any = {**CALLING, "tools": [PAINT], "instructions": "be brief"}
    first = client.responses.create(input=asked, tool_choice="required", **more)
    Response.model_validate(first.model_dump(), strict=True)
    assert (first.status, first.store) == ("completed", True)
    assert first.id.startswith("resp_")
    call = call_of(first)
    assert (call.name, call.status) == ("paint", "completed")
    assert json.loads(call.arguments)["colour"] in COLOURS
    assert call.id.startswith("fc_")
    assert call.call_id != call.id
    assert [tool.to_dict() for tool in first.tools] == [PAINT]

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    sent = [*asked, *(item.to_dict() for item in first.output), result]
    by_items = client.responses.create(input=sent, tool_choice="none", **more)
    by_id = client.responses.create(
        input=[result], previous_response_id=first.id, tool_choice="none", **more
    )
    assert by_id.previous_response_id == first.id
    assert by_id.output_text == by_items.output_text != ""
    assert by_id.usage
    assert by_items.usage
    assert first.usage
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > first.usage.input_tokens
    # An item_reference stands for the item.
    named: Any = {"type": "item_reference", "id": call.id}
    by_name = client.responses.create(input=[*asked, named, result], tool_choice="none", **more)
    assert by_name.output_text == by_items.output_text


def test_instructions_are_of_one_request_and_the_input_of_all(client: openai.OpenAI) -> None:
    first = client.responses.create(input="the fox", instructions="long " * 20, **GREEDY)
    second = client.responses.create(input="a dog", previous_response_id=first.id, **GREEDY)
    spoken: Any = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "a dog"},
    ]
    whole = client.responses.create(input=spoken, **GREEDY)
    assert second.output_text == whole.output_text
    assert second.usage
    counted = client.responses.input_tokens.count(
        model="tiny", input="a dog", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    assert whole.usage
    assert second.usage.input_tokens == whole.usage.input_tokens


def test_tool_choice_in_its_forms(client: openai.OpenAI) -> None:
    ask: Any = {**CALLING, "input": "hi", "tools": [PAINT, SLEEP]}
    named = client.responses.create(tool_choice={"type": "function", "name": "sleep"}, **ask)
    assert (call_of(named).name, json.loads(call_of(named).arguments)) == ("sleep", {})
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [SLEEP]}
    assert call_of(client.responses.create(tool_choice=allowed, **ask)).name == "sleep"
    free = client.responses.create(tool_choice="none", max_tool_calls=3, **ask)
    assert [item.type for item in free.output] == ["message"]
    assert free.max_tool_calls == 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "runs no tools of type 'web_search'",
        ),
        ({"tools": [{"type": "mcp", "server_label": "x"}], "tool_choice": "required"}, "no tools"),
        ({"tools": [PAINT], "tool_choice": {"type": "file_search"}}, "'file_search'"),
        (
            {"tools": [PAINT], "tool_choice": {"type": "function", "name": "pant"}},
            "did you mean 'paint'",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [PAINT]}},
            "not among the tools",
        ),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "instructions"),
        ({"include": ["message.output_text.logprob"]}, "did you mean"),
        ({"background": True, "store": False}, "background requires store"),
        ({"previous_response_id": "resp_no"}, "not stored"),
        ({"input": [{"type": "item_reference", "id": "msg_no_0"}]}, "not stored"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "call_id"),
        ({"input": [{"type": "item_reference", "id": []}]}, "not stored"),
        ({"input": [{"type": ["message"]}]}, "are not supported"),
        ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "not supported"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "content is missing"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": []}]}},
            "not among the tools",
        ),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"truncation": "yes"}, "truncation"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    client: openai.OpenAI, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**{**GREEDY, "input": "hi", **more})


def test_fields_that_agents_send_by_default_are_taken(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        input=[
            {"type": "message", "role": "developer", "content": "be brief"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": "secret",
            },
            {"role": "user", "content": "hi"},
        ],
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_key="mine",
        store=False,
        text={"verbosity": "low"},
        **GREEDY,
    )
    assert answer.output_text
    assert answer.store is False
    assert answer.reasoning
    assert answer.reasoning.effort == "low"
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(answer.id)


# ── streams ─────────────────────────────────────────────────────────────────────────────────


def test_a_stream_of_a_call_adds_up_to_the_call(client: openai.OpenAI) -> None:
    ask: Any = {**CALLING, "input": "hi", "tools": [PAINT], "tool_choice": "required"}
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    call = call_of(final)
    assert call.arguments == call_of(client.responses.create(**ask)).arguments
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids | {event.item.id for event in events if hasattr(event, "item")} == {call.id}
    for event in client.responses.create(stream=True, **ask):
        EVENT.validate_python(event.to_dict())  # each has all that its type needs
    kept = client.responses.retrieve(final.id)
    assert (call_of(kept).id, call_of(kept).arguments) == (call.id, call.arguments)
    assert kept.usage == final.usage


def test_a_pydantic_model_is_parsed_from_a_stream_and_a_whole_answer(
    client: openai.OpenAI,
) -> None:
    class Paint(pydantic.BaseModel):
        colour: Literal["red", "green", "blue"]

    ask: Any = {**CALLING, "input": "hi", "text_format": Paint}
    answer = client.responses.parse(**ask)
    assert isinstance(answer.output_parsed, Paint)
    with client.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert answer.text
    assert answer.text.format
    assert answer.text.format.type == "json_schema"


# ── what is stored ──────────────────────────────────────────────────────────────────────────


def test_a_stored_answer_is_got_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(input="the fox", metadata={"a": "b"}, **GREEDY)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    spoken: Any = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    second = client.responses.create(input=spoken, previous_response_id=first.id, **GREEDY)
    pages = client.responses.input_items.list(second.id, limit=2, order="asc")
    items = list(pages)  # the client asks for one page after the other
    assert len(pages.data) == 2
    assert [item.content[0].text for item in items] == [
        "the fox",
        first.output_text,
        "one",
        "two",
    ]
    assert items[1].id == first.output[0].id
    newest = client.responses.input_items.list(second.id, limit=1).data
    assert [item.id for item in newest] == [items[-1].id]
    # An input item can be named, too.
    named: Any = [{"type": "item_reference", "id": items[-1].id}]
    again = client.responses.create(input=named, **GREEDY)
    assert again.output_text == client.responses.create(input="two", **GREEDY).output_text
    # The conversation outlives the answer that it went on from.
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(input="x", previous_response_id=first.id, **GREEDY)
    third = client.responses.create(input="three", previous_response_id=second.id, **GREEDY)
    assert len(list(client.responses.input_items.list(third.id))) == 6


def test_a_request_id_that_is_used_again_names_only_the_first(client: openai.OpenAI) -> None:
    ask: Any = {**GREEDY, "input": "hi", "extra_body": {"request_id": "mine"}}
    first = client.responses.create(**ask)
    second = client.responses.create(previous_response_id=first.id, **ask)
    assert first.id == "resp_mine" != second.id
    assert [client.responses.retrieve(one.id).id for one in (first, second)] == [
        first.id,
        second.id,
    ]


def test_half_a_surrogate_pair_is_refused_wherever_it_is(server: Running) -> None:
    key = {"Authorization": "Bearer a", "Content-Type": "application/json"}
    for more in (
        {"input": "\ud800"},
        {"instructions": "\ud800"},
        {"metadata": {"a": "\ud800"}},
        {"user": "\ud800"},
        {"tools": [{**SLEEP, "description": "\ud800"}], "tool_choice": "none"},
    ):
        body = json.dumps({"input": "hi", "max_output_tokens": 1, **more}).encode()
        assert server.ask("POST", "/v1/responses", body, key)[0] == 400


def test_a_wrong_query_is_refused(server: Running, client: openai.OpenAI) -> None:
    path = f"/v1/responses/{client.responses.create(input='hi', **GREEDY).id}"
    for query, param in (
        ("?stream=maybe", "stream"),
        ("?stream=true", "stream"),  # it was no background stream
        ("?strem=true", "strem"),
        ("?include[]=message.output_text.logprobs", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=nobody", "after"),
    ):
        key = {"Authorization": "Bearer a"}
        status, _, content = server.ask("GET", path + query, headers=key)
        assert (status, json.loads(content)["error"]["param"]) == (400, param)


def test_an_answer_belongs_to_the_key_that_made_it(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="the fox", **GREEDY)
    other = client.with_options(api_key="b")
    for ask in (
        other.responses.retrieve,
        other.responses.delete,
        other.responses.cancel,
        other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            ask(answer.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        other.responses.create(input="x", previous_response_id=answer.id, **GREEDY)
    named: Any = [{"type": "item_reference", "id": answer.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="not stored"):
        other.responses.create(input=named, **GREEDY)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


def test_truncation_leaves_out_the_oldest_messages_until_it_fits(client: openai.OpenAI) -> None:
    turns: Any = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": f"{n} the lazy dog " * 6}
        for n in range(31)
    ]
    ask: Any = {**GREEDY, "instructions": "be brief"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=turns, **ask)
    assert refused.value.code == "context_length_exceeded"
    answer = client.responses.create(input=turns, truncation="auto", **ask)
    assert extra(answer, "input_truncated") is True
    assert answer.usage
    # As little as possible is left out, and the instructions never.
    for left_out in range(2, 31, 2):
        fits = client.responses.create(input=turns[left_out:], truncation="auto", **ask)
        if not extra(fits, "input_truncated"):
            break
    assert fits.usage
    assert answer.usage.input_tokens == fits.usage.input_tokens <= MAX_LEN - 24
    assert answer.output_text == fits.output_text
    # The whole conversation stays stored, and goes on.
    more = client.responses.create(
        truncation="auto", input="go on", previous_response_id=answer.id, **GREEDY
    )
    assert len(list(client.responses.input_items.list(more.id, limit=100))) == 33
    # What cannot be left out is refused as ever.
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="the lazy dog " * 500, truncation="auto", **ask)
    assert refused.value.code == "context_length_exceeded"


def extra(answer: Any, name: str) -> Any:
    """A field that the client does not know."""
    return answer.model_extra[name]
