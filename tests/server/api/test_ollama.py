"""Ollama's API with the official `ollama` client against a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
import ollama
import pytest

from tests.server.running import Running, running
from tests.server.scripted import Scripted, scripted_llm
from tests.tiny import CHAT_TEMPLATE, tiny_llm
from twostroke.errors import EngineError
from twostroke.outputs import RequestOutput
from twostroke.serve.api.ollama.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    chat_messages,
)
from twostroke.serve.api.ollama.ollama_routes import OllamaGenerate, OllamaStreamWriter
from twostroke.serve.fields.body_fields import decode_body

HELLO: Any = [{"role": "user", "content": "the quick fox"}]
GREEDY: Any = {"temperature": 0, "num_predict": 12}
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = tiny_llm(tmp_path_factory.mktemp("tiny") / "tiny")
    with running(llm, served_model_names=("tiny", "org/other:q8")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_a_chat_is_answered_whole_and_in_lines(server: Running, client: ollama.Client) -> None:
    whole = client.chat("tiny", HELLO, options=GREEDY)
    assert whole.model == "tiny"
    assert whole.message.role == "assistant"
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    assert whole.prompt_eval_count
    assert whole.prompt_eval_duration
    assert whole.eval_duration
    assert whole.total_duration
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration
    parts = list(client.chat("tiny", HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12
    assert parts[-1].message.content == ""
    assert parts[-1].created_at
    datetime.fromisoformat(parts[-1].created_at)


def test_an_answer_is_streamed_unless_it_is_wanted_whole(server: Running) -> None:
    body = {"model": "tiny", "messages": HELLO, "options": GREEDY}
    status, headers, content = server.ask("POST", "/api/chat", body)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in content.splitlines()]
    assert len(lines) > 2
    assert lines[-1]["done"] is True
    assert server.post("/api/chat", {**body, "stream": False})["done"] is True


def test_a_text_is_gone_on_with_by_the_template_or_raw(
    server: Running, client: ollama.Client
) -> None:
    plain = client.generate("tiny", "the quick fox", options=GREEDY)
    chat = client.chat("tiny", HELLO, options=GREEDY)
    assert plain.response == chat.message.content
    assert plain.prompt_eval_count == chat.prompt_eval_count
    with_system = client.generate("tiny", "the quick fox", system="be brief", options=GREEDY)
    assert with_system.prompt_eval_count
    assert plain.prompt_eval_count
    assert with_system.prompt_eval_count > plain.prompt_eval_count
    raw = client.generate("tiny", "the quick fox", raw=True, options=GREEDY)
    same = {"model": "tiny", "prompt": "the quick fox", "temperature": 0, "max_tokens": 12}
    assert raw.response == server.post("/v1/completions", same)["choices"][0]["text"]
    parts = list(client.generate("tiny", "the quick fox", raw=True, options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == raw.response


def test_an_empty_prompt_only_asks_for_the_model(server: Running, client: ollama.Client) -> None:
    for answer in (client.generate("tiny"), client.chat("tiny", [])):
        assert (answer.done, answer.done_reason) == (True, "load")
    status, _, content = server.ask("POST", "/api/generate", {"model": "tiny", "keep_alive": "5m"})
    assert (status, json.loads(content)["done_reason"]) == (200, "load")


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "org/other:q8"])
def test_a_name_matches_with_and_without_latest(client: ollama.Client, name: str) -> None:
    assert client.chat(name, HELLO, options={"num_predict": 1}).model == name
    shown = client.show(name)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo
    assert shown.modelinfo["llama.context_length"] == 256
    assert shown.template
    assert "im_start" in shown.template


def test_the_served_models_are_listed(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny:latest", "org/other:q8"]
    running_models = client.ps().models
    assert [model.name for model in running_models] == ["tiny:latest", "org/other:q8"]
    assert running_models[0].context_length == 256
    shown = client.show("tiny")
    details: Any = shown.details
    for one in (details, client.list().models[0].details, running_models[0].details):
        assert one is not None
        assert (one.format, one.family, one.quantization_level) == ("safetensors", "llama", "F32")
        assert (one.parameter_size or "").endswith("M")
    about: Any = shown.modelinfo
    assert about["general.architecture"] == "llama"
    assert about["general.parameter_count"] > 0
    assert about["llama.context_length"] == 256


def test_options_reach_the_sampler(server: Running, client: ollama.Client) -> None:
    whole = client.generate("tiny", "the quick fox", options=GREEDY).response or ""
    stop = next(whole[n : n + 2] for n in range(3, 12) if whole[n : n + 2].isascii())
    cut = client.generate("tiny", "the quick fox", options={**GREEDY, "stop": [stop]})
    assert (cut.response, cut.done_reason) == (whole[: whole.index(stop)], "stop")
    options: Any = {
        "seed": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "num_ctx": 64,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": -1, "mirostat": 0,
        "typical_p": 1.0, "mirostat_tau": 5.0, "temperature": 0.5,
    }  # fmt: skip
    body = msgspec.json.encode({"prompt": "a", "options": options, "think": "high"})
    request, unknown = decode_body(body, OllamaGenerateRequest)
    assert unknown == []
    chat = OllamaGenerate(server.app.service, request).chat
    assert (chat.seed, chat.top_k, chat.top_p, chat.min_p) == (7, 5, 0.9, 0.1)
    assert (chat.repetition_penalty, chat.presence_penalty) == (1.2, 0.5)
    assert (chat.frequency_penalty, chat.max_tokens, chat.temperature) == (0.25, None, 0.5)
    assert (chat.reasoning_effort, chat.stream) == ("high", True)
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}


def test_structured_output(client: ollama.Client) -> None:
    more = {"temperature": 0, "num_predict": 100}
    answer = client.chat("tiny", HELLO, format=SCHEMA, options=more)
    assert json.loads(answer.message.content or "")["place"] in ("Rome", "Oslo")


def test_logprobs_come_with_the_parts(client: ollama.Client) -> None:
    ask: Any = {"logprobs": True, "top_logprobs": 2, "options": GREEDY}
    whole = client.chat("tiny", HELLO, **ask)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == 12
    assert whole.logprobs[0].logprob <= 0
    assert len(whole.logprobs[0].top_logprobs or ()) == 2
    parts = client.chat("tiny", HELLO, stream=True, **ask)
    assert sum(len(part.logprobs or ()) for part in parts) == 12


def test_a_tool_loop_reads_as_chat_messages(server: Running) -> None:
    call = {"function": {"name": "weather", "arguments": {"place": "Rome"}}}
    turns = [
        *HELLO,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call, {**call, "id": "x"}]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
        {"role": "tool", "content": "rainy", "tool_name": "weather"},
    ]
    request = msgspec.convert({"messages": turns}, OllamaChatRequest)
    function = {"name": "weather", "arguments": '{"place": "Rome"}'}
    assert chat_messages(request.messages or []) == [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call00001", "type": "function", "function": function},
                {"id": "x", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "weather"},
        {"role": "tool", "content": "rainy", "tool_call_id": "x", "name": "weather"},
    ]
    body = {"messages": turns, "tools": [WEATHER], "options": GREEDY, "stream": False}
    assert server.post("/api/chat", body)["done"] is True


CALLED = '<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ollama.Client, Scripted]]:
    tags = ["<think>", "</think>"]
    llm, model = scripted_llm(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE, tags)
    with running(llm, reasoning_parser="qwen3", served_model_names=("model",)) as server:
        yield ollama.Client(host=server.url), model


def test_a_tool_loop_with_thoughts_whole_and_streamed(
    thinking: tuple[ollama.Client, Scripted],
) -> None:
    client, model = thinking
    ask: Any = {"model": "model", "tools": [WEATHER], "options": {"num_predict": 150}}
    model.write("<think>hm</think>I look" + CALLED % "Rome" + CALLED % "Oslo")
    whole = client.chat(messages=HELLO, think=True, **ask)
    said = whole.message
    assert (said.thinking, said.content) == ("hm", "I look")
    assert said.tool_calls
    assert [call.function.name for call in said.tool_calls] == ["weather", "weather"]
    assert [call.function.arguments for call in said.tool_calls] == [
        {"place": "Rome"},
        {"place": "Oslo"},
    ]
    parts = list(client.chat(messages=HELLO, think=True, stream=True, **ask))
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "I look"
    calls = [list(part.message.tool_calls or ()) for part in parts]
    streamed = [call.function for some in calls for call in some]
    assert streamed == [call.function for call in said.tool_calls]
    assert max(map(len, calls)) == 1  # each when it is complete
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", whole.eval_count)

    results = [{"role": "tool", "content": "3", "tool_name": "weather"}] * 2
    model.write("3 in Rome")
    second = client.chat(messages=[*HELLO, said, *results], **ask)
    assert (second.message.content, second.message.tool_calls) == ("3 in Rome", None)
    model.write("<think>hm</think>well")
    parts = list(client.generate("model", "a", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "hm"
    assert "".join(part.response or "" for part in parts) == "well"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "images"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "filling in the middle"),
        ("/api/generate", {"prompt": "a", "options": {"mirostat": 2}}, "mirostat"),
        ("/api/generate", {"prompt": "a", "options": {"tfs_z": 0.5}}, "tfs_z"),
        ("/api/generate", {"prompt": "a", "format": "xml"}, "format"),
        (
            "/api/generate",
            {"prompt": "a", "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
            "repeat_last_n",
        ),
        ("/api/chat", {"messages": [{"content": "a"}]}, "role"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Running, path: str, body: Any, words: str
) -> None:
    status, _, content = server.ask("POST", path, body)
    assert status == 400
    error = json.loads(content)
    assert list(error) == ["error"]
    assert words in error["error"]


def test_a_body_need_not_be_declared_as_json_unless_a_browser_sends_it(server: Running) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "options": {"num_predict": 1}}).encode()
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert server.ask("POST", "/api/generate", body, headers)[0] == 200
        page = {**headers, "Origin": "https://there.example"}
        assert server.ask("POST", "/api/generate", body, page)[0] == 415
    body = json.dumps({"prompt": "a", "n_predict": 1}).encode()
    assert server.ask("POST", "/completion", body, {})[0] == 200
    assert server.ask("POST", "/v1/completions", body, {})[0] == 415


def test_models_are_neither_fetched_nor_changed(server: Running, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not fetched") as caught:
        client.pull("llama3")
    assert caught.value.status_code == 501
    for act in (
        lambda: client.push("tiny"),
        lambda: client.create("new", from_="tiny"),
        lambda: client.copy("tiny", "new"),
        lambda: client.delete("tiny"),
        lambda: client.embed("tiny", "a"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            act()
        assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat("llama3", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.show("llama3")
    assert server.ask("GET", "/api/version")[0] == 200


def test_a_stream_that_fails_ends_with_a_line_that_says_why(
    client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, written = OllamaStreamWriter.write, []

    def failing(writer: OllamaStreamWriter, index: int, output: RequestOutput) -> bytes:
        written.append(output)
        if len(written) == 3:
            raise EngineError("lost")
        return plain(writer, index, output)

    monkeypatch.setattr(OllamaStreamWriter, "write", failing)
    with pytest.raises(ollama.ResponseError, match="the engine failed"):
        list(client.chat("tiny", HELLO, options=GREEDY, stream=True))
