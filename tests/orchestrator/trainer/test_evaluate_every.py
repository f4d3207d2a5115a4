"""Evaluations that a run repeats by itself, between its batches."""

from collections.abc import Mapping
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError


class Noted:
    """An episode that records the trainer's version whenever the held-out task is run."""

    def __init__(self) -> None:
        self.run: Any = None
        self.versions: list[int] = []

    async def solve(self, episode: tidegate.Episode, task: object) -> float:
        if task == "held out":
            self.versions.append(self.run.version)
        episode.append(str(task))
        await episode.generate(max_tokens=2)
        return 1.0


async def train(run: Any, noted: Noted, batches: int) -> None:
    noted.run = run
    async for _ in run.batches(range(batches), episode=noted.solve):
        await run.publish({})


@pytest.mark.parametrize(
    ("versions", "batches", "evaluated"),
    [
        (2, 5, [0, 2, 4, 5]),  # the last ones have an evaluation, too
        (2, 4, [0, 2, 4]),  # once, although it is due for two reasons
        (1, 2, [0, 1, 2]),
        (9, 3, [0, 3]),
        (1, 0, [0]),
    ],
)
async def test_tasks_are_evaluated_before_between_and_after_the_batches(
    tidegate_serve: Any, versions: int, batches: int, evaluated: list[int]
) -> None:
    noted = Noted()
    async with tidegate_serve(group_size=1, groups_per_batch=1, max_staleness=0) as run:
        run.evaluate_every(versions, ["held out"], episode=noted.solve)
        await train(run, noted, batches)
        assert run.statistics().evaluation_ledger.generated == 2 * len(evaluated)
    assert noted.versions == evaluated


async def test_the_time_of_an_evaluation_is_the_trainers_own_and_no_waiting(
    tidegate_serve: Any,
) -> None:
    noted = Noted()
    async with tidegate_serve(group_size=1, groups_per_batch=1, max_staleness=0) as run:
        run.evaluate_every(1, ["held out"], episode=noted.solve)
        await train(run, noted, 3)
        spent = run.statistics().trainer_activity_s
    assert spent["evaluate"] > 0
    assert spent.keys() == {"train", "wait", "publish", "evaluate"}


async def test_evaluations_are_figures_of_the_next_batch_by_their_names(
    tidegate_serve: Any,
) -> None:
    noted = Noted()
    figures: list[Mapping[str, float]] = []
    async with tidegate_serve(
        group_size=1, groups_per_batch=1, max_staleness=0, on_batch=figures.append
    ) as run:
        noted.run = run
        async for _ in run.batches(range(2), episode=noted.solve):
            await run.evaluate(["x"], episode=noted.solve, name="hard-sums")
            await run.evaluate(["x"], episode=noted.solve, name=None)
            await run.publish({})
    assert "hard_sums_reward" not in figures[0]
    assert figures[1]["hard_sums_reward"] == 1.0
    assert not any("held_out_reward" in each for each in figures)


async def test_no_tasks_and_no_distance_between_evaluations_are_refused(
    tidegate_serve: Any,
) -> None:
    async with tidegate_serve() as run:
        with pytest.raises(ConfigError, match="at least 1 version apart, got 0"):
            run.evaluate_every(0, ["x"], episode=Noted().solve)
        with pytest.raises(ConfigError, match="at least one task"):
            run.evaluate_every(1, [], episode=Noted().solve)
