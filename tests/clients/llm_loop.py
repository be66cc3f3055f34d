"""Simon Willison's `llm`: a prompt, streaming, tools, a schema, through its OpenAI plugin."""

from __future__ import annotations

from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def main(base_url: str, model: str) -> None:
    chat = Chat(
        model_id="ours",
        model_name=model,
        api_base=base_url,
        key="none",
        supports_schema=True,
        supports_tools=True,
    )
    chat.key = "none"
    answer = chat.prompt("Count to five.", stream=True, temperature=0, max_tokens=20)
    assert "".join(answer)
    assert answer.usage().output is not None
    shaped = chat.prompt("Ann is 30 years old.", schema=Person, stream=False, max_tokens=60)
    print("   schema:", Person.model_validate_json(shaped.text()))
    conversation = chat.conversation(tools=[get_weather])
    asked = {"options": {"max_tokens": 40}, "chain_limit": 3}
    chain = conversation.chain("What is the weather in Paris?", **asked)  # if it calls the tool
    print("   chain:", chain.text()[:60].replace("\n", " "))
    again = conversation.prompt("And in Rome?", stream=False, max_tokens=20)
    assert again.text() is not None
