"""The official `ollama` client: a streamed answer, a tool loop of two turns, structured output.

    pip install ollama
    python tests/clients/ollama_loop.py http://127.0.0.1:8000/v1 MODEL [KEY]

The texts of a small model are not checked, only the structure of answers. Ollama cannot force a
call. If the model makes no call, the script sends a call of its own back.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ollama

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHORT: Any = {"num_predict": 60, "temperature": 0}


def main(base_url: str, model: str, api_key: str = "none") -> None:
    root = base_url.removesuffix("/v1")
    client = ollama.Client(host=root, headers={"Authorization": f"Bearer {api_key}"})
    assert f"{model}:latest" in [one.model for one in client.list().models]
    print(f"{model} can do {client.show(model).capabilities}")
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]

    parts = list(client.chat(model, asked, options=SHORT, stream=True))
    whole = client.chat(model, asked, options=SHORT)
    text = "".join(part.message.content or "" for part in parts)
    assert text == whole.message.content, (text, whole)
    assert parts[-1].done
    assert parts[-1].eval_count == whole.eval_count
    print(f"streamed {whole.eval_count} tokens: {text[:60]!r}")

    for streamed in (False, True):
        ask: Any = {"model": model, "tools": [WEATHER], "options": SHORT}
        if streamed:
            messages = [part.message for part in client.chat(**ask, messages=asked, stream=True)]
            calls = [call for one in messages for call in one.tool_calls or ()]
        else:
            calls = list(client.chat(**ask, messages=asked).message.tool_calls or ())
        own = bool(calls)
        if not calls:
            function = ollama.Message.ToolCall.Function(
                name="get_weather", arguments={"city": "Rome"}
            )
            calls = [ollama.Message.ToolCall(function=function)]
        turns = [
            *asked,
            ollama.Message(role="assistant", tool_calls=calls),
            {"role": "tool", "content": "18 degrees, sunny", "tool_name": "get_weather"},
        ]
        second = client.chat(**ask, messages=turns)
        assert second.done
        reply = second.message.content
        print(f"{'called' if own else 'was given'} get_weather, then answered {reply!r:.70}")

    about = [{"role": "user", "content": "Anna is 31 years old. Describe her as JSON."}]
    answer = client.chat(model, about, format=PERSON, options={**SHORT, "num_predict": 100})
    person = json.loads(answer.message.content or "")
    assert isinstance(person["age"], int), person
    print(f"parsed {person}")
    text = client.generate(model, "The sky is", raw=True, options=SHORT).response or ""
    assert text
    print(f"went on: {text[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
