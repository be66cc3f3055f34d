"""`/v1/messages` with the official `anthropic` client against a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import msgspec
import pytest
from pydantic import BaseModel

from tests.server.running import JSON, Running, running
from tests.server.scripted import Scripted, scripted_llm
from tests.tiny import tiny_llm
from twostroke.errors import EngineError
from twostroke.outputs import RequestOutput
from twostroke.serve.api.anthropic.messages import MessagesGeneration, MessagesStreamWriter
from twostroke.serve.api.anthropic.messages_request import MessagesRequest

KEY = "a-key"
HELLO: Any = [{"role": "user", "content": "the quick fox"}]
BODY: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12}
ASK: Any = {**BODY, "extra_body": {"temperature": 0}}  # which newer clients have no name for
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")
    with running(llm, served_model_names=("tiny",), api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def test_a_message_is_answered_with_every_field_the_client_knows(
    client: anthropic.Anthropic,
) -> None:
    answer = client.messages.create(**ASK)
    assert answer.id.startswith("msg-")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 12
    counted = client.messages.count_tokens(model="tiny", messages=HELLO)
    read = answer.usage.cache_read_input_tokens
    assert read is not None
    assert counted.input_tokens == answer.usage.input_tokens + read


def test_a_stream_says_the_same_in_one_delta_a_token(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 12
    begin, *_, end, stop = [kind for kind in kinds if not kind.startswith("content_block")]
    assert (begin, end, stop) == ("message_start", "message_delta", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert 1 < kinds.count("content_block_delta") <= 12


def test_the_events_are_named_as_their_types(server: Running) -> None:
    headers = {**JSON, "x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    _, names, content = server.ask("POST", "/v1/messages", {**BODY, "stream": True}, headers)
    assert names["content-type"].startswith("text/event-stream")
    events = [part.split("\n") for part in content.decode().split("\n\n")[:-1]]
    for name, data in events:
        kind = json.loads(data.removeprefix("data: "))["type"]
        assert name == f"event: {kind}"
    assert [name for name, _ in events[:3]] == [
        "event: message_start",
        "event: ping",
        "event: content_block_start",
    ]


def test_a_repeated_prompt_counts_as_read_from_the_cache(client: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": "a small model " * 9, "cache_control": {"type": "ephemeral"}}
    ]
    first = client.messages.create(**ASK, system=system).usage
    second = client.messages.create(**ASK, system=system).usage
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK).content[0].text
    stop = next(whole[n : n + 2] for n in range(3, 12) if whole[n : n + 2].isascii())
    answer = client.messages.create(**ASK, stop_sequences=["no such text", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole[: whole.index(stop)]


def test_an_answer_that_fills_the_context_says_so(client: anthropic.Anthropic) -> None:
    stream = client.messages.create(
        **{**ASK, "max_tokens": 100_000, "messages": [{"role": "user", "content": "x " * 100}]},
        stream=True,
    )
    (end,) = [event for event in stream if event.type == "message_delta"]
    assert end.delta.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_sent_back(
    client: anthropic.Anthropic, choice: Any, streamed: bool
) -> None:
    ask: Any = {**ASK, "max_tokens": 120, "tools": [WEATHER], "tool_choice": choice}
    if streamed:
        with client.messages.stream(**ask) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input["place"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and tomorrow?"}]},
    ]
    second = client.messages.create(**{**ASK, "messages": turns}, tools=[WEATHER])
    assert second.content[0].type == "text"


def test_one_call_at_a_time_where_parallel_use_is_switched_off(server: Running) -> None:
    request = _decoded({**BODY, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert MessagesGeneration(server.app.service, request).chat.parallel_tool_calls is False
    none = _decoded({**BODY, "tool_choice": {"type": "none"}})
    assert MessagesGeneration(server.app.service, none).chat.tool_choice == "none"


class Place(BaseModel):
    place: Literal["Rome", "Oslo"]


def test_structured_output_is_parsed_by_the_client(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(**{**ASK, "max_tokens": 60}, output_format=Place)
    assert answer.parsed_output is not None
    assert answer.parsed_output.place in ("Rome", "Oslo")
    older = {"output_format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    text = client.messages.create(**{**BODY, "max_tokens": 60}, extra_body=older).content[0].text
    assert json.loads(text)["place"] in ("Rome", "Oslo")


def test_an_assistants_last_message_is_gone_on_with(client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    plain = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    count = client.messages.count_tokens(model="tiny", messages=begun).input_tokens
    assert plain < count < plain + len("jumps over") + 1  # no end of turn, no new turn


def test_blocks_of_a_conversation_read_as_chat_messages(server: Running) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "sunny"}],
                    "is_error": False,
                },
                {"type": "text", "text": "thanks"},
            ],
        },
    ]
    generation = MessagesGeneration(
        server.app.service, _decoded({**BODY, "system": "be brief", "messages": messages})
    )
    generation.count_tokens()
    call = {"name": "weather", "arguments": '{"place": "Rome"}'}
    assert generation.chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]


def chat_messages(server: Running, **body: Any) -> list[Any]:
    generation = MessagesGeneration(server.app.service, _decoded({**BODY, **body}))
    generation.count_tokens()
    return generation.chat.messages


def test_a_system_message_within_a_conversation_joins_its_neighbour(server: Running) -> None:
    def said(role: str, content: Any) -> Any:
        return {"role": role, "content": content}

    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "3"}
    messages = chat_messages(
        server,
        system="be brief",
        messages=[
            said("system", "always"),
            said("user", "a"),
            said("system", [{"type": "text", "text": "now"}]),
            said("assistant", "b"),
            said("system", "soon"),
            said("user", "c"),
            said("assistant", [call]),
            said("system", "later"),
            said("user", [result]),
            said("assistant", "d"),
            said("system", "last"),
        ],
    )
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "be brief\n\nalways"),
        ("user", "a\n\nnow"),
        ("assistant", "b"),
        ("user", "soon\n\nc"),
        ("assistant", ""),
        ("tool", "3\n\nlater"),
        ("assistant", "d"),
        ("user", "last"),
    ]


def test_what_a_program_is_billed_by_is_no_part_of_the_prompt(server: Running) -> None:
    billed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12;"}
    rest = {"type": "text", "text": "be brief"}
    assert chat_messages(server, system=[billed, rest])[0]["content"] == "be brief"
    assert chat_messages(server, system=f"{billed['text']}\nbe brief")[0]["content"] == "be brief"
    assert chat_messages(server, system=[billed])[0]["role"] == "user"


def _decoded(body: Any) -> MessagesRequest:
    return msgspec.convert(body, MessagesRequest)


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(server: Running, kind: str, thinks: bool) -> None:
    request = _decoded({**BODY, "thinking": {"type": kind, "budget_tokens": 1024}})
    chat = MessagesGeneration(server.app.service, request).chat
    assert chat.chat_template_kwargs == {"enable_thinking": thinks, "thinking": thinks}


# ── a model that thinks, speaks and calls ───────────────────────────────────────────────────────

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>'
SAID = "<think>hm</think>I look" + CALLED % "Rome" + CALLED % "Oslo"


@pytest.fixture(scope="module", params=["qwen3", None])
def thinking(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[anthropic.Anthropic, Scripted, str | None]]:
    """With and without a reasoning parser."""
    tags = ["<think>", "</think>"]
    llm, model = scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATE, tags)
    with running(llm, reasoning_parser=request.param, served_model_names=("model",)) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        yield client, model, request.param


def told(client: anthropic.Anthropic, **more: Any) -> Any:
    """The answer. The streamed answer must be equal."""
    ask: Any = {"model": "model", "max_tokens": 150, "messages": HELLO, **more}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        for event in stream:
            if event.type == "content_block_start":
                assert not getattr(event.content_block, "input", None)
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    shown = [block.to_dict() for block in whole.content]
    streamed = [block.to_dict() for block in final.content]
    for block in (*shown, *streamed):
        block.pop("id", None)  # a call's, which is never the same
        block.pop("parsed_output", None)
    assert streamed == shown
    return whole


def test_thoughts_text_and_calls_are_blocks_in_their_order(
    thinking: tuple[anthropic.Anthropic, Scripted, str | None],
) -> None:
    client, model, parser = thinking
    model.write(SAID)
    answer = told(client, tools=[WEATHER])
    assert answer.stop_reason == "tool_use"
    *spoken, rome, oslo = [block.to_dict() for block in answer.content]
    assert (rome["input"], oslo["input"]) == ({"place": "Rome"}, {"place": "Oslo"})
    assert rome["id"] != oslo["id"]
    if parser is None:
        assert spoken == [{"type": "text", "text": "<think>hm</think>I look"}]
        assert answer.usage.output_tokens_details is None
    else:
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        assert spoken == [thought, {"type": "text", "text": "I look"}]
        assert answer.usage.output_tokens_details.thinking_tokens == len(model.encode("hm"))
    one_call: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert told(client, tools=[WEATHER], tool_choice=one_call).content[-1].input["place"] == "Rome"

    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        for call in answer.content[-2:]
    ]
    turns = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    model.write("3 in Rome")
    second = told(client, tools=[WEATHER], messages=turns)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "3 in Rome")


def test_thinking_ends_with_its_budget(
    thinking: tuple[anthropic.Anthropic, Scripted, str | None],
) -> None:
    client, model, parser = thinking
    model.write("<think>the quick fox and the dog</think>the end")
    answer = told(client, thinking={"type": "enabled", "budget_tokens": 3})
    if parser is None:  # nobody knows what is thought: the budget has no effect
        assert answer.content[0].text == "<think>the quick fox and the dog</think>the end"
    else:
        assert answer.usage.output_tokens_details.thinking_tokens == 3
        assert answer.content[1].text == "the end"
    model.write("the end")
    assert told(client, thinking={"type": "disabled"}).content[0].text == "the end"


def test_a_call_that_is_cut_off_says_why(
    thinking: tuple[anthropic.Anthropic, Scripted, str | None],
) -> None:
    client, model, _ = thinking
    model.write(CALLED % "Rome")
    answer = told(client, tools=[WEATHER], max_tokens=len(model.encode(CALLED % "Rome")) - 8)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].name == "weather"


# ── refusals ────────────────────────────────────────────────────────────────────────────────────

IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image' are not supported"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "web_search",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "send the whole conversation"),
        ({"compaction": {"enabled": True}}, "compaction"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: anthropic.Anthropic, body: Any, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**BODY, extra_body=body)
    error: Any = caught.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


def test_the_clients_own_tool_loop_goes_on_without_threads(client: anthropic.Anthropic) -> None:
    asked = []

    @anthropic.beta_tool
    def weather(place: Literal["Rome", "Oslo"]) -> str:
        """The weather of a place."""
        asked.append(place)
        return "sunny"

    choice: Any = {"type": "tool", "name": "weather"}
    ask: Any = {**ASK, "max_tokens": 120, "tools": [weather], "tool_choice": choice}
    runner = client.beta.messages.tool_runner(**ask, max_iterations=2)
    first, second = list(runner)
    assert first.stop_reason == second.stop_reason == "tool_use"
    assert set(asked) <= {"Rome", "Oslo"}
    assert len(asked) == 2


def test_errors_have_the_types_that_the_client_knows(
    server: Running, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="which has tiny"):
        client.messages.create(**{**ASK, "model": "claude"})
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(**ASK)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.BadRequestError, match="tokens are read"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x " * 5000}]})


def test_a_stream_that_fails_ends_with_an_error_event(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, written = MessagesStreamWriter.write, []

    def failing(writer: MessagesStreamWriter, index: int, output: RequestOutput) -> bytes:
        written.append(output)
        if len(written) == 3:
            raise EngineError("lost")
        return plain(writer, index, output)

    monkeypatch.setattr(MessagesStreamWriter, "write", failing)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed") as caught:
        list(client.messages.create(**ASK, stream=True))
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"
