"""A run in which nothing is learned says so, and one that learns is left alone."""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import pytest

import tidegate
from tidegate.errors import EpisodeError
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.testing import ServeInTests

GROUPS: dict[str, Any] = {"group_size": 4, "groups_per_batch": 8, "max_staleness": 1}


async def right_or_wrong(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}")
    await episode.generate(max_tokens=4)
    return float(episode.index % 2)


async def always_right(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}")
    await episode.generate(max_tokens=4)
    return 1.0


async def by_task(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}")
    await episode.generate(max_tokens=4)
    return float(task % 2)


async def never_generates(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}")
    return float(episode.index % 2)


def learning(statistics: RunStatistics) -> list[str]:
    assert all(stuck.kind == "learning" for stuck in statistics.stuck), statistics.stuck
    return [f"{stuck.name}: {stuck.where}" for stuck in statistics.stuck]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in found if message.startswith("stuck=learning")]


def line_of(function: Any) -> str:
    return f"{function.__name__} ({__file__}:{function.__code__.co_firstlineno})"


async def train(
    rollouts: Any,
    episode: Any,
    tasks: Iterable[int] = range(64),
    *,
    reads: str = "advantages",
) -> list[list[str]]:
    """Train on all batches, reading one column; return the findings as of each batch."""
    found = []
    async for batch in rollouts.batches(tasks, episode=episode):
        getattr(batch, reads)
        found.append(learning(rollouts.statistics()))
        await rollouts.publish({})
    return found


# ---------------------------------------------------------------- rewards without a difference


async def test_a_trainer_whose_advantages_are_all_0_is_told_the_reward_and_the_episodes_line(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**GROUPS) as rollouts:
        found = await train(rollouts, always_right)
    assert found[:2] == [[], []]
    wanted = (
        "the batches: batch.advantages, which the trainer reads, is 0 throughout the last 8: every "
        f"reward is 1; see what the episode {line_of(always_right)} returns"
    )
    assert learning(rollouts.statistics()) == [wanted]
    assert len(warnings(caplog)) == 1


async def rewards_turns(episode: tidegate.Episode, task: int) -> float:
    episode.append(f"{task}")
    turn = await episode.generate(max_tokens=4)
    turn.reward = float(episode.index)
    return 0.0


@pytest.mark.parametrize(
    ("episode", "group_size", "reads", "said"),
    [
        (by_task, 4, "advantages", "the rewards within each group are equal"),
        (by_task, 1, "advantages", "with group_size=1 no reward is compared with another; raise"),
        (by_task, 4, "rewards", None),  # as REINFORCE with a baseline of its own
        (by_task, 1, "rewards", None),
        (
            always_right,
            1,
            "rewards",
            "every reward is 1 in the last 8, so a loss of rewards learns",
        ),
        (rewards_turns, 4, "advantages", None),
    ],
)
async def test_equal_rewards_are_named_to_a_trainer_that_learns_nothing_by_them(
    tidegate_serve: ServeInTests,
    caplog: pytest.LogCaptureFixture,
    episode: Any,
    group_size: int,
    reads: str,
    said: str | None,
) -> None:
    async with tidegate_serve(**{**GROUPS, "group_size": group_size}) as rollouts:
        await train(rollouts, episode, reads=reads)
    if said is None:
        assert (learning(rollouts.statistics()), warnings(caplog)) == ([], [])
    else:
        (finding,) = learning(rollouts.statistics())
        assert said in finding


async def test_a_finding_is_withdrawn_with_the_first_batch_that_teaches(
    tidegate_serve: ServeInTests,
) -> None:
    async def learns_late(episode: tidegate.Episode, task: int) -> float:
        reward = await right_or_wrong(episode, task)
        return reward if task >= 48 else 0.0

    async with tidegate_serve(**GROUPS) as rollouts:
        found = await train(rollouts, learns_late)
    assert [len(each) for each in found] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert learning(rollouts.statistics()) == []


async def test_a_run_that_learns_and_an_evaluation_of_equal_rewards_are_left_alone(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**GROUPS) as rollouts:
        await rollouts.evaluate(range(64), episode=always_right)
        found = await train(rollouts, right_or_wrong)
    assert found == [[]] * 8
    async with tidegate_serve(**GROUPS) as rollouts:
        await rollouts.evaluate(range(64), episode=always_right)
    assert (learning(rollouts.statistics()), warnings(caplog)) == ([], [])


async def test_a_short_run_is_judged_at_its_end_by_all_of_its_batches(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**{**GROUPS, "groups_per_batch": 2}) as rollouts:
        found = await train(rollouts, always_right, range(4))
        assert found == [[], []]
    assert "every reward is 1" in learning(rollouts.statistics())[0]
    assert len(warnings(caplog)) == 1


async def test_a_trainer_that_breaks_out_of_a_short_run_is_told_at_its_end(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**{**GROUPS, "groups_per_batch": 2}) as rollouts:
        async for batch in rollouts.batches(itertools.count(), episode=always_right):
            if batch.number == 2:
                break
            await rollouts.publish({})
        assert learning(rollouts.statistics()) == []
    assert "every reward is 1" in learning(rollouts.statistics())[0]
    assert len(warnings(caplog)) == 1


