"""ReAct agent of LangGraph with one tool, over LangChain's client of OpenAI or of Anthropic.

``python langgraph_agent.py BASE_URL API_KEY [anthropic]`` prints its answer.
"""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool  # type: ignore[untyped-decorator]
def add(a: int, b: list[int]) -> str:
    """Add numbers."""
    return str(a + sum(b))


def main(base_url: str, api_key: str, api: str = "openai") -> str:
    if api == "anthropic":
        url = base_url.removesuffix("/v1")
        model = ChatAnthropic(model="policy", base_url=url, api_key=api_key, max_tokens=200)
    else:
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [add])
    said = agent.invoke({"messages": [("user", "1+2?")]})["messages"][-1]
    return str(said.content)


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
