"""LlamaIndex: a tool loop, streaming, structured output."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str) -> None:
    llm = OpenAILike(
        model=model,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    tool = FunctionTool.from_defaults(get_weather)
    asked = ChatMessage(role="user", content="What is the weather in Paris? Use the tool.")
    first = llm.chat_with_tools([tool], chat_history=[asked], tool_required=True)
    (call,) = llm.get_tool_calls_from_response(first)
    assert call.tool_name == "get_weather"
    result = ChatMessage(
        role="tool",
        content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    second = llm.chat([asked, first.message, result])
    assert second.message.content
    print("   tool loop:", second.message.content[:60].replace("\n", " "))
    pieces = [piece.delta for piece in llm.stream_chat([ChatMessage("Count to five.")])]
    assert "".join(filter(None, pieces))
    assert llm.complete("The sky is").text
    person = llm.structured_predict(Person, _prompt())
    assert isinstance(person, Person)
    print("   structured:", person)


def _prompt():
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate("Ann is 30 years old.")
