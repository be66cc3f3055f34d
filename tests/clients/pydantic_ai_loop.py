"""pydantic-ai through Anthropic's API and through OpenAI's two APIs: a text, a stream, structured
output by a tool and by a schema, a second turn with the call and its result.

    pip install 'pydantic-ai-slim[anthropic,openai]'
    python tests/clients/pydantic_ai_loop.py http://127.0.0.1:8000/v1 MODEL [KEY]

The texts of a small model are not checked.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import (  # type: ignore[import-not-found]
    Agent,
    ModelProfile,
    NativeOutput,
    ToolOutput,
    UsageLimits,
)
from pydantic_ai.models.anthropic import AnthropicModel  # type: ignore[import-not-found]
from pydantic_ai.models.openai import (  # type: ignore[import-not-found]
    OpenAIChatModel,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.anthropic import AnthropicProvider  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

SETTINGS: Any = {"max_tokens": 80, "temperature": 0}
ABOUT = "Anna is 31 years old. Describe her as JSON."


class Person(BaseModel):
    name: str
    age: int


def main(base_url: str, model: str, api_key: str = "none") -> None:
    root = base_url.removesuffix("/v1")
    anthropic = AnthropicProvider(base_url=root, api_key=api_key)
    openai = OpenAIProvider(base_url=base_url, api_key=api_key)
    # pydantic-ai knows only the names of Claude models as models with structured output.
    profile = ModelProfile(supports_json_schema_output=True)
    asyncio.run(loop(AnthropicModel(model, provider=anthropic, profile=profile), counts=True))
    asyncio.run(loop(OpenAIChatModel(model, provider=openai)))
    asyncio.run(loop(OpenAIResponsesModel(model, provider=openai)))


async def loop(model: Any, counts: bool = False) -> None:
    agent = Agent(model, instructions="Answer in one sentence.", model_settings=SETTINGS)
    limits = UsageLimits(input_tokens_limit=1000, count_tokens_before_request=counts)
    whole = await agent.run("Why is the sky blue?", usage_limits=limits)
    assert whole.output.strip()
    async with agent.run_stream("Why is the sky blue?") as stream:
        streamed = [text async for text in stream.stream_text()][-1]
    assert streamed == whole.output, (streamed, whole.output)

    by_tool = await agent.run(ABOUT, output_type=ToolOutput(Person))
    assert isinstance(by_tool.output, Person)
    by_schema = await agent.run(ABOUT, output_type=NativeOutput(Person))
    assert isinstance(by_schema.output, Person)
    second = await agent.run("And who is that?", message_history=by_tool.all_messages())
    assert second.output.strip()
    print(
        f"{type(model).__name__}: {by_tool.output!r}, {by_schema.output!r}; {second.output[:60]!r}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
