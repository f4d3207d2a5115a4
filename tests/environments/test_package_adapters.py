"""Adapters of installed environment packages, each in a process of the pool."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate import EnvironmentPool, Observation
from tidegate.environments.pool import PooledEnvironment
from tidegate.errors import EnvironmentFailed, PackageMissing
from tidegate.integrations.environments.packages import package

pytestmark = pytest.mark.wire

HERE = "tests.environments.gymnasium_games"
ADAPTERS = "tidegate.integrations.environments"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(processes=1, call_timeout_s=120.0) as pool:
        yield pool


def gymnasium(pool: EnvironmentPool, env: str, **arguments: Any) -> PooledEnvironment:
    return pool.environment(f"{ADAPTERS}.gymnasium_text:GymnasiumText", env=env, **arguments)()


async def play(
    environment: PooledEnvironment, actions: list[str], *, task: Any = None
) -> list[Observation]:
    """Reset with seed 7 and take the actions; return all observations."""
    answers = [await environment.reset(seed=7, task=task)]
    answers += [await environment.step(action) for action in actions]
    environment.close()
    return answers


# ---------------------------------------------------------------- gymnasium


async def test_gymnasium_actions_are_read_by_name(pool: EnvironmentPool) -> None:
    lake = gymnasium(
        pool,
        "FrozenLake-v1",
        settings={"is_slippery": False},
        prompt="Walk. ",
        actions=["left", "down", "right", "up"],
        describe=f"{HERE}:field",
    )
    way = ["down", "Down ", "right", "sideways", "right", "1", "right"]
    answers = await play(lake, way)
    assert [answer.text for answer in answers] == [
        "Walk. row 0, column 0\n",
        "row 1, column 0\n",
        "row 2, column 0\n",
        "row 2, column 1\n",
        "not an action: 'sideways'; answer with one of left, down, right, up\n",
        "row 2, column 2\n",
        "row 3, column 2\n",
        "row 3, column 3\n",
    ]
    assert [answer.done for answer in answers] == [False] * 7 + [True]
    assert [answer.reward for answer in answers] == [0.0] * 7 + [1.0]


async def test_gymnasium_observations_follow_the_seed_and_are_written_as_numbers(
    pool: EnvironmentPool,
) -> None:
    one, other = [await play(gymnasium(pool, "Blackjack-v1"), ["0"]) for _ in range(2)]
    assert one == other
    assert re.fullmatch(r"\d+ \d+ [01]\n", one[0].text)
    assert one[-1].done


async def test_box_actions_are_read_from_any_text_and_their_count_is_checked(
    pool: EnvironmentPool,
) -> None:
    answers = await play(gymnasium(pool, "Pendulum-v1"), ["push by -1.5!", "1 2", "99"])
    assert len(answers[1].text.split()) == 3
    assert answers[1].reward < 0.0
    assert answers[2].text == "not an action: 2 numbers in '1 2'; answer with 1 numbers\n"
    assert answers[3].text == "not an action: '99'; answer with 1 numbers\n"


async def test_the_environments_time_limit_truncates_the_episode(pool: EnvironmentPool) -> None:
    pole = gymnasium(pool, "CartPole-v1", settings={"max_episode_steps": 3})
    answers = await play(pole, ["0", "1", "0"])
    assert [(each.done, each.truncated) for each in answers[1:]] == [
        (False, False),
        (False, False),
        (True, True),
    ]


async def test_a_users_environment_with_text_actions_and_dict_observations_is_registered(
    pool: EnvironmentPool,
) -> None:
    words = gymnasium(pool, "tests/Words-v0", imports=HERE)
    answers = await play(words, ["tide", "", "gate"], task={"options": {"word": "gate"}})
    assert [answer.text for answer in answers] == [
        "said: ; left: 1.5 2 (0 1)\n",
        "said: tide; left: 1.5 2 (0 1)\n",
        "not an action: ''; answer with 1 to 8 characters\n",
        "said: gate; left: 1.5 2 (0 1)\n",
    ]
    assert [answer.reward for answer in answers] == [0.0, 0.0, 0.0, 1.0]


async def test_an_unsupported_action_space_needs_a_parse_function(pool: EnvironmentPool) -> None:
    with pytest.raises(EnvironmentFailed, match="can't be read by themselves; give `parse`"):
        await play(gymnasium(pool, "tests/Pairs-v0", imports=HERE), [])
    pairs = gymnasium(pool, "tests/Pairs-v0", imports=HERE, parse=f"{HERE}:pair")
    answers = await play(pairs, ["1", "1,2"])
    assert answers[1].text == "not an action: two numbers, with a comma between\n"
    assert answers[2].reward == 3.0


# ---------------------------------------------------------------- reasoning-gym


async def test_a_reasoning_gym_question_is_scored_by_its_dataset(pool: EnvironmentPool) -> None:
    make = pool.environment(
        f"{ADAPTERS}.reasoning_gym_tasks:ReasoningGym",
        dataset="chain_sum",
        settings={"min_terms": 2, "max_terms": 2, "seed": 3},
        prompt="{question} ",
        answer_tag="answer",
    )
    (question,) = await play(make(), [], task=5)
    terms = re.findall(r"([-+]?) ?(\d+)", question.text)
    total = sum(int(sign + term) for sign, term in terms)
    for answer, reward in [
        (f"It is <answer>{total}</answer>", 1.0),
        (f"<answer>{total + 1}</answer>", 0.0),
        (str(total), 0.0),
    ]:
        prompt, scored = await play(make(), [answer], task=5)
        assert prompt == question
        assert (scored.done, scored.reward == 1.0) == (True, reward == 1.0)
    assert (await play(make(), [], task=6))[0] != question


# ---------------------------------------------------------------- skyrl-gym


async def test_skyrl_gym_returns_messages_and_a_reward_for_each_turn(pool: EnvironmentPool) -> None:
    environment = pool.environment(f"{ADAPTERS}.skyrl_gym_text:SkyRLGym", env="gsm8k_multi_turn")()
    row = {
        "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
        "reward_spec": {"ground_truth": "42"},
        "extra_info": {"max_turns": 3},
    }
    answers = await play(environment, ["41, I think", "#### 41", "#### 42"], task=row)
    assert answers[0].messages == ({"role": "user", "content": "What is 6 times 7?"},)
    assert answers[0].text == "What is 6 times 7?\n"
    assert answers[1].messages[0]["role"] == "user"
    assert [answer.done for answer in answers] == [False, False, False, True]
    rewards = [answer.reward for answer in answers]
    assert rewards[0] == rewards[1] == 0.0 < rewards[2] < rewards[3] == 1.0


# ---------------------------------------------------------------- packages


def test_a_missing_package_error_names_the_distribution_to_install() -> None:
    with pytest.raises(PackageMissing, match="pip install 'no-such-gym'"):
        package("no_such_gym", distribution="no-such-gym")


def test_no_adapter_imports_its_package_before_it_is_used() -> None:
    folder = Path(package(ADAPTERS, distribution="tidegate").__file__).parent
    for path in folder.glob("*.py"):
        lines = [
            line for line in path.read_text().splitlines() if line.startswith(("import", "from"))
        ]
        assert not [line for line in lines if re.search(r"\b(gymnasium|verifiers|openenv)$", line)]