# ---------------------------------------------------------------- batches without a token


async def test_an_episode_that_never_generates_is_named_with_its_line(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**GROUPS) as rollouts:
        found = await train(rollouts, never_generates)
    assert found[0] == []
    assert found[1] == [
        f"the batches: the last 2 have no token to train on: the episode "
        f"{line_of(never_generates)} ended without a token of `await episode.generate(…)`"
    ]
    assert len(warnings(caplog)) == 1


async def test_a_generate_without_await_is_named_in_a_run_of_a_single_batch(
    tidegate_serve: ServeInTests,
) -> None:
    async def forgets_await(episode: tidegate.Episode, task: int) -> float:
        episode.append(f"{task}")
        episode.generate(max_tokens=4).close()  # as garbage collection does, without its warning
        return 1.0

    async with tidegate_serve(**GROUPS) as rollouts:
        await train(rollouts, forgets_await, range(8))
    assert "the last 1 have no token to train on" in learning(rollouts.statistics())[0]


# ---------------------------------------------------------------- no group is left


async def seldom(episode: tidegate.Episode, task: int) -> float:
    reward = await right_or_wrong(episode, task)
    return reward if task % 100 == 0 else 0.0


async def fails_in_part(episode: tidegate.Episode, task: int) -> float:
    if episode.index:
        raise tidegate.PolicyFailed(reason="gave_up")
    return await right_or_wrong(episode, task)


@pytest.mark.parametrize(
    ("episode", "settings", "said"),
    [
        (
            by_task,
            {"group_filter": tidegate.DynamicSampling()},
            "as zero_variance); group_filter=DynamicSampling drops every group: see what the "
            f"episode {line_of(by_task)}",
        ),
        (fails_in_part, {"group_size": 2}, "the log has the first traceback of each error in an"),
        (seldom, {"group_filter": tidegate.DynamicSampling()}, None),
    ],
)
async def test_groups_of_which_none_is_kept_while_the_trainer_waits_are_named(
    tidegate_serve: ServeInTests,
    caplog: pytest.LogCaptureFixture,
    episode: Any,
    settings: dict[str, Any],
    said: str | None,
) -> None:
    async with tidegate_serve(**{**GROUPS, **settings}, stuck_after_s=10.0) as rollouts:
        waiting = asyncio.ensure_future(train(rollouts, episode, itertools.count()))
        await asyncio.sleep(60.0)
        findings = learning(rollouts.statistics())
        waiting.cancel()
    assert len(findings) == (said is not None)
    for finding in findings:
        assert finding.startswith("groups: the trainer waits for a batch, but no group was kept of")
        assert str(said) in finding
        assert len(warnings(caplog)) == 1
    if episode is fails_in_part:
        assert all(f"as {reason}" in findings[0] for reason in ("gave_up", "group_too_small"))


async def test_tasks_that_a_filter_drops_to_the_last_end_without_an_error_and_are_named(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate_serve(**GROUPS, group_filter=tidegate.DynamicSampling()) as rollouts:
        assert await train(rollouts, by_task) == []
    (finding,) = learning(rollouts.statistics())
    assert finding.startswith(
        "groups: the tasks are used up, and no group was kept of the last 256"
    )
    assert len(warnings(caplog)) == 1


async def test_tasks_that_are_used_up_while_the_trainer_waits_are_one_finding_and_not_two(
    tidegate_serve: ServeInTests,
) -> None:
    dynamic = tidegate.DynamicSampling()
    async with tidegate_serve(**GROUPS, group_filter=dynamic, stuck_after_s=2.0) as rollouts:
        assert await train(rollouts, by_task, range(1000)) == []
    (finding,) = learning(rollouts.statistics())
    assert "the tasks are used up, and no group was kept of the last 4000 rollouts" in finding


async def test_a_run_whose_prompts_were_all_too_long_ends_with_an_error(
    tidegate_serve: ServeInTests,
) -> None:
    async def too_long(episode: tidegate.Episode, task: int) -> float:
        episode.append([65] * 2_000_000)
        await episode.generate(max_tokens=4)
        return 1.0

    async with tidegate_serve(**{**GROUPS, "group_size": 2}) as rollouts:
        with pytest.raises(EpisodeError, match="prompts are longer than the engines' context"):
            await train(rollouts, too_long, range(8))
    assert "16 as prompt_too_long" in learning(rollouts.statistics())[0]


async def test_a_run_whose_tasks_all_failed_ends_with_an_error(
    tidegate_serve: ServeInTests,
) -> None:
    async def fails(episode: tidegate.Episode, task: int) -> float:
        raise tidegate.PolicyFailed(reason="gave_up")

    async with tidegate_serve(**{**GROUPS, "group_size": 2}) as rollouts:
        with pytest.raises(EpisodeError, match="no batch was made of any task: the tasks are used"):
            await train(rollouts, fails, range(4))


async def test_no_tasks_at_all_are_no_fault(tidegate_serve: ServeInTests) -> None:
    async with tidegate_serve(**GROUPS) as rollouts:
        assert await train(rollouts, always_right, ()) == []
    assert learning(rollouts.statistics()) == []
