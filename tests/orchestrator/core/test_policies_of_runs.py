"""Policies given by users, in whole runs in virtual time."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.orchestrator.journal.resuming import open_run_journal
from tidegate.orchestrator.settings.config import run_settings
from tidegate.policies.staleness import StalenessPolicy
from tidegate.testing import ScriptedEngine, ServeInTests

Engine = type[ScriptedEngine]


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([5, 6, task % 100])
    await episode.generate(max_tokens=8 + 5 * (task % 7))
    return float(episode.index % 2)


async def train(rollouts: Any, batches: int) -> list[tidegate.Batch]:
    trained = []
    async for batch in rollouts.batches(itertools.count(), episode=one_turn):
        trained.append(batch)
        await rollouts.publish({})
        if len(trained) == batches:
            return trained
    raise AssertionError("the tasks never end")


async def test_a_mismatch_below_0_is_refused(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    async with tidegate_serve(engines=[tidegate_engine()]) as rollouts:
        with pytest.raises(ConfigError, match=r"mismatch_kl is in nats per token, >= 0; got -1"):
            await rollouts.report_off_policyness(mismatch_kl=-1.0)


@pytest.mark.parametrize(
    "policy",
    [
        tidegate.Synchronous(groups_per_batch=2),
        tidegate.OneStepOffPolicy(groups_per_batch=2),
        tidegate.OverSampling(groups_per_batch=2, factor=2.0),
        tidegate.TailPacking(groups_per_batch=2, factor=1.5),
        tidegate.Unbounded(groups_per_batch=2, outstanding_groups_limit=6),
        tidegate.BoundedStaleness(
            max_staleness=2, groups_per_batch=2, consumption_order=tidegate.Window(3)
        ),
        tidegate.BoundedStaleness(
            max_staleness=1,
            groups_per_batch=2,
            consumption_order="completion",
            deadline_policy="split",
        ),
    ],
    ids=lambda policy: type(policy).__name__,
)
async def test_a_run_by_any_policy_trains_batch_after_batch_within_its_bound(
    tidegate_serve: ServeInTests, tidegate_engine: Engine, policy: StalenessPolicy
) -> None:
    engines = [tidegate_engine(step_s=0.01), tidegate_engine(step_s=0.03)]
    async with tidegate_serve(engines=engines, staleness_policy=policy, group_size=4) as rollouts:
        batches = await train(rollouts, 8)
        statistics = rollouts.statistics()
    assert len(batches) == 8
    assert statistics.staleness_bound == policy.guaranteed_bound
    if policy.guaranteed_bound is not None:
        assert max(int(batch.staleness.max()) for batch in batches) <= policy.guaranteed_bound


async def test_a_policy_and_what_it_would_contradict_are_not_both_taken(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    policy = tidegate.Synchronous(groups_per_batch=2)
    with pytest.raises(ConfigError, match="omit max_staleness"):
        async with tidegate_serve(
            engines=[tidegate_engine()], staleness_policy=policy, max_staleness=3
        ):
            pass
    with pytest.raises(ConfigError, match="with group_size=1 are all"):
        async with tidegate_serve(
            engines=[tidegate_engine()], group_size=1, group_filter=tidegate.DynamicSampling()
        ):
            pass


async def test_groups_that_are_dropped_as_they_end_leave_their_places_to_others(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    """No other event makes the feed take tasks then: the trainer waits already."""

    async def episode(episode: tidegate.Episode, task: int) -> float:
        episode.append("q")
        await episode.generate(max_tokens=1)
        return float(episode.index if task > 1 else 0)

    async with tidegate_serve(
        engines=[tidegate_engine()],
        staleness_policy=tidegate.Synchronous(groups_per_batch=2),
        group_size=2,
        group_filter=tidegate.DynamicSampling(),
    ) as rollouts:
        async with asyncio.timeout(20):
            batch = await anext(rollouts.batches(range(9), episode=episode))
        assert batch.tasks == (2, 2, 3, 3)


async def test_a_task_that_comes_when_its_place_is_gone_waits_for_the_next(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    """In a round of five, four groups have ended before the iterator gives the fifth task."""
    fifth = asyncio.Event()

    async def slow_tasks() -> AsyncIterator[int]:
        for task in range(12):
            if task == 4:
                await fifth.wait()
            yield task

    policy = tidegate.TailPacking(groups_per_batch=4, factor=1.25)
    async with tidegate_serve(
        engines=[tidegate_engine()], staleness_policy=policy, group_size=2
    ) as rollouts:
        batches = rollouts.batches(slow_tasks(), episode=one_turn)
        await anext(batches)
        fifth.set()
        await asyncio.sleep(0.1)
        await rollouts.publish({})
        assert len((await anext(batches)).group_ids) == 8


async def test_a_task_may_be_none_whatever_the_iterator_is(tidegate_serve: ServeInTests) -> None:
    async def solve(episode: tidegate.Episode, task: None) -> float:
        episode.append("q")
        await episode.generate(max_tokens=2)
        return 0.0

    async def one_by_one() -> AsyncIterator[None]:
        for _ in range(3):
            yield None

    for tasks in ([None] * 3, one_by_one()):
        async with tidegate_serve(says="ab", group_size=1, groups_per_batch=1) as rollouts:
            batches = 0
            async for batch in rollouts.batches(tasks, episode=solve):
                assert batch.tasks == (None,)
                await rollouts.publish({})
                batches += 1
        assert batches == 3


async def test_a_task_put_back_is_taken_while_the_iterator_waits_for_the_trainer(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    waiting: asyncio.Queue[int] = asyncio.Queue()

    async def tasks() -> AsyncIterator[int]:
        while True:
            yield await waiting.get()

    async with tidegate_serve(
        engines=[tidegate_engine()], max_staleness=1, groups_per_batch=2, group_size=2
    ) as rollouts:
        batches = rollouts.batches(tasks(), episode=one_turn)
        for task in range(4):
            waiting.put_nowait(task)
        await anext(batches)
        await rollouts.publish({})
        await asyncio.sleep(1.0)  # the other two have ended, sampled by version 0 or 1
        await rollouts.rollback({}, first_bad=1)
        assert set((await anext(batches)).tasks) == {2, 3}


@pytest.mark.parametrize("wait", ["live", "staged", "none"])
async def test_over_sampling_asks_for_no_publish_that_was_made(
    tidegate_serve: ServeInTests, tidegate_engine: Engine, wait: Any
) -> None:
    policy = tidegate.OverSampling(groups_per_batch=2, factor=2.0)
    engine = tidegate_engine(staging_s=0.2)
    async with tidegate_serve(engines=[engine], staleness_policy=policy, group_size=2) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        for _ in range(4):
            await anext(batches)
            await rollouts.publish({}, wait=wait)


async def test_generation_continues_after_a_rollback_of_a_run_that_pauses_by_itself(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    policy = tidegate.OverSampling(groups_per_batch=2, factor=2.0)
    async with tidegate_serve(
        engines=[tidegate_engine()], staleness_policy=policy, group_size=2
    ) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        await anext(batches)
        await rollouts.publish({})
        await anext(batches)
        await rollouts.rollback({}, first_bad=1)
        await anext(batches)


async def one_scored_turn(episode: tidegate.Episode, task: int) -> float:
    await one_turn(episode, task)
    return float(len(await episode.score([[1, 2, 3]])))


CALLS: dict[str, Callable[[tidegate.Rollouts], Awaitable[Any]]] = {
    "evaluation": lambda run: run.evaluate([1, 2], episode=one_turn),
    "evaluation of a version": lambda run: run.evaluate(
        [1, 2], episode=one_turn, version=run.version
    ),
    "scored evaluation of a version": lambda run: run.evaluate(
        [1, 2], episode=one_scored_turn, version=run.version
    ),
    "scores": lambda run: run.score([[1, 2, 3]]),
}
"""Calls of a trainer that need engines to run."""


@pytest.mark.parametrize("evaluation_engines", [0, 1])
@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("call", CALLS)
async def test_a_policy_that_pauses_engines_lets_them_run_for_calls_that_the_trainer_waits_for(
    tidegate_serve: ServeInTests,
    tidegate_engine: Engine,
    call: str,
    is_ahead: bool,
    evaluation_engines: int,
) -> None:
    engines = [tidegate_engine(), tidegate_engine()]
    async with tidegate_serve(
        engines=engines,
        staleness_policy=tidegate.OverSampling(groups_per_batch=2, factor=2.0),
        group_size=2,
        evaluation_engines=evaluation_engines,
    ) as rollouts:
        await rollouts.offer(itertools.count(), episode=one_turn)
        for _ in range(3):
            ahead = asyncio.create_task(rollouts.next_batch())
            await asyncio.sleep(5.0)
            assert ahead.done()
            sampled = sum(engine.tokens for engine in engines)
            await asyncio.sleep(60.0)
            assert sum(engine.tokens for engine in engines) == sampled
            if is_ahead:
                await rollouts.publish({})
                ahead = asyncio.create_task(rollouts.next_batch())
            async with asyncio.timeout(60.0):
                await CALLS[call](rollouts)
            await ahead
            await asyncio.sleep(5.0)
            sampled = sum(engine.tokens for engine in engines)
            await asyncio.sleep(60.0)
            assert sum(engine.tokens for engine in engines) == sampled  # paused again
            await rollouts.publish({})


def test_a_run_whose_policy_could_not_be_made_again_keeps_no_journal(tmp_path: Path) -> None:
    class Mine(tidegate.Synchronous):
        """A class that can't be imported."""

    settings = run_settings(
        model=tmp_path,
        staleness_policy=Mine(groups_per_batch=1),
        journal=True,
        run_directory=tmp_path,
    )
    with pytest.raises(ConfigError, match="define them in a module, not in a function"):
        open_run_journal(settings, None)
    assert list(tmp_path.iterdir()) == []


