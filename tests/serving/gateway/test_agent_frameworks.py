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

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON, reason="litellm and agents' frameworks are in no Python; run `make test-agents`"
    ),
]


async def what_it_says(program: str, endpoint: Endpoint) -> str:
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(AGENTS / program),
        endpoint.base_url,
        endpoint.api_key,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode().strip()


@pytest.mark.parametrize("program", ["litellm_agent.py", "openai_agents_agent.py"])
async def test_an_agent_calls_its_tool_and_every_token_is_in_a_row_once(
    program: str, tmp_path: Path
) -> None:
    talk, gateway = Talk(tmp_path, "chatml"), Gateway()
    talk.engine.words += WORDS

    async def play(endpoint: Endpoint, task: object) -> float:
        return float(await what_it_says(program, endpoint) == "It is 3.")

    try:
        assert await gateway.episode(play)(talk.episode, None) == 1.0
    finally:
        gateway.close()
    assert talk.engine.words == []
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()
