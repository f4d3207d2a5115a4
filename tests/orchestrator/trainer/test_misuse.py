"""Tests of unusual calls by a trainer: each gives a clear error or a right result, and no hang."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.orchestrator.trainer.runs import SINGLE, WAIT_S, one_turn
from tidegate.errors import BatchNotHeld, ConfigError, RunClosed, TidegateError, TurnRefused
from tidegate.observability.dashboard.dashboard import URL_FILE
from tidegate.orchestrator.trainer import run as run_module
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.staleness import StalenessPolicy
from tidegate.testing import ServeInTests

pytestmark = [pytest.mark.wire, pytest.mark.usefixtures("nothing_is_left_running")]


async def test_a_publish_after_part_of_a_versions_batches_is_taken_and_no_later_one_is_refused(
    model: Path,
) -> None:
    policy = BoundedStaleness(max_staleness=1, groups_per_batch=2, batches_per_version=2)
    weights = load_file(model / "model.safetensors")
    async with tidegate.serve(
        model=model, engines=1, group_size=1, max_running_turns=8, staleness_policy=policy
    ) as rollouts:
        taken = 0
        async for _ in rollouts.batches(range(14), episode=one_turn):
            taken += 1
            if taken == 1 or taken % 2 == 0:
                assert await rollouts.publish(weights) == taken // 2 + 1
                assert rollouts.statistics().held_batches == ()
        assert taken == 7
        assert await rollouts.publish(weights) == 5  # the last version, of one batch
        assert rollouts.statistics().max_staleness_seen <= 1


async def test_a_publish_that_names_no_batches_but_something_else_is_refused_and_sends_nothing(
    model: Path,
) -> None:
    weights = load_file(model / "model.safetensors")
    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        await rollouts.offer(range(4), episode=one_turn)
        batch = await rollouts.next_batch()
        assert batch is not None
        wrong: list[Any] = [1, batch, "1", ["1"], [1.0], [None]]
        for batches in wrong:
            with pytest.raises(ConfigError, match="batches must be a list of batches or"):
                await rollouts.publish(weights, batches=batches)
        for unknown in (0, -1, 2):
            with pytest.raises(BatchNotHeld, match=f"names batch {unknown}, which was not handed"):
                await rollouts.publish(weights, batches=[unknown])
        assert rollouts.version == 0
        assert await rollouts.publish(weights, batches=[1, batch]) == 1
        with pytest.raises(BatchNotHeld, match="names batch 1, which is in version"):
            await rollouts.publish(weights, batches=[batch])


# ---------------------------------------------------------------- settings


def listening() -> set[int]:
    """Listening ports of this process."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_a_run_that_its_settings_spoil_leaves_nothing_in_the_way_of_the_next(
    model: Path, tmp_path: Path
) -> None:
    settings = {**SINGLE, "run_directory": tmp_path / "run", "journal": True}
    settings["dashboard_address"] = "127.0.0.1:0"
    listening_before = listening()
    (tmp_path / "run").mkdir()
    url_file = tmp_path / "run" / URL_FILE
    url_file.write_text("of a run that is shown from this directory")
    for spoilt in (
        {"curve_key_directory": tmp_path / "none"},
        {"weight_channel": "relay", "curve_key_directory": tmp_path},
    ):
        with (
            pytest.raises(ConfigError, match="can't read"),
            tidegate.serve_sync(model=model, **settings, **spoilt),
        ):
            pass
    assert url_file.exists()
    assert listening() == listening_before
    with tidegate.serve_sync(model=model, **settings) as rollouts:
        assert rollouts.evaluate([1], episode=one_turn).failures == 0


@dataclass(frozen=True, kw_only=True)
class Unfinished(StalenessPolicy):
    """Doesn't say how many groups may be outstanding."""


def test_a_policy_that_raises_ends_the_run_with_its_error(model: Path) -> None:
    policy = Unfinished(groups_per_batch=2)
    with (
        pytest.raises(NotImplementedError),
        tidegate.serve_sync(model=model, engines=1, group_size=1, staleness_policy=policy),
    ):
        pass


# ---------------------------------------------------------------- the trainer


def test_an_iterator_that_raises_ends_the_batches_with_its_error_whenever_it_does(
    model: Path,
) -> None:
    def tasks() -> Iterator[int]:
        yield from range(6)
        raise ZeroDivisionError("the data loader broke")

    state = load_file(model / "model.safetensors")
    with tidegate.serve_sync(model=model, **SINGLE) as rollouts:

        def train() -> None:
            for _ in rollouts.batches(tasks(), episode=one_turn):
                rollouts.publish(state)

        with pytest.raises(ZeroDivisionError, match="the data loader broke"):
            train()
        with pytest.raises(ZeroDivisionError):
            rollouts.evaluate([0], episode=one_turn)


