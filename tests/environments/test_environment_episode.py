"""Episodes in environments: seeds by group, sums of rewards, limits, and resumed runs."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.environments.games import Hunt
from tests.environments.test_pool import wait_until_closed
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template
from tests.orchestrator.episodes.engine_double import QuietEngines
from tidegate import Environment, EnvironmentPool, Observation, environment_episode
from tidegate.environments.environment import chat
from tidegate.environments.environment_episode import Chat, TurnLimits, group_seed
from tidegate.errors import ConfigError, EnvironmentFailed
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.model_files import read_model_files
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.testing import ServeInTests, TurnRequest
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire

GAMES = "tests.environments"
LETTERS = "abcdefgh"


def searches(request: TurnRequest) -> str:
    """A model that halves the remaining range."""
    left, tried = LETTERS, ""
    for character in request.text.partition(": ")[2]:
        if character == "<":
            left = left[: left.index(tried)]
        elif character == ">":
            left = left[left.index(tried) + 1 :]
        else:
            tried = character
    return left[len(left) // 2]


# ---------------------------------------------------------------- rewards and limits


async def test_the_episode_reward_is_the_sum_of_the_environments_rewards(
    tidegate_serve: ServeInTests,
) -> None:
    episode = environment_episode(Hunt, max_turns=4, max_tokens=1)
    async with tidegate_serve(says=searches) as rollouts:
        evaluation = await rollouts.evaluate(range(20), episode=episode)
    assert set(evaluation.rewards) <= {1.0, 0.875, 0.75, 0.625}
    assert len(set(evaluation.rewards)) > 2
    assert (episode.counts.begun, episode.counts.ended) == (20, 20)
    rewards = [reward for reward in evaluation.rewards if reward is not None]
    assert episode.counts.turns == sum(round((1.0 - reward) / 0.125) + 1 for reward in rewards)


async def test_an_episode_out_of_turns_keeps_the_reward_so_far(
    tidegate_serve: ServeInTests,
) -> None:
    episode = environment_episode(Hunt, max_turns=3, max_tokens=1)
    async with tidegate_serve(says="z") as rollouts:
        evaluation = await rollouts.evaluate([0], episode=episode)
    assert evaluation.rewards == [-0.375]
    assert episode.counts.out_of_turns == 1


async def test_an_episode_ends_when_its_context_is_full(tidegate_serve: ServeInTests) -> None:
    requested: list[int] = []

    def says(request: TurnRequest) -> list[int]:
        requested.append(request.max_tokens)
        return [122] * request.max_tokens

    episode = environment_episode(Hunt, max_turns=9, max_tokens=4, context_tokens_max=12)
    async with tidegate_serve(says=says) as rollouts:
        evaluation = await rollouts.evaluate([0], episode=episode)  # "0: " takes 3
    assert requested == [
        4,
        4,
    ]  # 3 + 4, a ">" or "<", 4 more: nothing is left for the next one
    assert evaluation.rewards == [-0.25]
    assert episode.counts.out_of_context == 1


async def test_rollouts_of_a_group_and_of_equal_tasks_get_the_same_seed(
    tidegate_serve: ServeInTests,
) -> None:
    seeds: dict[int, set[int]] = {}

    class Seen(Hunt):
        def reset(self, *, seed: int, task: Any) -> Observation:
            seeds.setdefault(task, set()).add(seed)
            return super().reset(seed=seed, task=task)

    episode = environment_episode(Seen, max_turns=1)
    async with tidegate_serve(says="a", group_size=4, groups_per_batch=2) as rollouts:
        async for _ in rollouts.batches([1, 2, 3, 1, 2, 3], episode=episode):
            await rollouts.publish({})
        await rollouts.evaluate([1, 2, 3], episode=episode)
    assert {task: len(found) for task, found in seeds.items()} == {1: 1, 2: 1, 3: 1}
    assert len(set.union(*seeds.values())) == 3


def test_a_seed_has_31_bits_and_derives_from_the_group_if_the_task_is_not_plain_data() -> None:
    assert all(0 <= group_seed(task, 0) < 2**31 for task in range(1000))
    assert len({group_seed(task, 0) for task in range(1000)}) == 1000
    assert group_seed({"a": 1}, 0) == group_seed({"a": 1}, 7)
    assert group_seed(object(), 3) == group_seed(object(), 3) != group_seed(object(), 4)


async def test_a_failing_environment_fails_its_rollout_and_is_closed(
    tidegate_serve: ServeInTests,
) -> None:
    closed: list[int] = []

    class Shy(Hunt):
        def reset(self, *, seed: int, task: Any) -> Observation:
            self._task = task
            return super().reset(seed=seed, task=task)

        def step(self, action: str) -> Any:
            if self._task == 1:
                raise RuntimeError("shy")
            return super().step(action) if self._task else "text"

        def close(self) -> None:
            closed.append(self._task)

    episode = environment_episode(Shy, max_turns=2)
    async with tidegate_serve(says="a", group_size=2, groups_per_batch=1) as rollouts:
        async for batch in rollouts.batches([0, 1, 2], episode=episode):
            assert batch.tasks == (2, 2)
    assert sorted(closed) == [0, 0, *(6 * [1]), 2, 2]  # task 1's two rollouts are retried twice
    assert episode.counts.failed == 8


@pytest.mark.parametrize("name", ["max_turns", "max_tokens", "context_tokens_max"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    limits: dict[str, Any] = {"max_turns": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        environment_episode(Hunt, **limits)


async def test_a_custom_dialogue_receives_messages(tidegate_serve: ServeInTests) -> None:
    class Chatty(Hunt):
        def reset(self, *, seed: int, task: Any) -> Observation:
            return chat([{"role": "system", "content": "play"}, {"role": "user", "content": task}])

        def step(self, action: str) -> Observation:
            return chat([], reward=float(action == "hi"), done=True)

    class Tagged:
        def __init__(self, episode: Episode, _: TurnLimits) -> None:
            self._episode = episode

        async def turn_after(self, observation: Observation) -> GeneratedTurn:
            for message in observation.messages:
                self._episode.append(f"<{message['role']}>{message['content']}")
            return await self._episode.generate(max_tokens=2)

    read: list[str] = []

    def says(request: TurnRequest) -> str:
        read.append(request.text)
        return "hi"

    episode = environment_episode(Chatty, max_turns=1, dialogue=Tagged)
    async with tidegate_serve(says=says) as rollouts:
        assert (await rollouts.evaluate(["now"], episode=episode)).rewards == [1.0]
    assert read == ["<system>play<user>now"]


async def test_chat_renders_the_environments_messages_with_the_chat_template(
    tidegate_serve: ServeInTests, tmp_path: Path, model: Path
) -> None:
    templated = add_chat_template(shutil.copytree(model, tmp_path / "chatty"), "gemma")
    read: list[str] = []

    def says(request: TurnRequest) -> str:
        read.append(request.text)
        assert len(request.token_ids) + request.max_tokens <= 100
        return "z"

    episode = environment_episode(
        Hunt, max_turns=9, max_tokens=2, context_tokens_max=100, dialogue=Chat
    )
    async with tidegate_serve(model=templated, says=says) as rollouts:
        await rollouts.evaluate([5], episode=episode)
    assert [text.count("user") for text in read] == list(range(1, len(read) + 1))
    assert 2 <= len(read) < 9
    assert read[1].startswith(read[0] + "z")
    assert episode.counts.out_of_context == 1


# ---------------------------------------------------------------- in other processes


class Engines(QuietEngines):
    """Engine double that answers each turn with the next letter, and counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        self.asked += 1
        turn = Turn(rollout, sampling)
        rollout.turns.append(turn)
        turn.append(1 + ord(LETTERS[len(rollout.turns) - 1]) - ord(" "), -1.0, 0, "engine-0")
        turn.finish_reason = "length"
        return turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


