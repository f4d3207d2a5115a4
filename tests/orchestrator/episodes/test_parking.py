"""Parked episodes continue under newer weights, and never keep the trainer waiting."""

import asyncio
import sys
from typing import Any

import tidegate
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.testing import ScriptedEngine, ServeInTests, VirtualTime

SETTINGS: dict[str, Any] = {"group_size": 1, "groups_per_batch": 1, "max_staleness": 3}


def versions(turns: list[tidegate.GeneratedTurn]) -> list[int]:
    return [span.version for turn in turns for span in turn.spans]


async def test_a_parked_episode_continues_once_newer_weights_are_live(
    tidegate_serve: ServeInTests,
) -> None:
    turns: dict[int, list[tidegate.GeneratedTurn]] = {}

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("q")
        mine = turns.setdefault(task, [])
        mine.append(await episode.generate(max_tokens=4))
        if task == 1:
            await asyncio.sleep(5.0)  # a tool; meanwhile the trainer gets its batch
            await episode.park()
        mine.append(await episode.generate(max_tokens=4))
        return 0.0

    async with tidegate_serve(says="abcdefgh", **SETTINGS) as rollouts:
        batches = rollouts.batches(range(2), episode=solve)
        await anext(batches)
        await asyncio.sleep(30.0)  # the trainer trains: nothing wakes it but weights
        assert len(turns[1]) == 1
        await rollouts.publish({})
        await anext(batches)
    assert versions(turns[0]) == [0, 0]
    assert versions(turns[1]) == [0, 1]


async def test_a_trainer_that_waits_for_a_batch_is_not_kept_waiting(
    tidegate_serve: ServeInTests, tidegate_virtual_time: VirtualTime
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("q")
        for _ in range(3):
            await episode.generate(max_tokens=4)
            await episode.park()
        return 0.0

    async with tidegate_serve(says="abcdefgh", **SETTINGS) as rollouts:
        count = 0
        async for _ in rollouts.batches(range(3), episode=solve):
            count += 1  # and publishes nothing
        assert count == 3
        await rollouts.evaluate([1], episode=solve)  # no trainer would publish meanwhile
    assert tidegate_virtual_time.now_s < 60.0


async def test_a_check_without_a_change_visits_no_parked_episode_and_misses_none() -> None:
    live, is_starved = 0, False
    parking = Parking(lambda: live, lambda: is_starved)

    async def park(number: int) -> "asyncio.Task[None]":
        task = asyncio.create_task(parking.wait(number))
        await asyncio.sleep(0)
        return task

    def calls_of_a_check() -> int:
        calls = 0

        def count(frame: object, what: str, called: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        parking.resume_due()
        sys.setprofile(None)
        return calls

    one = await park(1)
    alone = calls_of_a_check()
    others = [await park(number) for number in range(2, 50)]
    assert calls_of_a_check() <= alone
    live = 1  # no wait polls, but the newest one is due
    newest = await park(50)
    await asyncio.gather(one, *others)
    assert not newest.done()
    is_starved = True
    parking.resume_due()
    await newest
    is_starved = False  # no wait is left to resume
    last = await park(51)
    is_starved = True
    parking.resume_due()
    await last
    assert not parking.parked
    assert not parking.rows


async def play_long(episode: tidegate.Episode, turns: int) -> list[tidegate.GeneratedTurn]:
    """Episode that does not park by itself; its tool takes 10 s."""
    episode.append("q")
    said = []
    for _ in range(turns):
        said.append(await episode.generate(max_tokens=4, timeout_s=20.0))
        await asyncio.sleep(10.0)
    return said


async def test_an_episode_over_its_budget_is_parked_at_the_end_of_a_turn_again_and_again(
    tidegate_serve: ServeInTests,
) -> None:
    said: dict[int, list[tidegate.GeneratedTurn]] = {}

    async def solve(episode: tidegate.Episode, task: int) -> float:
        said[task] = await play_long(episode, 7 if task == 2 else 1)
        return 0.0

    settings = {**SETTINGS, "episode_park_after_s": 25.0, "episode_timeout_s": 90.0}
    async with tidegate_serve(says="abcdefgh", **settings) as rollouts:
        batches = rollouts.batches(range(3), episode=solve)
        for version in (1, 2):
            await anext(batches)
            await asyncio.sleep(300.0)  # more than its time, and all of it parked
            assert rollouts.statistics().parked_episodes == 1
            assert rollouts.statistics().stuck == ()
            assert await rollouts.publish({}) == version
        await anext(batches)
        assert rollouts.statistics().parked_episodes == 0
    assert versions(said[0]) == versions(said[1]) == [0]
    assert versions(said[2]) == [0, 0, 0, 1, 1, 1, 2]


async def test_time_in_which_an_episode_is_parked_is_not_its_branches_either(
    tidegate_serve: ServeInTests,
) -> None:
    said: dict[int, list[tidegate.GeneratedTurn]] = {}

    async def solve(episode: tidegate.Episode, task: int) -> float:
        if task == 1:
            episode.append("q")
            branches = [episode.fork() for _ in range(3)]
            all_said = await asyncio.gather(*(play_long(branch, 4) for branch in branches))
            said.update(enumerate(all_said))
        else:
            await play_long(episode, 1)
        return 0.0

    settings = {**SETTINGS, "episode_park_after_s": 25.0, "episode_timeout_s": 60.0}
    async with tidegate_serve(says="abcdefgh", **settings) as rollouts:
        batches = rollouts.batches(range(2), episode=solve)
        await anext(batches)
        await asyncio.sleep(300.0)
        assert rollouts.statistics().parked_episodes == 1
        await rollouts.publish({})
        await anext(batches)
    assert {number: versions(turns) for number, turns in said.items()} == {
        number: [0, 0, 0, 1] for number in range(3)
    }


async def test_slots_of_parked_episodes_are_others(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    ended: list[int] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("q")
        await asyncio.sleep(5.0 * task)  # a tool; meanwhile the trainer gets its first batch
        await episode.generate(max_tokens=4)
        if task in (1, 2):
            await episode.park()
        await episode.generate(max_tokens=4)
        ended.append(task)
        return 0.0

    engine = tidegate_engine(max_running_turns=2)
    async with tidegate_serve(engines=[engine], says="abcdefgh", **SETTINGS) as rollouts:
        batches = rollouts.batches(range(4), episode=solve)
        await anext(batches)
        await asyncio.sleep(30.0)
    assert ended == [0, 3]  # though two slots are all there are, and two episodes wait