async def test_an_async_iterator_continues_where_it_was_when_it_is_given_again(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    waiting: asyncio.Queue[int] = asyncio.Queue()

    async def tasks() -> AsyncIterator[int]:
        while True:
            yield await waiting.get()

    given = tasks()
    seen: list[object] = []
    async with tidegate_serve(
        engines=[tidegate_engine()], max_staleness=0, groups_per_batch=1, group_size=2
    ) as rollouts:
        for task in range(4):
            waiting.put_nowait(task)
            seen += (await anext(rollouts.batches(given, episode=one_turn))).tasks
            await rollouts.publish({})
            await asyncio.sleep(0.1)  # the feed waits for the iterator again
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_task_taken_again_runs_the_episode_that_it_was_given_with(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    """Its group gets too old after the trainer has changed to other tasks."""
    ran: list[tuple[str, object]] = []

    async def first(episode: tidegate.Episode, task: object) -> float:
        ran.append(("first", task))
        episode.append([5, 6])
        await episode.generate(max_tokens=2)
        await asyncio.sleep(5.0)  # its tool is slow
        return 1.0

    async def second(episode: tidegate.Episode, task: object) -> float:
        ran.append(("second", task))
        episode.append([7])
        await episode.generate(max_tokens=2)
        return 1.0

    policy = tidegate.BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="drop"
    )
    engine = tidegate_engine()
    async with tidegate_serve(engines=[engine], staleness_policy=policy, group_size=1) as rollouts:
        old = rollouts.batches(iter(["slow"]), episode=first)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(old), 1.0)
        async for _ in rollouts.batches(iter(range(8)), episode=second):
            await rollouts.publish({})
    again = [name for name, task in ran if task == "slow"]
    assert len(again) > 1
    assert set(again) == {"first"}
    assert {name for name, task in ran if task != "slow"} == {"second"}
