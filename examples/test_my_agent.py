"""Tests of a user's agent and trainer, without a GPU, a model or waiting: copy this file.

    pytest examples/test_my_agent.py

Installing Tidegate installs the fixtures. The scheduler is real and batches are real tensors; the
engines' output is scripted by the test, and time is virtual. More: docs/testing.md.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import tidegate
from tidegate.errors import EngineLost, WeightsRefused
from tidegate.testing import ScriptedEngine, ServeInTests, TurnRequest, VirtualTime

# ---------------------------------------------------------------- replace by your own code


async def ask_twice(episode: tidegate.Episode, task: str) -> float:
    """An agent that insists on a number."""
    episode.append(task)
    for reward in (1.0, 0.5):
        turn = await episode.generate(max_tokens=16)
        if turn.text.strip().isdigit():
            return reward
        episode.append("Only a number, please: ")
    return 0.0


async def train(
    rollouts: tidegate.Rollouts, tasks: Iterable[str], *, step_s: float = 0.5
) -> list[int]:
    """A trainer with slow steps; returns the staleness of the oldest row of each batch."""
    staleness = []
    async for batch in rollouts.batches(tasks, episode=ask_twice):
        staleness.append(int(batch.staleness.max()))
        await asyncio.sleep(step_s)  # compute the loss here
        try:
            await rollouts.publish({})  # pass model.state_dict() here
        except WeightsRefused:
            continue  # the old weights stay live; the next publish contains everything learned
    return staleness


SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2}

# ---------------------------------------------------------------- the agent


async def test_the_agent_asks_again_when_it_gets_no_number(tidegate_serve: ServeInTests) -> None:
    async with tidegate_serve(says=["forty-two", "42"]) as rollouts:
        evaluation = await rollouts.evaluate(["6*7="], episode=ask_twice)
    assert evaluation.rewards == [0.5]


async def test_the_agent_does_not_notice_that_an_engine_crashes_under_it(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    dying = tidegate_engine(crashes_at_token=3)
    other = tidegate_engine(joins_at_s=0.1)
    async with tidegate_serve(engines=[dying, other], says="123456789") as rollouts:
        evaluation = await rollouts.evaluate(["count: "], episode=ask_twice)
    assert evaluation.rewards == [1.0]
    assert [request.said for request in other.requests] == ["123"]  # it continued from there


async def test_the_agent_gives_up_on_an_engine_that_hangs(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine()

    async def impatient(episode: tidegate.Episode, task: str) -> float:
        episode.append(task)
        engine.hang(seconds=20.0)
        try:
            async with asyncio.timeout(5.0):
                await episode.generate()
        except TimeoutError:
            return -1.0
        return 1.0

    async with tidegate_serve(engines=[engine]) as rollouts:
        evaluation = await rollouts.evaluate(["?"], episode=impatient)
    assert evaluation.rewards == [-1.0]


# ---------------------------------------------------------------- the trainer


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_no_batch_is_older_than_the_bound_however_slowly_weights_arrive(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine], max_staleness: int
) -> None:
    engines = [tidegate_engine(staging_s=seconds) for seconds in (0.1, 30.0)]
    async with tidegate_serve(
        engines=engines, says="42", max_staleness=max_staleness, **SMALL
    ) as rollouts:
        staleness = await train(rollouts, ["6*7="] * 12)
    assert max(staleness) == max_staleness
    assert rollouts.statistics().ledger.discarded_total == 0


async def test_the_reward_rises_once_better_weights_are_out(tidegate_serve: ServeInTests) -> None:
    def says(request: TurnRequest) -> str:
        return "42" if request.version >= 2 else "no idea"

    async with tidegate_serve(says=says, max_staleness=0, **SMALL) as rollouts:
        before = await rollouts.evaluate(["6*7="], episode=ask_twice)
        await train(rollouts, ["6*7="] * 4)
        after = await rollouts.evaluate(["6*7="], episode=ask_twice)
    assert (before.mean_reward, after.mean_reward) == (0.0, 1.0)


async def test_the_trainer_continues_when_an_engine_refuses_its_weights(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(), tidegate_engine(refuses_publishes=1)]
    async with tidegate_serve(engines=engines, says="42", max_staleness=2, **SMALL) as rollouts:
        batches = await train(rollouts, ["6*7="] * 8)
    assert len(batches) == 4
    assert rollouts.version == 3  # of four publishes, the first was refused


async def test_the_trainer_gets_an_error_when_the_last_engine_is_gone_for_good(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(crashes_at_token=10, restart_s=float("inf"))
    async with tidegate_serve(engines=[engine], says="42", **SMALL) as rollouts:
        with pytest.raises(EngineLost, match="engine-0"):
            await train(rollouts, ["6*7="] * 8)


def test_a_trainer_that_is_not_async_runs_as_well(
    tidegate_serve_sync: Callable[..., tidegate.SyncRollouts], tidegate_virtual_time: VirtualTime
) -> None:
    with tidegate_serve_sync(says="42", max_staleness=1, **SMALL) as rollouts:
        for _ in rollouts.batches(["6*7="] * 6, episode=ask_twice):
            tidegate_virtual_time.sleep(600.0)  # a train step of ten minutes
            rollouts.publish({})
    assert rollouts.version == 3
    assert tidegate_virtual_time.now_s > 1800.0