def test_calls_that_the_end_of_the_run_overtakes_raise_that_end(model: Path) -> None:
    def tasks() -> Iterator[int]:
        yield from range(2)
        raise ZeroDivisionError("the data loader broke")

    with tidegate.serve_sync(model=model, **SINGLE) as rollouts:
        run = rollouts._handle._running

        async def meets_closed_sockets(scheduler: object) -> None:
            while not run._is_ending:  # noqa: ASYNC110 - as a publish that is still writing
                await asyncio.sleep(0)
            raise OSError("not a socket")

        asked = run.submit(meets_closed_sockets)
        with pytest.raises(ZeroDivisionError):
            for _ in rollouts.batches(tasks(), episode=one_turn):
                pass
        with pytest.raises(ZeroDivisionError):
            asked.result(60.0)


async def cancelled_when(event: threading.Event, call: Awaitable[object]) -> None:
    """Wait for it until the event."""
    waiting = asyncio.ensure_future(call)
    assert await asyncio.to_thread(event.wait, WAIT_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_batch_whose_request_was_cancelled_is_not_lost(model: Path) -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def gated(episode: tidegate.Episode, task: int) -> float:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(gate.wait(), loop))
        return await one_turn(episode, task)

    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(rollouts.batches(range(2), episode=gated)), 0.1)
        gate.set()
        batches = [b async for b in rollouts.batches([], episode=gated)]
    trained = sum(batch.sampled_tokens for batch in batches)
    assert trained == rollouts.statistics().ledger.trained > 0


async def test_new_tasks_replace_an_iterator_whose_next_task_is_pending(model: Path) -> None:
    is_taken = threading.Event()

    async def never() -> AsyncIterator[int]:
        yield 0
        is_taken.set()
        await asyncio.Event().wait()

    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        await cancelled_when(is_taken, anext(rollouts.batches(never(), episode=one_turn)))
        state = load_file(model / "model.safetensors")
        rows = 0
        async for batch in rollouts.batches(range(5), episode=one_turn):
            rows += len(batch.rewards)
            await rollouts.publish(state)
    assert rows == 6  # the first iterator's one task, too


async def test_two_publishes_at_once_each_get_a_number_and_the_newer_wins(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        results = await asyncio.gather(rollouts.publish(state), rollouts.publish(state))
        assert tuple(results) == (1, 2)
        assert [engine.weight_version for engine in rollouts.statistics().engines] == [2]
        assert await rollouts.publish(state) == 3


async def test_a_cancelled_publish_never_leaves_one_number_for_two_sets_of_weights(
    model: Path,
) -> None:
    state = load_file(model / "model.safetensors")
    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        for delay_s in (0.0, 0.001, 0.003, 0.01, 0.03):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rollouts.publish(state), delay_s)
            live = rollouts.statistics().trainer_version
            assert await rollouts.publish(state) == live + 1


async def test_a_run_is_used_once(model: Path) -> None:
    rollouts = tidegate.serve(model=model, **SINGLE)
    async with rollouts:
        pass
    with pytest.raises(RuntimeError, match=r"can't be started twice"):
        await rollouts.__aenter__()


async def test_rollouts_without_a_token_make_a_batch_and_a_record(
    model: Path, tmp_path: Path
) -> None:
    async def silent(episode: tidegate.Episode, task: int) -> float:
        return 1.0

    async with tidegate.serve(model=model, **SINGLE, run_directory=tmp_path / "run") as rollouts:
        batches = [b async for b in rollouts.batches(range(2), episode=silent)]
    assert batches[0].token_ids.shape == (2, 0)


# ---------------------------------------------------------------- the episode


async def outcome(model: Path, episode: Any, **settings: Any) -> float | None:
    """The reward of one evaluation of it."""
    async with tidegate.serve(model=model, **{**SINGLE, **settings}) as rollouts:
        evaluation = await rollouts.evaluate([0], episode=episode)
    assert rollouts.statistics().evaluation_ledger.error == 0
    return evaluation.rewards[0]


async def test_a_turn_given_up_keeps_what_it_sampled_and_the_next_one_is_its_own(
    model: Path,
) -> None:
    async def impatient(episode: tidegate.Episode, task: int) -> float:
        episode.append([5, 6, 7])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(episode.generate(max_tokens=400, stop_token_ids=[]), 0.02)
        before = len(episode.token_ids)
        turn = await episode.generate(max_tokens=8, stop_token_ids=[])
        assert len(turn.token_ids) == 8
        assert episode.token_ids[before:] == turn.token_ids
        return 1.0

    assert await outcome(model, impatient) == 1.0


