"""Tool-calling agent of smolagents with one tool, over OpenAI's chats.

``python smolagents_agent.py BASE_URL API_KEY`` prints its answer.
"""

import sys

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool  # type: ignore[untyped-decorator]
def add(a: int, b: list[int]) -> str:
    """Add numbers.

    Args:
        a: a number
        b: further numbers
    """
    return str(a + sum(b))


def main(base_url: str, api_key: str) -> str:
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([add], model, verbosity_level=LogLevel.OFF, max_steps=3)
    return str(agent.run("1+2?"))


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
