"""Tests of the FrozenLake example: winnable, deterministic in a pool, runs as a script."""

from collections import deque
from pathlib import Path

import pytest

from examples.frozen_lake import MOVES, MOVES_MAX, Lake, main
from tests.models import make_model_directory
from tidegate import EnvironmentPool, environment_episode
from tidegate.testing import ServeInTests, TurnRequest

pytestmark = pytest.mark.wire

STEPS = dict(zip(MOVES, ((0, -1), (1, 0), (0, 1), (-1, 0)), strict=True))


def walks(request: TurnRequest) -> str:
    """A scripted model that takes the shortest way over the lake it was shown last."""
    lake = request.text.rpartition("\n> ")[0].split("\n")[-4:]
    fields = {(row, column): lake[row][column] for row in range(4) for column in range(4)}
    (start,) = (place for place, field in fields.items() if field == "P")
    ways, seen = deque([("", start)]), {start}
    while ways:
        way, (row, column) = ways.popleft()
        if fields[row, column] == "G":
            return way[0]
        for move, (down, right) in STEPS.items():
            place = row + down, column + right
            if fields.get(place, "H") != "H" and place not in seen:
                seen.add(place)
                ways.append((way + move, place))
    raise AssertionError(lake)


async def test_every_lake_can_be_crossed_in_time(tidegate_serve: ServeInTests) -> None:
    episode = environment_episode(Lake, max_turns=MOVES_MAX, max_tokens=1)
    async with tidegate_serve(says=walks) as rollouts:
        evaluation = await rollouts.evaluate(range(30), episode=episode)
    assert evaluation.rewards == [1.0] * 30
    assert episode.counts.turns >= 30 * 6


async def test_an_episode_of_invalid_actions_has_no_reward(
    tidegate_serve: ServeInTests,
) -> None:
    episode = environment_episode(Lake, max_turns=MOVES_MAX, max_tokens=1)
    async with tidegate_serve(says="z") as rollouts:
        evaluation = await rollouts.evaluate([0], episode=episode)
    assert evaluation.rewards == [0.0]
    assert episode.counts.out_of_turns == 1


async def test_a_lake_in_a_pool_is_that_of_its_seed() -> None:
    here = [Lake().reset(seed=seed, task=None) for seed in range(3)]
    async with EnvironmentPool(processes=1) as pool:
        make = pool.environment("examples.frozen_lake:Lake")
        there = [await make().reset(seed=seed, task=None) for seed in range(3)]
    assert here == there
    assert here[0] != here[1]


def test_a_model_that_knows_nothing_plays_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_directory(tmp_path / "model")
    assert main(["--model", str(model), "--lakes", "4"]) == 0
    assert "of 4 lakes crossed" in capsys.readouterr().out