async def test_an_episode_that_awaits_something_cancelled_fails_like_any_other(
    model: Path,
) -> None:
    async def helpless(episode: tidegate.Episode, task: int) -> float:
        helper = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        helper.cancel()
        await helper
        return 1.0

    assert await outcome(model, helpless) is None


async def test_what_no_engine_can_read_is_refused_at_once(model: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"max_tokens": 10.5},
        {"temperature": "1"},
        {"top_k": 2.5},
        {"stop_token_ids": ["x"]},
    ]

    async def careless(episode: tidegate.Episode, task: int) -> float:
        episode.append([5])
        for options in wrong:
            with pytest.raises(TurnRefused):
                await episode.generate(**options)
        return 1.0

    assert await outcome(model, careless) == 1.0


async def test_tasks_that_an_episode_leaves_behind_get_an_error_that_it_is_over(
    model: Path,
) -> None:
    reported: list[BaseException] = []

    async def leaving(episode: tidegate.Episode, task: int) -> float:
        async def background() -> None:
            try:
                await episode.generate(max_tokens=400, stop_token_ids=[])
            except TidegateError as error:
                reported.append(error)

        episode.append([5])
        leaving.task = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return 1.0

    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        evaluation = await rollouts.evaluate([0], episode=leaving)
        assert evaluation.rewards == [1.0]
        await rollouts.evaluate([1], episode=one_turn)
    assert [type(error) for error in reported] == [RunClosed]


async def test_an_episode_may_read_the_run_but_not_wait_for_it(model: Path) -> None:
    async with tidegate.serve(model=model, **SINGLE) as rollouts:

        async def curious(episode: tidegate.Episode, task: int) -> float:
            assert rollouts.statistics().ledger.error == 0
            with pytest.raises(RuntimeError, match="own episode"):
                await rollouts.evaluate([1], episode=one_turn)
            return 1.0

        assert (await rollouts.evaluate([0], episode=curious)).rewards == [1.0]


async def test_an_episode_that_will_not_end_does_not_keep_the_run_from_ending(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "EPISODES_END_TIMEOUT_S", 0.5)
    over, is_begun = False, threading.Event()

    async def stubborn(episode: tidegate.Episode, task: int) -> float:
        is_begun.set()
        while not over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return 1.0

    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        batches = rollouts.batches(itertools.repeat(0), episode=stubborn)
        await cancelled_when(is_begun, anext(batches))
    assert "their thread is abandoned" in caplog.text
    over = True
    thread = rollouts._running._thread
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()


# ---------------------------------------------------------------- engines


async def test_an_engine_that_stops_answering_is_killed_and_started_again(model: Path) -> None:
    times: dict[str, Any] = {"heartbeat_interval_s": 0.2, "engine_timeout_s": 1.0}
    async with tidegate.serve(model=model, **SINGLE, **times) as rollouts:
        (process,) = children(recursive=True)
        os.kill(process.pid, signal.SIGSTOP)
        assert (await rollouts.evaluate([0], episode=one_turn)).failures == 0
        (another,) = children(recursive=True)
        assert another.pid != process.pid


# ---------------------------------------------------------------- what would end the trainer


def test_an_episode_that_raises_what_ends_a_process_ends_neither_the_trainer_nor_the_run(
    model: Path,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        if task == 0:
            raise KeyboardInterrupt
        if task == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        return await one_turn(episode, task)

    async def fail() -> None:
        raise KeyboardInterrupt

    with tidegate.serve_sync(model=model, **SINGLE) as rollouts:
        (batch,) = rollouts.batches(range(4), episode=solve)
        assert set(batch.tasks) == {2, 3}
        assert rollouts.evaluate([0, 1, 2], episode=solve).failures == 2


def test_tasks_that_raise_what_ends_a_process_end_the_run_and_not_the_trainer(model: Path) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise SystemExit(0)

    with (
        pytest.raises(RunClosed, match=r"code on its event loop raised SystemExit\(0\)"),
        tidegate.serve_sync(model=model, **SINGLE) as rollouts,
    ):
        for _ in rollouts.batches(tasks(), episode=one_turn):
            pass


async def test_a_trainer_that_never_names_its_batches_is_told_how(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(episode: tidegate.Episode, task: int) -> float:
        episode.append("a question")
        await episode.generate(max_tokens=4)
        return float(episode.index)

    async with tidegate_serve(group_size=2, groups_per_batch=2, max_staleness=1) as rollouts:
        async for _ in rollouts.batches(range(16), episode=answer):
            await rollouts.publish({}, batches=[])
            if "reason=stale" in caplog.text:
                break
    assert "publish(…, batches=[batch]), which a partial publish must" in caplog.text
