"""Agent of OpenAI's Agents SDK with one tool, over chat completions or responses.

``python openai_agents_agent.py BASE_URL API_KEY [responses]`` prints its answer.
"""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool  # type: ignore[untyped-decorator]
def add(a: int, b: list[int]) -> str:
    """Add numbers."""
    return str(a + sum(b))


async def main(base_url: str, api_key: str, api: str = "chat") -> str:
    set_tracing_disabled(True)  # it would report this run to OpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
        model = kind("policy", openai_client=client)
        adder = Agent(name="adder", instructions="Add.", model=model, tools=[add])
        return str((await Runner.run(adder, "1+2?")).final_output)


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(main(*sys.argv[1:])))
