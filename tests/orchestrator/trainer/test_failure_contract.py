"""Failed episodes of a whole run: begun again, rewarded by the rule, or discarded and counted."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidegate
from tidegate.errors import EpisodeError
from tidegate.orchestrator.core.failure_counts import FailureStatistics
from tidegate.orchestrator.episodes.tracebacks import TRACEBACKS
from tidegate.policies.failures import FailureCause
from tidegate.testing import ServeInTests

POLICY, INFRA, CODE = FailureCause.POLICY, FailureCause.INFRASTRUCTURE, FailureCause.CODE

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 1, "max_staleness": 1}


class Outage:
    """A tool that fails its first ``failures`` calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError("the tool server is down")


async def test_a_short_outage_of_a_tool_costs_neither_rollouts_nor_tokens(
    tidegate_serve: ServeInTests,
) -> None:
    outage = Outage(failures=3)

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("a question")
        first = await episode.generate(max_tokens=4)
        outage.call()
        episode.append("an observation")
        second = await episode.generate(max_tokens=4)
        return float(len(first.token_ids) + len(second.token_ids) + episode.index)

    async with tidegate_serve(**SMALL) as rollouts:
        batches = [batch async for batch in rollouts.batches([0, 1], episode=solve)]
        statistics = rollouts.statistics()
    assert [len(batch.rewards) for batch in batches] == [2, 2]
    assert statistics.ledger.discarded_total == 0
    assert statistics.episode_failures == (FailureStatistics(INFRA, "episode_error", retried=3),)


async def test_an_episode_sees_how_often_it_was_begun_again(tidegate_serve: ServeInTests) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        if episode.retries < 2:
            raise tidegate.InfrastructureFailed("its sandbox is gone", reason="sandbox_lost")
        return float(episode.retries)

    async with tidegate_serve(**SMALL) as rollouts:
        assert (await rollouts.evaluate([0], episode=solve)).rewards == [2.0]


async def test_a_model_that_stalls_is_trained_with_the_reward_of_a_timeout(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        if episode.index:
            await asyncio.sleep(1000)
        return 1.0

    rule = tidegate.FailurePolicy(reward=-1.0)
    async with tidegate_serve(**SMALL, episode_timeout_s=5.0, failure_policy=rule) as rollouts:
        batches = [batch async for batch in rollouts.batches([0], episode=solve)]
        statistics = rollouts.statistics()
    assert [batch.rewards.tolist() for batch in batches] == [[1.0, -1.0]]
    assert statistics.discarded_rollouts == {}
    assert statistics.episode_failures == (
        FailureStatistics(POLICY, "episode_timeout", rewarded=1),
    )


async def test_without_a_rule_the_models_failures_are_discarded_and_the_log_warns_of_that(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        if episode.index == 2:
            raise tidegate.PolicyFailed("there is no tool named serch", reason="invalid_call")
        return float(episode.index)

    with caplog.at_level(logging.WARNING, "tidegate"):
        async with tidegate_serve(**{**SMALL, "group_size": 3}) as rollouts:
            batches = [batch async for batch in rollouts.batches([0], episode=solve)]
            statistics = rollouts.statistics()
    assert [batch.rewards.tolist() for batch in batches] == [[0.0, 1.0]]
    assert statistics.discarded_rollouts == {"invalid_call": 1}
    assert "FailurePolicy(reward=0.0)" in caplog.text


async def test_a_rollout_that_is_discarded_while_it_waits_to_begin_again_never_does(
    tidegate_serve: ServeInTests,
) -> None:
    begun: list[int] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        begun.append(episode.index)
        episode.append("?")
        await episode.generate(max_tokens=2)
        if episode.index:
            raise ConnectionError
        await asyncio.sleep(1)
        raise KeyError("answer")

    rule = tidegate.FailurePolicy(retry_delay_s=600.0)
    async with tidegate_serve(**SMALL, failure_policy=rule) as rollouts:
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(rollouts.batches([0], episode=solve)), 10)
    assert sorted(begun) == [0, 1]
    assert rollouts.statistics().ledger.error == 0


def not_async(episode: tidegate.Episode, task: int) -> float:
    return 0.5


async def returns_none(episode: tidegate.Episode, task: int) -> float:
    return None  # type: ignore[return-value]


async def forgets_an_await(episode: tidegate.Episode, task: int) -> float:
    turn: Any = episode.generate(max_tokens=2)
    try:
        return float(len(turn.text))
    finally:
        turn.close()


async def asks_by_messages_without_a_template(episode: tidegate.Episode, task: int) -> float:
    await episode.generate(messages=[{"role": "user", "content": "?"}])
    return 0.5


@pytest.mark.parametrize("tasks", [4, 6, 16])
async def test_an_episode_that_can_never_work_ends_the_run_even_if_its_tasks_end_with_it(
    tidegate_serve: ServeInTests, tasks: int
) -> None:
    function: Any = not_async
    async with tidegate_serve(**{**SMALL, "group_size": 4}) as rollouts:
        batches = rollouts.batches(range(tasks), episode=function)
        with pytest.raises(EpisodeError, match="`async def not_async"):
            await anext(batches)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (not_async, r"`async def not_async\(episode, task\)`"),
        (returns_none, "must return its reward as a finite number.*got None"),
        (forgets_an_await, "'coroutine' object has no attribute 'text'"),
        (asks_by_messages_without_a_template, "chat_template"),
    ],
)
async def test_an_episode_that_can_never_work_ends_the_run_at_once_with_one_traceback(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture, function: Any, why: str
) -> None:
    with caplog.at_level(logging.WARNING, "tidegate"):
        async with tidegate_serve(**{**SMALL, "group_size": 4}) as rollouts:
            with pytest.raises(EpisodeError, match=why):
                await anext(rollouts.batches(range(100), episode=function))
            statistics = rollouts.statistics()
    assert caplog.text.count("Traceback") <= 2  # of the error and of its cause
    [failures] = statistics.episode_failures
    assert failures.cause is CODE
    assert failures.discarded <= 24  # those that ran when the 8th had failed


