"""openai-agents with its default model class (the Responses API): a tool loop with and without
streaming, a second turn by previous_response_id and a second turn with all items.

    pip install openai-agents
    python tests/clients/openai_agents_loop.py http://127.0.0.1:8000/v1 MODEL [KEY]

The texts of a small model are not checked. The script checks that the forced tool is called, that
its result is sent back, and that there is an answer.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (  # type: ignore[import-not-found]
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CITIES: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    CITIES.append(city)
    return f"It is sunny in {city}, 21 degrees."


def main(base_url: str, model: str, api_key: str = "none") -> None:
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))
    set_tracing_disabled(True)
    asyncio.run(loop(model))


async def loop(model: str) -> None:

    def agent(tool_choice: str) -> Any:
        settings = ModelSettings(tool_choice=tool_choice, max_tokens=96, temperature=0)
        return Agent(
            name="Weather",
            instructions="Answer in one sentence.",
            model=model,
            model_settings=settings,
            tools=[weather],
        )

    # The first request must call the tool. The agent resets the choice for the next request.
    whole = await Runner.run(agent("required"), "What is the weather in Paris?", max_turns=4)
    assert len(CITIES) == 1, CITIES
    kinds = [item["type"] for item in whole.to_input_list()[1:3]]
    assert kinds == ["function_call", "function_call_output"], kinds
    assert whole.last_response_id is not None
    assert whole.final_output.strip()
    print("whole:", CITIES, "->", whole.final_output)

    streamed = Runner.run_streamed(agent("required"), "What is the weather in Rome?", max_turns=4)
    deltas = []
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            deltas.append(event.data.delta)
    assert len(CITIES) == 2, CITIES
    assert streamed.final_output
    assert "".join(deltas).endswith(streamed.final_output)
    print("streamed:", len(deltas), "deltas ->", streamed.final_output)

    by_id = await Runner.run(
        agent("none"), "And is that warm?", previous_response_id=whole.last_response_id
    )
    again = [*whole.to_input_list(), {"role": "user", "content": "And is that warm?"}]
    by_items = await Runner.run(agent("none"), again)
    assert by_id.final_output == by_items.final_output, (by_id.final_output, by_items.final_output)
    print("second turn, by id and by items:", by_id.final_output)


if __name__ == "__main__":
    main(*sys.argv[1:])
