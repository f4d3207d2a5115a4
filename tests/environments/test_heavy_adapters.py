"""Adapters of packages whose dependencies conflict with the trainer's, in a Python of their own.

`make test-environments` creates that Python and names it; without it these tests are skipped.
"""

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from tidegate import EnvironmentPool
from tidegate.environments.started_worker import child_environment
from tidegate.errors import EnvironmentFailed

HERE = "tests.environments"
ADAPTERS = "tidegate.integrations.environments"
PYTHON = os.environ.get("TIDEGATE_ENVIRONMENTS_PYTHON", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not PYTHON,
        reason="verifiers and openenv-core are in no Python; run `make test-environments`",
    ),
]


@pytest.fixture
async def pool() -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(processes=1, python=PYTHON, call_timeout_s=120.0) as pool:
        yield pool


async def test_a_verifiers_taskset_gives_prompts_and_scores_with_its_rewards(
    pool: EnvironmentPool,
) -> None:
    make = pool.environment(
        f"{ADAPTERS}.verifiers_tasks:Verifiers",
        taskset=f"{HERE}.verifiers_tasksets:Sums",
        settings={"limit": 10},
    )
    for task, answer, reward in [(3, "4", 2.5), (3, " 5 ", 0.0), (13, "4.", 0.5)]:
        environment = make()
        prompt = await environment.reset(seed=0, task=task)
        assert [message["role"] for message in prompt.messages] == ["system", "user"]
        assert prompt.messages[1]["content"] == "3 + 1 ="
        scored = await environment.step(answer)
        assert (scored.reward, scored.done) == (reward, True)
        environment.close()


async def test_a_verifiers_task_that_needs_a_container_is_refused(
    pool: EnvironmentPool,
) -> None:
    environment = pool.environment(
        f"{ADAPTERS}.verifiers_tasks:Verifiers", taskset=f"{HERE}.verifiers_tasksets:Contained"
    )()
    with pytest.raises(EnvironmentFailed, match=r"tests_pass\(\) reads a runtime; it needs a cont"):
        await environment.reset(seed=0, task=0)
    environment.close()


@pytest.fixture
def openenv_url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [PYTHON, "-m", f"{HERE}.openenv_server", str(port)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    answer = ""
    for line in server.stdout:
        answer += line
        if "Uvicorn running" in line:
            break
    else:
        pytest.fail(answer)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.communicate(timeout=60)


async def test_several_environments_use_one_openenv_server_at_once(
    pool: EnvironmentPool, openenv_url: str
) -> None:
    make = pool.environment(
        f"{ADAPTERS}.openenv_client:OpenEnv",
        url=openenv_url,
        action_field="word",
        text_field="shown",
        prompt="Guess. ",
    )
    games = [make() for _ in range(3)]
    begun = [await game.reset(seed=seed, task={}) for seed, game in enumerate(games)]
    assert [each.text for each in begun] == [f"Guess. seed {seed}\n" for seed in range(3)]
    for seed, game in enumerate(games):
        wrong, right = await game.step("x"), await game.step(f"word {seed}")
        assert (wrong.text, wrong.reward, wrong.done) == ("no: x\n", 0.0, False)
        assert (right.text, right.reward, right.done) == ("yes\n", 1.0, True)
        game.close()