async def test_an_episode_replayed_after_a_resume_gets_the_same_observations(model: Path) -> None:
    files = read_model_files(model)
    defaults = SamplingSettings(max_tokens=1, temperature=1.0, seed=7)
    rollout, rewards = Rollout(0, 3, 0), []
    engines = [Engines(), Engines()]
    for life in engines:
        async with EnvironmentPool(processes=1) as pool:
            play = environment_episode(pool.environment(f"{GAMES}.games:Hunt"), max_turns=8)
            rewards.append(await play(Episode(rollout, files, life, defaults), "b"))
        rollout.cut(turns=len(rollout.turns))
    assert rewards[0] == rewards[1]
    assert engines[0].asked == len(rollout.turns) > 1
    assert (engines[1].asked, engines[1].cuts) == (0, [])


async def test_a_run_in_a_pool_loses_only_the_rollouts_whose_environment_crashes(
    model: Path, tmp_path: Path
) -> None:
    before = set(children())
    async with (
        EnvironmentPool(processes=2) as pool,
        tidegate.serve(
            model=model,
            engines=1,
            group_size=4,
            groups_per_batch=2,
            run_directory=tmp_path / "run",
        ) as rollouts,
    ):
        make = pool.environment(f"{GAMES}.games:CrashesAt", task=3)
        play = environment_episode(make, max_turns=3, max_tokens=2)
        tools = tidegate.Tools(pool, {"add": f"{GAMES}.unruly:add"})

        async def play_and_add(episode: Episode, task: int) -> float:
            try:
                reward = await play(episode, task)
            except EnvironmentFailed:
                failed[task] += 1
                raise
            await tools.call("add", {"left": task})
            return reward

        trained: list[Any] = []
        failed: Counter[int] = Counter()
        async for batch in rollouts.batches(range(7), episode=play_and_add):
            trained += batch.tasks[::4]
            await rollouts.publish(load_file(model / "model.safetensors"))
        assert trained == [0, 1, 2, 4, 5, 6]
        # Others that shared a process with these several times may have failed, and were retried.
        assert failed[3] == 12  # four rollouts, each retried twice
        assert play.counts.failed == failed.total()
        spent_s = rollouts.statistics().episode_activity_s
        assert spent_s.keys() == {"environment", "tool add"}
        assert min(spent_s.values()) > 0
        await wait_until_closed(pool)
    assert set(children()) <= before


def _is_an_environment(each: Environment) -> Environment:
    return each


def test_users_classes_match_the_environment_protocol() -> None:
    assert _is_an_environment(Hunt()).reset(seed=0, task=1) == Observation("1: ")
