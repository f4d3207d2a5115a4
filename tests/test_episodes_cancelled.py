"""What becomes of an episode that is cancelled, by itself or by others? It comes to an end."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import tidegate
from tidegate.errors import RunClosed
from tidegate.policies.filters import GroupFilter
from tidegate.testing import ServeInTests

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 1, "max_staleness": 1}


async def test_an_episode_that_cancels_itself_costs_its_own_group_and_no_more(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        if task == 0:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(1)
        return float(episode.index)

    async with tidegate_serve(**SMALL) as rollouts:
        batches = [batch.tasks async for batch in rollouts.batches([0, 1], episode=solve)]
        discarded = rollouts.statistics().ledger.discarded
    assert batches == [(1, 1)]
    assert discarded["episode_error"] == 4


async def test_an_episode_may_use_the_cancel_scopes_of_anyio(
    tidegate_serve: ServeInTests,
) -> None:
    """Clients of HTTP do, for their timeouts; a scope knows its own cancel by its message."""

    async def solve(episode: tidegate.Episode, task: int) -> float:
        with anyio.move_on_after(1) as waiting:
            await anyio.sleep(10)
        with anyio.CancelScope() as busy:
            busy.cancel()
            await asyncio.sleep(0)
        current = asyncio.current_task()
        assert current is not None
        return float(waiting.cancelled_caught + busy.cancelled_caught + current.cancelling())

    async with tidegate_serve() as rollouts:
        assert (await rollouts.evaluate([0], episode=solve)).rewards == [2.0]


@dataclass(frozen=True, kw_only=True)
class OneIsEnough(GroupFilter):
    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        return "one_is_enough" if running else None


async def test_who_waits_for_a_branch_of_a_rollout_that_is_given_up_is_told(
    tidegate_serve: ServeInTests,
) -> None:
    """A gateway's request does, in a task that is not the episode's. Nothing was sampled yet."""
    waiting: list[asyncio.Task[Any]] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        if episode.index == 0:
            episode.append("?")
            waiting.append(asyncio.ensure_future(episode.fork().generate(max_tokens=9)))
            await asyncio.sleep(60)
        await asyncio.sleep(0.001)
        return 0.0

    async with tidegate_serve(**SMALL, group_filter=OneIsEnough()) as rollouts:
        with pytest.raises(StopAsyncIteration):
            await anext(rollouts.batches([0], episode=solve))
        await asyncio.sleep(10)
        assert [task.done() for task in waiting] == [True]
        with pytest.raises(RunClosed, match="rollout can't go on"):
            waiting[0].result()


async def test_what_an_episode_raises_because_the_run_ends_is_no_failure_of_its_own(
    tidegate_serve: ServeInTests,
) -> None:
    """In a journal it would be one, and the resumed run would go on without its rollout."""

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        try:
            await asyncio.sleep(60 * task)
        except asyncio.CancelledError:
            raise ValueError("the browser could not be closed") from None
        return 1.0

    async with tidegate_serve(**SMALL) as rollouts:
        await anext(rollouts.batches([0, 1], episode=solve))
    assert rollouts.statistics().discarded_rollouts == {"run_ended": 2}
