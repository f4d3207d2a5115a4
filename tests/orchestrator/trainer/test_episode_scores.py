"""Tests that an episode gets the scores it requests, and that abandoned requests are not
computed."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tidegate
from tidegate.errors import EngineLost, RunClosed, ScoreRefused
from tidegate.orchestrator.core.failure_counts import FailureStatistics
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.policies.failures import FailureCause
from tidegate.policies.filters import GroupFilter
from tidegate.testing import ScriptedEngine, ServeInTests

INFRA = FailureCause.INFRASTRUCTURE

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 1, "max_staleness": 1}
LONG = list(range(4000))
"""Takes a simulated engine 0.8 s."""


def likelihood(score: tidegate.TokenScores) -> float:
    return float(score.logprobs.sum())


async def test_an_episode_scores_answers_between_its_turns_and_none_of_it_is_in_a_row(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([1, 2, 3])
        await episode.generate(max_tokens=4)
        context = episode.token_ids
        scores = await episode.score([[*context, 5], [*context, 5, 6]], start=len(context))
        await episode.generate(max_tokens=2)
        assert [score.version for score in scores] == [0, 0]
        assert episode.token_ids[: len(context)] == context
        return sum(map(likelihood, scores))

    async with tidegate_serve(**SMALL) as rollouts:
        batches = [batch async for batch in rollouts.batches([0], episode=solve)]
        ledger = rollouts.statistics().ledger
    assert batches[0].rewards.tolist() == [-3.0, -3.0]
    assert int(batches[0].loss_mask.sum()) == ledger.trained == 12
    assert ledger.error == 0


async def test_an_engine_that_dies_costs_no_score(
    tidegate_serve: ServeInTests, tidegate_engine: Callable[..., ScriptedEngine]
) -> None:
    dying, other = tidegate_engine(restart_s=math.inf), tidegate_engine(joins_at_s=1.0)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        asyncio.get_running_loop().call_later(0.1, dying.crash)
        (score,) = await episode.score([LONG])
        return float(score.engine == other.name)

    async with tidegate_serve(engines=[dying, other]) as rollouts:
        assert (await rollouts.evaluate([0], episode=solve)).rewards == [1.0]


async def test_a_paused_run_scores_once_it_continues_and_no_time_of_the_episode_runs(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        return likelihood((await episode.score([[1, 2, 3]]))[0])

    async with tidegate_serve(episode_timeout_s=5.0) as rollouts:
        await rollouts.pause()
        evaluating = asyncio.ensure_future(rollouts.evaluate([0], episode=solve))
        await asyncio.sleep(60)
        assert not evaluating.done()
        await rollouts.resume()
        assert (await evaluating).rewards == [-2.0]


async def test_an_abandoned_request_frees_the_engine_for_others(
    tidegate_serve: ServeInTests, tidegate_engine: Callable[..., ScriptedEngine]
) -> None:
    """The only place for scores is taken by one that takes 0.8 s, until it is given up."""
    loop = asyncio.get_running_loop()

    async def solve(episode: tidegate.Episode, task: int) -> float:
        began_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await episode.score([LONG])
        await episode.score([[1, 2]])
        return loop.time() - began_s

    async with tidegate_serve(engines=[tidegate_engine(max_running_turns=2)]) as rollouts:
        (took_s,) = (await rollouts.evaluate([0], episode=solve)).rewards
    assert took_s is not None
    assert took_s < 0.2


class OneIsEnough(GroupFilter):
    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        return "one_is_enough" if running else None


async def test_a_rollout_that_is_given_up_takes_its_scores_back(
    tidegate_serve: ServeInTests,
) -> None:
    ended: list[str] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        if episode.index == 0:
            try:
                await episode.score([LONG])
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
        await asyncio.sleep(0.01)
        return 0.0

    async with tidegate_serve(**SMALL, group_filter=OneIsEnough()) as rollouts:
        assert [batch async for batch in rollouts.batches([0], episode=solve)] == []
    assert ended == ["cancelled"]


async def test_what_an_episode_asks_in_the_background_ends_with_it(
    tidegate_serve: ServeInTests,
) -> None:
    request_of: list[asyncio.Future[Any]] = []
    kept: list[tidegate.Episode] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        request_of.append(asyncio.ensure_future(episode.score([LONG])))
        request_of.append(asyncio.ensure_future(episode.fork().score([LONG])))
        kept.append(episode)
        await asyncio.sleep(0.01)
        return 1.0

    async with tidegate_serve() as rollouts:
        assert (await rollouts.evaluate([0], episode=solve)).rewards == [1.0]
        for one in request_of:
            with pytest.raises(RunClosed, match="the episode has returned"):
                await one
        with pytest.raises(RunClosed, match="the episode has returned"):
            await kept[0].score([[1, 2]])


async def test_a_score_that_no_engine_can_compute_fails_the_episode_with_the_reason(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        with pytest.raises(ScoreRefused, match="computes rewards; they compute logprobs"):
            await episode.reward([[1, 2]])
        with pytest.raises(tidegate.errors.ConfigError, match="encode it first"):
            await episode.score(["a text"])
        return 1.0

    async with tidegate_serve() as rollouts:
        assert (await rollouts.evaluate([0], episode=solve)).rewards == [1.0]


class Broken:
    """A scorer whose last engine is gone."""

    async def score_queries(self, asked: Sequence[ScoreQuery]) -> list[Score]:
        raise EngineLost(f"{len(asked)} questions, and no engine is left")


async def test_a_scorer_that_is_gone_fails_the_episode_and_not_the_run(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        if task == 0:
            await episode.score([[1, 2]], by=Broken())
        return 1.0

    async with tidegate_serve() as rollouts:
        assert (await rollouts.evaluate([0, 1], episode=solve)).rewards == [None, 1.0]


async def test_a_teacher_that_hangs_fails_rollouts_as_infrastructure_until_it_continues(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([1, 2, 3])
        await episode.generate(max_tokens=2)
        await episode.attach_teacher(teacher)
        return 1.0

    async def train() -> list[tidegate.Batch]:
        return [batch async for batch in rollouts.batches([0], episode=solve)]

    rule = tidegate.FailurePolicy(reward=-1.0)  # of failures that the policy has caused
    async with (
        tidegate_serve(**SMALL, episode_timeout_s=5.0, failure_policy=rule) as rollouts,
        tidegate_serve() as teacher,
    ):
        await teacher.pause()
        training = asyncio.ensure_future(train())
        await asyncio.sleep(7.0)
        await teacher.resume()
        (batch,) = await training
        failures = rollouts.statistics().episode_failures
    assert batch.rewards.tolist() == [1.0, 1.0]
    assert batch.teacher_logprobs is not None
    assert batch.teacher_logprobs[batch.loss_mask].tolist() == [-1.0] * 4
    assert failures == (FailureStatistics(INFRA, "no_scores", retried=2),)


async def test_a_teacher_that_dies_costs_no_rollout_if_the_episode_chooses_another(
    tidegate_serve: ServeInTests, tidegate_engine: Callable[..., ScriptedEngine]
) -> None:
    engine = tidegate_engine(restart_s=math.inf)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([1, 2, 3])
        await episode.generate(max_tokens=2)
        if task == episode.index == episode.retries == 0:
            engine.crash()
        await episode.attach_teacher(other if episode.retries else teacher)
        return float(episode.retries)

    async with (
        tidegate_serve(**SMALL) as rollouts,
        tidegate_serve(engines=[engine], engine_start_timeout_s=5.0) as teacher,
        tidegate_serve() as other,
    ):
        rewards: list[list[float]] = []
        async for batch in rollouts.batches(range(3), episode=solve):
            rewards.append(batch.rewards.tolist())
            await rollouts.publish({})
        statistics = rollouts.statistics()
    assert rewards == [[1.0, 1.0]] * 3
    assert statistics.discarded_rollouts == {}
    assert statistics.episode_failures == (FailureStatistics(INFRA, "engine_lost", retried=6),)