async def test_an_error_of_the_dataset_reaches_a_trainer_that_publishes_at_the_time(
    tidegate_serve: ServeInTests,
) -> None:
    def rows() -> Iterator[int]:
        yield from range(12)
        raise ValueError("row 12 is broken")

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("a question")
        await episode.generate(max_tokens=4)
        return float(episode.index)

    async def train(rollouts: tidegate.Rollouts) -> None:
        async for _ in rollouts.batches(rows(), episode=solve):
            await rollouts.publish({})

    async with tidegate_serve(**SMALL) as rollouts:
        with pytest.raises(ValueError, match="row 12 is broken"):
            await train(rollouts)


# ---------------------------------------------------------------- tracebacks


def files_of(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("reward", [None, float("nan"), "1.0", 1e39])
def test_a_wrong_reward_ends_in_the_episodes_line_and_without_tidegates_own_below_the_call(
    tidegate_serve_sync: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reward: Any,
) -> None:
    monkeypatch.delenv(TRACEBACKS, raising=False)

    async def solve(episode: tidegate.Episode, task: int) -> Any:
        return reward

    with (
        tidegate_serve_sync(**{**SMALL, "group_size": 4}) as rollouts,
        pytest.raises(EpisodeError) as ended,
    ):
        next(rollouts.batches(range(16), episode=solve))
    place = f"the episode solve ({__file__}:{solve.__code__.co_firstlineno}): "
    assert f"{place}an episode must return its reward as a finite number" in str(ended.value)
    here, *ours = files_of(ended.value)
    assert (here, len(ours)) == (__file__, 3)
    assert files_of(ended.value.__cause__) == []
    assert "runner.py" not in caplog.text
    assert place in caplog.text


@pytest.mark.parametrize("is_full", [False, True])
async def test_an_error_in_users_code_is_logged_with_their_lines_and_with_tidegates_on_request(
    tidegate_serve: ServeInTests,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_full: bool,
) -> None:
    monkeypatch.setenv(TRACEBACKS, "full" if is_full else "")

    def divide(by: int) -> float:
        return 1 / by

    async def solve(episode: tidegate.Episode, task: int) -> float:
        return divide(0)

    async with tidegate_serve(**{**SMALL, "group_size": 4}) as rollouts:
        with pytest.raises(EpisodeError) as ended:
            await anext(rollouts.batches(range(16), episode=solve))
    shown = [file for file in files_of(ended.value.__cause__) if file == __file__]
    assert len(shown) == 2
    assert ("runner.py" in caplog.text) == is_full
    assert (len(files_of(ended.value)) < 8) == (not is_full)
