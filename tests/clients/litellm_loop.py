"""LiteLLM, as an OpenAI-compatible and as a hosted vLLM server: a tool loop, streaming, schemas."""

from __future__ import annotations

import json

import litellm
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        asked = {
            "model": f"{provider}/{model}",
            "api_base": base_url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 60,
        }
        messages = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
        first = litellm.completion(
            messages=messages, tools=[WEATHER], tool_choice="required", **asked
        )
        (call,) = first.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        messages.append(first.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        second = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="none", **asked)
        assert second.choices[0].message.content
        hello = [{"role": "user", "content": "Count to five."}]
        chunks = litellm.completion(messages=hello, stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        ann = [{"role": "user", "content": "Ann is 30 years old."}]
        shaped = litellm.completion(messages=ann, response_format=Person, **asked)
        print(f"   {provider}:", Person.model_validate_json(shaped.choices[0].message.content))
