"""Tools and structured output through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.serve.generation.conversation import AssistantMessage
from twostroke.serve.generation.tools import ToolCalls
from twostroke.serve.parsers.deltas import ToolCallDelta

HELLO: Any = [{"role": "user", "content": "the quick fox"}]
COLOURS = ["red", "green", "blue"]
PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the fox.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": COLOURS}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
SLEEP: Any = {"type": "function", "function": {"name": "sleep"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    settings = {"model": "tiny", "messages": HELLO, "max_tokens": 120, "seed": 4, **more}
    return client.chat.completions.create(**settings)


def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tools=[PAINT], tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id
    assert call.type == "function"
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in COLOURS


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "sleep"}}
    (choice,) = ask(client, tools=[PAINT, SLEEP], tool_choice=named).choices
    assert choice.finish_reason == "stop"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("sleep", {})


def test_a_streamed_call_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, tools=[PAINT], tool_choice="required").choices[0].message.tool_calls[0]
    name, arguments, ids, reasons = "", "", [], []
    for chunk in ask(client, tools=[PAINT], tool_choice="required", stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert len(ids) == 1
    assert reasons == ["tool_calls"]


def test_tools_that_need_not_be_called_leave_the_text_alone(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        answer = ask(client, tools=[PAINT], tool_choice=choice, max_tokens=8, temperature=0)
        bare = ask(client, max_tokens=8, temperature=0)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content == bare.choices[0].message.content


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([PAINT], "sometimes", "tool_choice must be"),
        ([PAINT], {"type": "function", "function": {"name": "pant"}}, "did you mean 'paint'"),
        ([PAINT, PAINT], "auto", "two functions"),
        ([{"type": "function", "function": {"name": "a b"}}], "auto", "letters, digits"),
    ],
)
def test_wrong_tools_are_refused(client: openai.OpenAI, tools: Any, choice: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        ask(client, tools=tools, tool_choice=choice)


def test_one_call_only_where_parallel_calls_are_not_wanted() -> None:
    call = '<tool_call>\n{"name": "sleep", "arguments": {}}\n</tool_call>\n'
    tools = ToolCalls("hermes", [SLEEP], "auto")
    for parallel, count in ((True, 2), (False, 1)):
        answer = AssistantMessage(tools, parallel)
        deltas = answer.push("So:" + call + call) + answer.flush()
        assert len(answer.calls) == count
        assert {d.index for d in deltas if isinstance(d, ToolCallDelta)} == set(range(count))
        assert answer.content == "So:"
        assert answer.finish_reason("stop") == "tool_calls"
        assert answer.finish_reason("length") == "length"


def test_an_answer_follows_its_json_schema(client: openai.OpenAI) -> None:
    schema = PAINT["function"]["parameters"]
    wanted = {"type": "json_schema", "json_schema": {"name": "paint", "schema": schema}}
    (choice,) = ask(client, response_format=wanted).choices
    assert json.loads(choice.message.content)["colour"] in COLOURS
    text = {"format": {"type": "json_schema", "name": "paint", "schema": schema}}
    answer = client.responses.create(model="tiny", input="hi", text=text, max_output_tokens=99)
    assert json.loads(answer.output_text)["colour"] in COLOURS


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"choice": COLOURS}, "red|green|blue"),
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
)
def test_structured_outputs_as_vllm_has_them(
    client: openai.OpenAI, kind: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hi", max_tokens=60, extra_body={"structured_outputs": kind}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_a_grammar_that_cannot_be_used_is_refused(client: openai.OpenAI) -> None:
    for kind in ({"regex": "("}, {"regex": "a", "choice": ["b"]}, {}):
        with pytest.raises(openai.BadRequestError, match="structured_outputs"):
            client.completions.create(
                model="tiny", prompt="hi", extra_body={"structured_outputs": kind}
            )
    with pytest.raises(openai.BadRequestError, match="a JSON schema is needed"):
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    # A grammar that another field leaves no token for: found out on the way, and still refused.
    with pytest.raises(openai.BadRequestError, match="no token that the grammar allows"):
        client.completions.create(
            model="tiny",
            prompt="hi",
            extra_body={"structured_outputs": {"json_object": True}, "allowed_token_ids": [4, 5]},
        )
