"""Agent of Pydantic AI with one tool, over OpenAI's chats or responses, or Anthropic's messages.

``python pydantic_ai_agent.py BASE_URL API_KEY [responses|anthropic]`` prints its answer.
"""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def main(base_url: str, api_key: str, api: str = "chat") -> str:
    if api == "anthropic":
        url = base_url.removesuffix("/v1")
        model = AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=api_key))
    else:
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
        model = kind("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, instructions="Add.")

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def add(a: int, b: list[int]) -> str:
        """Add numbers."""
        return str(a + sum(b))

    return str(agent.run_sync("1+2?").output)


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
