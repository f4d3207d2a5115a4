"""The pytest fixtures, used as users do for their own trainers and agents."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import tidegate
from tidegate.errors import (
    ConfigError,
    EngineLost,
    EpisodeError,
    PublishNeeded,
    RunClosed,
    WeightsRefused,
)
from tidegate.testing import ScriptedEngine, ServeInTests, TurnRequest, VirtualTime

SMALL: dict[str, Any] = {"group_size": 1, "groups_per_batch": 2, "max_staleness": 1}


async def one_turn(episode: tidegate.Episode, task: Any) -> float:
    episode.append(str(task))
    await episode.generate(max_tokens=8)
    return 1.0


# ---------------------------------------------------------------- what engines say


async def test_scripted_engines_return_the_given_token_ids_and_a_stop_token(
    tidegate_serve: ServeInTests,
) -> None:
    turns: list[tidegate.GeneratedTurn] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([task])
        turns.append(await episode.generate(max_tokens=4))
        turns.append(await episode.generate(max_tokens=2, stop_token_ids=[7]))
        return 0.0

    async with tidegate_serve(says=[[40, 41, 42], [50, 51, 52]]) as rollouts:
        await rollouts.evaluate([9], episode=solve)
    assert turns[0].token_ids[:3] == [40, 41, 42]
    assert len(turns[0].token_ids) == 4
    assert (turns[0].finish_reason, turns[1].finish_reason) == ("stop", "length")
    assert turns[1].token_ids == [50, 51]


async def test_text_round_trips_without_a_model(tidegate_serve: ServeInTests) -> None:
    async def solve(episode: tidegate.Episode, task: str) -> float:
        episode.append(task)
        return float((await episode.generate()).text == "Grüße, 42!")

    async with tidegate_serve(says="Grüße, 42!") as rollouts:
        assert (await rollouts.evaluate(["«é»"], episode=solve)).rewards == [1.0]


async def test_a_script_may_depend_on_the_context_and_the_weight_version(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine()

    def says(request: TurnRequest) -> str:
        return f"{request.text} v{request.version}"

    async with tidegate_serve(engines=[engine], says=says) as rollouts:
        await rollouts.publish({})
        await rollouts.evaluate(["a", "b"], episode=one_turn)
    assert [(request.text, request.version) for request in engine.requests] == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("tasks", [1, 3])
async def test_an_evaluation_raises_if_every_episode_hung_and_not_if_one_returned(
    tidegate_serve: ServeInTests, tasks: int
) -> None:
    async def hangs(episode: tidegate.Episode, task: int) -> float:
        if task < tasks:
            await asyncio.Event().wait()
        return 1.0

    async with tidegate_serve() as rollouts:
        with pytest.raises(EpisodeError, match=f"all {tasks} episodes of the evaluation failed"):
            await rollouts.evaluate(range(tasks), episode=hangs)
        assert (await rollouts.evaluate(range(tasks + 1), episode=hangs)).failures == tasks


def broken_script(request: TurnRequest) -> str:
    raise ZeroDivisionError("a bug in the script")


@pytest.mark.parametrize(
    ("says", "error", "why"),
    [
        (["once"], ConfigError, "the script has only 1 answers"),
        (broken_script, ZeroDivisionError, "a bug in the script"),
    ],
)
async def test_an_exhausted_or_broken_script_ends_the_run(
    tidegate_serve: ServeInTests, says: Any, error: type[Exception], why: str
) -> None:
    async with tidegate_serve(says=says) as rollouts:
        with pytest.raises(error, match=why):
            await rollouts.evaluate(["a", "b"], episode=one_turn)


# ---------------------------------------------------------------- what goes wrong with them


async def test_a_turn_continues_after_an_abort(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(aborts_at_token=2)
    async with tidegate_serve(engines=[engine], says="abcd") as rollouts:
        await rollouts.evaluate(["?"], episode=one_turn)
    assert [request.said for request in engine.requests] == ["", "ab"]


async def test_a_run_continues_while_engines_hang_slow_down_leave_or_are_cut_off(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine()
    loop = asyncio.get_running_loop()
    async with tidegate_serve(engines=[engine], says="abc") as rollouts:
        began_s = loop.time()
        troubles: list[Callable[[], None]] = [
            partial(engine.hang, 3.0),
            partial(engine.slow_down, 3.0),
            partial(engine.cut, 3.0),
            engine.leave,
            engine.crash,
        ]
        for trouble in troubles:
            trouble()
            assert (await rollouts.evaluate(["?"], episode=one_turn)).rewards == [1.0]
        assert 3.0 < loop.time() - began_s < 60.0
        assert engine.weight_version == 0
    assert engine.tokens >= 5 * 4


async def test_refused_weights_raise_in_the_trainer(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    async with tidegate_serve(engines=[tidegate_engine(refuses_publishes=1)]) as rollouts:
        with pytest.raises(WeightsRefused, match="engine-0"):
            await rollouts.publish({})
        assert await rollouts.publish({}) == 1


async def test_an_engine_that_never_restarts_ends_the_run_with_the_real_error(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine(restart_s=float("inf"))
    async with tidegate_serve(engines=[engine]) as rollouts:
        engine.crash()
        with pytest.raises(EngineLost, match=r"the last engine, .* has ended"):
            await rollouts.evaluate(["?"], episode=one_turn)
        with pytest.raises(EngineLost):
            await rollouts.publish({})


def test_a_failed_sync_run_raises_its_error(
    tidegate_serve_sync: Callable[..., tidegate.SyncRollouts],
    tidegate_engine: type[ScriptedEngine],
) -> None:
    engine = tidegate_engine(crashes_at_token=1, restart_s=float("inf"))
    with tidegate_serve_sync(engines=[engine]) as rollouts, pytest.raises(EngineLost):
        rollouts.evaluate(["?"], episode=one_turn)


# ---------------------------------------------------------------- what the trainer sees


async def test_a_simulated_run_has_the_batches_bounds_and_errors_of_serve(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve(says="xy", **SMALL) as rollouts:
        assert isinstance(rollouts, tidegate.Rollouts)
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        batch = await anext(batches)
        assert isinstance(batch, tidegate.Batch)
        assert batch.loss_mask.sum() == batch.sampled_tokens == 2 * 3
        assert batch.logprobs[batch.loss_mask].tolist() == [-1.0] * 6
        await anext(batches)
        with pytest.raises(PublishNeeded):
            await anext(batches)
        assert rollouts.statistics().ledger.error == 0
    with pytest.raises(RunClosed):
        await rollouts.publish({})


async def test_idle_shares_are_measured_in_virtual_time(tidegate_serve: ServeInTests) -> None:
    async with tidegate_serve(says="xy", **SMALL) as rollouts:
        async for _ in rollouts.batches(range(8), episode=one_turn):
            await asyncio.sleep(100.0)
            await rollouts.publish({})
        statistics = rollouts.statistics()
    assert statistics.wall_s == pytest.approx(400.0, rel=0.01)
    assert statistics.trainer_idle_share < 0.01
    assert statistics.engine_idle_share > 0.99


async def test_an_episode_that_always_fails_ends_the_run(tidegate_serve: ServeInTests) -> None:
    async def broken(episode: tidegate.Episode, task: int) -> float:
        raise KeyError("a bug of mine")

    async with tidegate_serve(**SMALL) as rollouts:
        with pytest.raises(EpisodeError, match="a bug of mine"):
            await anext(rollouts.batches(range(200), episode=broken))


async def test_an_episode_that_calls_its_own_run_is_refused(tidegate_serve: ServeInTests) -> None:
    async with tidegate_serve() as rollouts:

        async def curious(episode: tidegate.Episode, task: int) -> float:
            with pytest.raises(RuntimeError, match="own episode"):
                await rollouts.evaluate([1], episode=one_turn)
            return 1.0

        assert (await rollouts.evaluate([0], episode=curious)).rewards == [1.0]


def test_virtual_time_passes_only_while_a_sync_trainer_waits(
    tidegate_serve_sync: Callable[..., tidegate.SyncRollouts], tidegate_virtual_time: VirtualTime
) -> None:
    with tidegate_serve_sync(says="xy", **SMALL) as rollouts:
        before_s = tidegate_virtual_time.now_s
        rows = 0
        for batch in rollouts.batches(range(6), episode=one_turn):
            rows += len(batch.rewards)
            rollouts.publish({})
        assert 0.0 < tidegate_virtual_time.now_s - before_s < 5.0
    assert (rows, rollouts.version) == (6, 3)


async def test_a_simulated_test_is_deterministic(tidegate_serve: ServeInTests) -> None:
    runs = []
    for _ in range(2):
        said: list[str] = []

        async def listen(episode: tidegate.Episode, task: int, said: list[str] = said) -> float:
            episode.append(str(task))
            said.append((await episode.generate()).text)
            return 0.0

        async with tidegate_serve(engines=3) as rollouts:
            await rollouts.evaluate(range(10), episode=listen)
        runs.append((said, rollouts.statistics().ledger))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 5


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_stalenes": 1}, "no such setting"),
        ({"journal": True, "run_directory": "runs/x"}, "journal can't be used in a simulated run"),
        ({"resume": True}, "resume can't be used in a simulated run"),
        ({"engines": []}, "engines=0"),
    ],
)
def test_settings_unavailable_in_simulated_runs_are_refused(
    settings: dict[str, Any], why: str, tidegate_serve: ServeInTests
) -> None:
    with pytest.raises(ConfigError, match=why):
        tidegate_serve(**settings)


async def test_a_scripted_engine_is_refused_by_a_second_run(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine]
) -> None:
    engine = tidegate_engine()
    with pytest.raises(RuntimeError, match="has not been started"):
        engine.crash()
    async with tidegate_serve(engines=[engine]):
        pass
    with pytest.raises(ConfigError, match="already belongs to another run"):
        async with tidegate_serve(engines=[engine]):
            pass


async def test_a_sync_run_in_an_async_test_is_refused(tidegate_serve: ServeInTests) -> None:
    with (
        pytest.raises(RuntimeError, match="serve_sync would wait for the event loop"),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(tidegate_serve.sync())


def test_a_run_on_another_event_loop_is_refused(tidegate_serve: ServeInTests) -> None:
    async def main() -> None:
        async with tidegate_serve():
            pass

    with pytest.raises(RuntimeError, match="async fixtures have another event loop"):
        asyncio.run(main())
