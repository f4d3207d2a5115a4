"""Rollback of bad weights: nothing that they sampled is trained on."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

import tidegate
from tests.orchestrator.core.driver import Driver, step
from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rules import Rules
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.testing import ScriptedEngine, ServeInTests, TurnRequest
from tidegate.transport.messages import RUNNING, STOP, SamplingParams

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 2}
BAD = 2


def says(request: TurnRequest) -> str:
    return ("gibberish " if request.version == BAD else "an answer ") * 3


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}?")
    await episode.generate(max_tokens=40)
    await asyncio.sleep(0.2)  # a tool
    episode.append("and?")
    await episode.generate(max_tokens=40)
    return 1.0


async def test_what_bad_weights_sampled_is_discarded_and_its_tasks_are_taken_anew(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engines = [tidegate_engine(), tidegate_engine(step_s=0.02)]
    tasks: list[int] = []
    async with tidegate_serve(
        engines=engines, says=says, engines_per_update_wave=1, **SMALL
    ) as rollouts:
        async for batch in rollouts.batches(range(24), episode=two_turns):
            tasks += sorted({task for task in batch.tasks if isinstance(task, int)})
            assert not (batch.weight_versions == BAD).any()
            if await rollouts.publish({}) == BAD:
                await asyncio.sleep(0.6)  # some have ended, some are in a turn, some in a tool
                assert await rollouts.rollback({}) == BAD + 1
                assert rollouts.statistics().pause_mode is None
        statistics = rollouts.statistics()
    assert sorted(tasks) == list(range(24))
    assert statistics.ledger.error == 0
    assert statistics.ledger.discarded["rolled_back"] > 0
    # A version without a batch before it ages what waits, as any second publish does.
    assert set(statistics.discarded_rollouts) <= {"rolled_back", "stale"}
    assert rollouts.version == 13


async def test_weights_that_are_found_to_be_bad_while_they_are_staged_are_never_served(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(staging_s=1.0)
    async with tidegate_serve(engines=[engine], says=says, **SMALL) as rollouts:
        assert await rollouts.publish({}) == 1
        assert await rollouts.publish({}, wait="none") == BAD
        await asyncio.sleep(0.5)
        rollback = asyncio.create_task(rollouts.rollback({}))
        while not rollback.done():
            assert engine.weight_version != BAD
            await asyncio.sleep(0.01)
        assert await rollback == BAD + 1
        assert not rollouts.statistics().discarded_rollouts


def test_an_engine_that_comes_back_with_bad_weights_gets_no_turns() -> None:
    policy = BoundedStaleness(max_staleness=2, groups_per_batch=1)
    core = Core(Rules(policy=policy, group_size=1))
    joined = ev.EngineJoined("engine-0", weight_version=0, max_running_turns=8, epoch=1)
    core.handle(joined)
    core.handle(ev.VersionPublished(1))
    core.handle(ev.EngineSwapped("engine-0", 1))
    core.handle(ev.VersionRetracted(1))
    core.handle(ev.VersionPublished(2))
    core.handle(ev.EngineLeft("engine-0", is_crash=True))
    core.handle(msgspec.structs.replace(joined, weight_version=1, epoch=2))
    core.handle(ev.TasksOffered())
    core.handle(ev.TaskArrived(task=0))
    turn = ev.TurnRequested(0, SamplingParams(max_tokens=1))
    assert [c for c in core.handle(turn) if isinstance(c, ev.Submit)] == []
    assert [c for c in core.handle(ev.EngineSwapped("engine-0", 2)) if isinstance(c, ev.Submit)]


def test_what_bad_weights_sampled_and_arrives_after_the_rollback_reaches_no_turn() -> None:
    """An engine replays steps that were lost in transit, after it has reconnected."""
    driver = Driver(max_staleness=2, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.publish_and_swap([])
    driver.fill()
    rollout, *others = driver.running.values()
    driver.ask_turn(rollout)
    place = driver.where(rollout)
    assert place is not None
    assert ev.Cancel(*place) in driver.do(ev.VersionRetracted(1))
    driver.do(step("a", 1, [(place[1], [5, 6], RUNNING)]))
    driver.do(step("a", 1, [(place[1], [7], STOP)]))
    driver.publish_and_swap([])
    assert driver.core.ledger.discarded["cancelled"] == 3
    moved = driver.where(rollout)
    assert moved is not None
    driver.do(step("a", 2, [(moved[1], [8], STOP)]))
    assert rollout.turns[-1].token_ids.tolist() == [8]
    assert rollout.newest_version == rollout.oldest_version == 2
    assert list(driver.running.values()) == [rollout, *others]


async def test_engines_stay_paused_if_the_good_weights_can_not_be_brought(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(refuses_publishes=1)
    async with tidegate_serve(engines=[engine], says=says, **SMALL) as rollouts:
        with pytest.raises(WeightsRefused):
            await rollouts.rollback({}, first_bad=1)
        assert rollouts.statistics().pause_mode == "abort"
        assert await rollouts.rollback({}, first_bad=1) == 1
        await rollouts.resume()
        assert (await rollouts.evaluate([1], episode=two_turns)).failures == 0


async def test_there_is_nothing_to_roll_back_to_before_the_first_publish(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve(says=says, **SMALL) as rollouts:
        with pytest.raises(
            ConfigError, match="first_bad must be >= 1, because version 0 is the model directory's"
        ):
            await rollouts.rollback({})


async def test_an_episode_whose_group_was_dropped_for_its_age_is_stopped(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    cancelled: list[int] = []

    async def slow_second(episode: tidegate.Episode, task: int) -> float:
        episode.append(f"{task}?")
        await episode.generate(max_tokens=4)
        try:
            await asyncio.sleep(100.0 if task == 1 and not cancelled else 0.0)
        except asyncio.CancelledError:
            cancelled.append(task)
            raise
        await episode.generate(max_tokens=4)
        return 1.0

    settings = {**SMALL, "group_size": 1, "groups_per_batch": 1, "max_staleness": 1}
    async with tidegate_serve(
        engines=[tidegate_engine()],
        says="abc",
        consumption_order="completion",
        deadline_policy="drop",
        **settings,
    ) as rollouts:
        async for _ in rollouts.batches(
            itertools.islice(itertools.count(), 6), episode=slow_second
        ):
            await rollouts.publish({})
        statistics = rollouts.statistics()
    assert cancelled == [1]
    assert statistics.trained_rollouts == 6
    assert dict(statistics.discarded_rollouts) == {"stale": 1}
