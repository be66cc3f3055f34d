"""LangChain: an agent's tool loop, streaming, structured output."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}, 21 degrees."


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=60, max_retries=0
    )
    messages = [HumanMessage("What is the weather in Paris? Use the tool.")]
    first = chat.bind_tools([get_weather], tool_choice="required").invoke(messages)
    assert first.tool_calls[0]["name"] == "get_weather"
    messages.append(first)
    for call in first.tool_calls:
        messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    second = chat.bind_tools([get_weather], tool_choice="none").invoke(messages)
    assert second.content
    print("   tool loop:", second.content[:60].replace("\n", " "))

    chunks = list(chat.stream("Count to five.", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)

    person = chat.with_structured_output(Person, method="json_schema").invoke(
        "Ann is 30 years old."
    )
    assert isinstance(person, Person)
    print("   structured:", person)
