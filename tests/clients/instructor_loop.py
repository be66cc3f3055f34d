"""instructor: structured output by JSON schema and by a tool, whole and streamed."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str) -> None:
    messages = [{"role": "user", "content": "Ann is 30 years old."}]
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(OpenAI(base_url=base_url, api_key="none"), mode=mode)
        asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 80}
        person = client.chat.completions.create(response_model=Person, max_retries=0, **asked)
        assert isinstance(person, Person)
        print(f"   {mode.value}:", person)
    client = instructor.from_openai(
        OpenAI(base_url=base_url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(client.chat.completions.create_partial(response_model=Person, **asked))
    assert isinstance(parts[-1].age, int)
