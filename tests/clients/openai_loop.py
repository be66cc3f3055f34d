"""OpenAI's client: models, a tool loop of two turns, streaming, structured output, responses."""

from __future__ import annotations

import json

from openai import OpenAI
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model

    messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    asked = {"model": model, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    first = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    messages.append(first.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"})
    second = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert second.choices[0].message.content
    print("   tool loop:", second.choices[0].message.content[:60].replace("\n", " "))

    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count to five."}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=20,
            temperature=0,
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text
    assert chunks[-1].usage.completion_tokens > 0
    print("   stream:", text[:60].replace("\n", " "))

    called = ""
    for chunk in client.chat.completions.create(
        messages=messages[:1], tool_choice="required", stream=True, **asked
    ):
        for delta in chunk.choices[0].delta.tool_calls or ():
            called += delta.function.arguments or ""
    assert json.loads(called)["city"] in ("Paris", "Rome")

    parsed = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Ann is 30 years old. Give name and age."}],
        response_format=Person,
        max_tokens=60,
        temperature=0,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    print("   structured:", parsed.choices[0].message.parsed)

    answer = client.responses.create(model=model, input="Say hello.", max_output_tokens=16)
    assert answer.output_text
    written = client.completions.create(model=model, prompt="The sky is", max_tokens=5, logprobs=2)
    assert len(written.choices[0].logprobs.tokens) == written.usage.completion_tokens
