"""Unchanged agents of other frameworks, each in its own process, become rows of a rollout.

`make test-agents` makes the Python that has the frameworks; without it these tests are skipped.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.orchestrator.episodes.talking import CALL, Talk
from tidegate import Endpoint, Gateway

PYTHON = os.environ.get("TIDEGATE_AGENTS_PYTHON", "")
AGENTS = Path(__file__).parent / "foreign_agents"
END = "<|im_end|>"
WORDS = [f"I add. {CALL}{END}", f"It is 3.{END}"]
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "3"}}</tool_call>'

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON, reason="litellm and agents' frameworks are in no Python; run `make test-agents`"
    ),
]


async def answer_of(arguments: str, endpoint: Endpoint) -> str:
    program, *options = arguments.split()
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(AGENTS / program),
        endpoint.base_url,
        endpoint.api_key,
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().strip()


@pytest.mark.parametrize(
    "arguments",
    [
        "litellm_agent.py",
        "openai_agents_agent.py",
        "openai_agents_agent.py responses",
        "responses_agent.py",
        "anthropic_agent.py",
        "langgraph_agent.py",
        "langgraph_agent.py anthropic",
        "pydantic_ai_agent.py",
        "pydantic_ai_agent.py responses",
        "pydantic_ai_agent.py anthropic",
    ],
)
async def test_an_agent_calls_its_tool_and_every_token_is_in_a_row_once(
    arguments: str, tmp_path: Path
) -> None:
    talk = await played(arguments, WORDS, "It is 3.", tmp_path)
    assert [len(row.turns) for row in talk.rollout.rows] == [2]


async def test_an_agent_that_rewrites_its_history_gets_a_row_for_each_context(
    tmp_path: Path,
) -> None:
    """smolagents sends the calls of earlier turns as text."""
    words = [f"{CALL}{END}", f"{FINAL}{END}"]
    talk = await played("smolagents_agent.py", words, "3", tmp_path)
    assert [len(row.turns) for row in talk.rollout.rows] == [1, 1]


async def played(arguments: str, words: list[str], wanted: str, directory: Path) -> Talk:
    """Have an agent play, check its answer and that each token is in a row once."""
    talk, gateway = Talk(directory, "chatml"), Gateway()
    talk.engine.words += words

    async def play(endpoint: Endpoint, task: object) -> float:
        return float(await answer_of(arguments, endpoint) == wanted)

    try:
        assert await gateway.episode(play)(talk.episode, None) == 1.0
    finally:
        gateway.close()
    assert talk.engine.words == []
    talk.check()
    return talk
