"""The official `anthropic` client: a streamed answer, a tool loop of two turns, structured output.

    pip install anthropic
    python tests/clients/anthropic_loop.py http://127.0.0.1:8000/v1 MODEL [KEY]

The texts of a small model are not checked. The script checks the structure of answers and sends a
tool's result back.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str, api_key: str = "none") -> None:
    root = base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=root, api_key=api_key, max_retries=0)
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]

    with client.messages.stream(model=model, max_tokens=40, messages=asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text, final
    assert final.stop_reason in ("end_turn", "max_tokens"), final
    print(f"streamed {final.usage.output_tokens} tokens: {text[:60]!r}")

    choice: Any = {"type": "tool", "name": "get_weather"}
    for streamed in (False, True):
        ask: Any = {"model": model, "max_tokens": 100, "tools": [WEATHER], "messages": asked}
        if streamed:
            with client.messages.stream(**ask, tool_choice=choice) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**ask, tool_choice=choice)
        assert answer.stop_reason == "tool_use", answer
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert call.input["city"] in ("Rome", "Oslo"), call
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
        turns = [
            *asked,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        second = client.messages.create(**{**ask, "messages": turns}, tool_choice={"type": "none"})
        text = second.content[0].text
        assert text, second
        print(f"called {call.name}({call.input}), then answered {text[:60]!r}")

    cities: list[str] = []

    @anthropic.beta_tool
    def look_up(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "18 degrees, sunny"

    run: Any = {"model": model, "max_tokens": 100, "messages": asked, "tools": [look_up]}
    forced: Any = {"type": "tool", "name": "look_up"}
    list(client.beta.messages.tool_runner(**run, tool_choice=forced, max_iterations=2))
    assert len(cities) == 2, cities
    print(f"the client's own loop looked up {cities}")

    about: list[Any] = [{"role": "user", "content": "Anna is 31 years old. Describe her as JSON."}]
    parsed = client.messages.parse(
        model=model, max_tokens=100, messages=about, output_format=Person
    ).parsed_output
    assert isinstance(parsed, Person), parsed
    print(f"parsed {parsed!r}")
    counted = client.messages.count_tokens(model=model, messages=asked, tools=[WEATHER])
    assert counted.input_tokens > 5
    print(f"counted {counted.input_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
