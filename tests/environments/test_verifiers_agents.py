"""Tasks of several turns played by verifiers' own runner, which become rows of a rollout.

The runner starts the harness, a program that calls tools, and sends its requests to the gateway.
`make test-environments` creates the Python that has verifiers; without it this is skipped.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.orchestrator.episodes.talking import CALL, Talk
from tidegate import Endpoint, Gateway
from tidegate.environments.started_worker import child_environment

PYTHON = os.environ.get("TIDEGATE_ENVIRONMENTS_PYTHON", "")
PROGRAM = Path(__file__).parents[2] / "examples" / "verifiers_agent.py"
END = "<|im_end|>"

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON, reason="verifiers is in no Python; run `make test-environments`"
    ),
]


async def reward_of(endpoint: Endpoint, task: object) -> float:
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        str(PROGRAM),
        endpoint.base_url,
        endpoint.api_key,
        env=child_environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return float(output.decode().split()[-1])


@pytest.mark.parametrize(("answer", "reward"), [("It is 3.", 1.0), ("It is 4.", 0.0)])
async def test_a_task_with_tools_run_by_verifiers_stays_in_one_row(
    answer: str, reward: float, tmp_path: Path
) -> None:
    talk, gateway = Talk(tmp_path, "chatml"), Gateway()
    talk.engine.words += [f"I add. {CALL}{END}", f"{answer}{END}"]
    try:
        assert await gateway.episode(reward_of)(talk.episode, None) == reward
    finally:
        gateway.close()
    assert [len(row.turns) for row in talk.rollout.rows] == [2]
    talk.check()
