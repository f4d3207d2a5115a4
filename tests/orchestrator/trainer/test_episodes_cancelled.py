"""Tests that an episode that is cancelled, by itself or by other code, ends."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

import tidegate
from tidegate.errors import RunClosed, TurnRefused
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes import episode as episode_module
from tidegate.orchestrator.episodes import runner
from tidegate.orchestrator.episodes.episode import refuse_too_large
from tidegate.policies.filters import GroupFilter
from tidegate.testing import ServeInTests
from tidegate.transport.limits import CONTEXT_TOKENS_MAX, FRAME_BYTES_MAX_BY_KIND
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

TOO_MANY = FRAME_BYTES_MAX_BY_KIND["submit_turn"] // 4
"""Tokens of a context that no frame holds."""

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
    """Clients of HTTP do, for their timeouts; a scope recognises its own cancellation by its
    message."""

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


async def test_a_caller_that_waits_for_a_branch_of_a_rollout_that_is_given_up_gets_an_error(
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
        with pytest.raises(RunClosed, match="rollout can't continue"):
            waiting[0].result()


async def test_what_an_episode_raises_because_the_run_ends_is_no_failure_of_its_own(
    tidegate_serve: ServeInTests,
) -> None:
    """In a journal it would be one, and the resumed run would continue without its rollout."""

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


# ---------------------------------------------------------------- what would end a process


class Unheard(BaseException):
    """A user's own, which no ``except Exception`` catches."""


async def in_a_task(error: BaseException) -> None:
    async def fail() -> None:
        raise error

    await asyncio.create_task(fail())


async def in_a_group(error: BaseException) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        group.create_task(asyncio.sleep(10))


async def in_a_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    await asyncio.to_thread(fail)


async def at_once(error: BaseException) -> None:
    raise error


class Worthless:
    """A reward whose value can't be read."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __float__(self) -> float:
        raise self._error


@pytest.mark.parametrize("raises", [at_once, in_a_task, in_a_group, in_a_thread])
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Unheard("me")], ids=repr)
async def test_an_episode_that_raises_what_would_end_a_process_costs_its_own_group_and_no_more(
    tidegate_serve: ServeInTests,
    raises: Callable[[BaseException], Awaitable[None]],
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("?")
        await episode.generate(max_tokens=2)
        if task == 0:
            await raises(error)
        return float(episode.index)

    async with tidegate_serve(**SMALL) as rollouts:
        batches = [batch.tasks async for batch in rollouts.batches([0, 1], episode=solve)]
        discarded = rollouts.statistics().ledger.discarded
    assert batches == [(1, 1)]
    assert discarded["episode_error"] == 4
    assert type(error).__name__ in caplog.text


async def test_a_reward_that_ends_the_process_when_it_is_read_costs_its_own_group_and_no_more(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> Any:
        return Worthless(SystemExit(0)) if task == 0 else float(episode.index)

    async with tidegate_serve(**SMALL) as rollouts:
        assert [batch.tasks async for batch in rollouts.batches([0, 1], episode=solve)] == [(1, 1)]


# ---------------------------------------------------------------- what no engine can be sent


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_context_that_no_message_holds_costs_its_own_group_and_no_more(
    tidegate_serve: ServeInTests, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is asked for; and if that were passed, where it would be sent."""
    if not is_checked:
        monkeypatch.setattr(episode_module, "CONTEXT_TOKENS_MAX", 1 << 31)
        monkeypatch.setattr(runner, "refuse_too_large", lambda *_: None)
    refused: list[str] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        try:
            episode.append(array("i", bytes(4 * TOO_MANY)) if task == 0 else "?")
            await episode.generate(max_tokens=2)
        except TurnRefused as error:
            refused.append(str(error))
            raise
        return float(episode.index)

    async with tidegate_serve(**SMALL) as rollouts:
        assert [batch.tasks async for batch in rollouts.batches([0, 1], episode=solve)] == [(1, 1)]
    assert len(refused) == 2
    said = str(TOO_MANY) if is_checked else "a SubmitTurn would be refused"
    assert all(said in why for why in refused)


def refusal_of(tokens: int, *media: Media, context_tokens_max: int = 0, **options: Any) -> str:
    rollout = Rollout(0, 0, 0)
    rollout.token_ids.frombytes(bytes(4 * tokens))
    sampling = SamplingParams(max_tokens=1, **options)
    try:
        refuse_too_large(rollout, sampling, media, context_tokens_max)
    except TurnRefused as error:
        return str(error)
    return ""


def test_a_turn_is_refused_by_the_model_and_by_its_bytes() -> None:
    long: dict[str, Any] = {"stop_strings": ["x" * 1024] * 3000}
    assert refusal_of(999, context_tokens_max=1000) == ""
    assert "engines read 1000 together" in refusal_of(1000, context_tokens_max=1000)
    assert refusal_of(3_000_000, **long) == ""
    assert "of which 15200000 are its context" in refusal_of(3_800_000, **long)
    assert f"engines read {CONTEXT_TOKENS_MAX} together" in refusal_of(CONTEXT_TOKENS_MAX + 1)
    assert refusal_of(10, Media("image", "x.png")) == ""
    assert "surrogates not allowed" in refusal_of(10, Media("image", "\ud800.png"))
