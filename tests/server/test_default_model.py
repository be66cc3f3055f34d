"""`twostroke serve` as a user starts it, the real default model, the official client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

PATIENCE_S = 240
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France? One word."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"hours": {"type": "integer", "minimum": 1, "maximum": 12}},
            "required": ["hours"],
            "additionalProperties": False,
        },
    },
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "twostroke", "serve", "--port", str(port)]
    command += ["--max-model-len", "1024", "--api-key", "sesame"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stderr=file, stdout=file)
    try:
        wait_until_healthy(port, server, log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sesame", max_retries=0)
    finally:
        server.terminate()
        assert server.wait(PATIENCE_S) == 0


def wait_until_healthy(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_several_answers_to_one_question_differ(client: openai.OpenAI) -> None:
    """What the model's makers recommend is sampling, which a request without parameters gets."""
    asked: Any = [{"role": "user", "content": "Tell me a story about a robot."}]
    answer = client.chat.completions.create(
        model=model_of(client), messages=asked, n=4, max_tokens=24
    )
    assert len({choice.message.content for choice in answer.choices}) == 4


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    model = model_of(client)
    assert model == "SmolLM2-135M-Instruct"
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=12
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=model_of(client),
        prompt="The capital of France is",
        temperature=0,
        max_tokens=3,
        logprobs=2,
    )
    choice = answer.choices[0]
    assert choice.text.startswith(" Paris")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_of(client),
        messages=CAPITAL,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * len(logprobs.content)
    for entry in logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
    ids=["required", "named"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(
    client: openai.OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    ask: Any = {
        "model": model_of(client),
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "max_tokens": 60,
        "temperature": 0,
    }
    if stream:
        name = arguments = ""
        for chunk in client.chat.completions.create(stream=True, **ask):
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        (call,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name in names
    given = json.loads(arguments)
    if name == "get_time":
        assert given.keys() == {"hours"}
        assert 1 <= given["hours"] <= 12
    else:
        assert given.keys() == {"city", "unit"}


def test_an_answer_follows_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 12},
            "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
        },
        "required": ["capital", "inhabitants"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model_of(client),
        messages=CAPITAL,
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    given = json.loads(answer.choices[0].message.content or "")
    assert given.keys() == {"capital", "inhabitants"}
    assert isinstance(given["inhabitants"], int)


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=model_of(client),
        input="What is the capital of France? One word.",
        temperature=0,
        max_output_tokens=16,
    )
    assert "Paris" in answer.output_text


def test_a_wrong_key_is_the_clients_own_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
