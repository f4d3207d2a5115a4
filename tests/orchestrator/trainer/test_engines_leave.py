"""Engines that come and go in a run, for real: drained, signalled, killed meanwhile, replaced."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import tidegate
from tests.forked_programs import children
from tests.orchestrator.trainer.runs import Weights, audited
from tidegate.errors import ConfigError, EngineStartFailed
from tidegate.observability.records.trajectories import read_trajectories

pytestmark = pytest.mark.wire

SLOW: dict[str, Any] = {
    "engines": 2,
    "group_size": 4,
    "groups_per_batch": 2,
    "max_staleness": 1,
    "max_running_turns": 8,
    "step_time_min_s": 0.005,
    "temperature": 0.9,
}
"""Settings of a run whose turns take half a second, so that engines leave in their midst."""

TURN_TOKENS = 100


async def long_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=TURN_TOKENS, min_tokens=TURN_TOKENS)
    assert len(turn.token_ids) == TURN_TOKENS
    return float(turn.token_ids[0] % 2)


async def at_work(rollouts: tidegate.Rollouts, name: str, tokens: int = 20) -> None:
    """Return once an engine has sampled ``tokens`` tokens more, which end no turn."""
    before = work(rollouts, name)
    while work(rollouts, name) < before + tokens:  # noqa: ASYNC110 - steps set no event
        await asyncio.sleep(0.005)


def work(rollouts: tidegate.Rollouts, name: str) -> int:
    return next(engine.tokens for engine in rollouts.engines if engine.name == name)


def names(rollouts: tidegate.Rollouts) -> list[str]:
    return [engine.name for engine in rollouts.engines]


def process_of(name: str) -> psutil.Process:
    (found,) = [p for p in children() if name in p.cmdline()]
    return found


def moved_turns(run: Path) -> int:
    """Return the number of recorded turns that two engines have sampled."""
    turns = [turn for rollout in read_trajectories(run) for turn in rollout.turns]
    return sum(len({span.engine for span in turn.spans}) > 1 for turn in turns)


async def mid_turn(
    rollouts: tidegate.Rollouts, tasks: int, engine: str = "engine-1"
) -> tuple[AsyncIterator[tidegate.Batch], "asyncio.Future[tidegate.Batch]"]:
    """Ask for a batch of these tasks; return once an engine is in the midst of its turns."""
    batches = rollouts.batches(range(tasks), episode=long_turn)
    batch = asyncio.ensure_future(anext(batches))
    await at_work(rollouts, engine)
    return batches, batch


async def draining(rollouts: tidegate.Rollouts) -> "asyncio.Future[int]":
    """Drain an engine, which would take far longer than the test."""
    drain = asyncio.ensure_future(rollouts.drain("engine-1", within_s=600.0))
    await at_work(rollouts, "engine-1", tokens=1)
    return drain


Leave = Callable[[tidegate.Rollouts], Any]


async def retired(rollouts: tidegate.Rollouts) -> None:
    assert await rollouts.retire("engine-1") > 0


async def signalled(rollouts: tidegate.Rollouts) -> None:
    process = process_of("engine-1")
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, 10)
    while "engine-1" in names(rollouts):  # noqa: ASYNC110 - its goodbye sets no event
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leave", [retired, signalled])
async def test_turns_of_an_engine_that_leaves_continue_with_all_their_tokens(
    model: Path, tmp_path: Path, leave: Leave
) -> None:
    run, weights = tmp_path / "run", Weights(model)
    async with tidegate.serve(model=model, **SLOW, run_directory=run) as rollouts:
        batches, batch = await mid_turn(rollouts, 12)
        await leave(rollouts)
        assert names(rollouts) == ["engine-0"]
        await batch
        await rollouts.publish(weights.step())
        async for _ in batches:
            await rollouts.publish(weights.step())
        assert names(rollouts) == ["engine-0"]  # it was not started again
    statistics = rollouts.statistics()
    assert statistics.ledger.error == 0
    assert statistics.ledger.generated == statistics.ledger.trained == 12 * 4 * TURN_TOKENS
    assert "engine ends: " in (run / "logs" / "engine-1.log").read_text()
    report = audited(run)
    assert report.tokens == statistics.ledger.trained
    assert report.tokens_unknown == 0
    assert moved_turns(run) > 0


async def test_turns_end_where_they_are_within_the_time_of_a_drain(model: Path) -> None:
    async with tidegate.serve(model=model, **SLOW) as rollouts:
        _, batch = await mid_turn(rollouts, 2)
        drain = asyncio.ensure_future(rollouts.drain("engine-1", within_s=60.0))
        again = asyncio.ensure_future(rollouts.drain("engine-1", within_s=90.0))
        await at_work(rollouts, "engine-1")
        states = {engine.name: engine.state for engine in rollouts.engines}
        assert states == {"engine-0": "serving", "engine-1": "draining"}
        assert [await drain, await again] == [0, 0]
        await batch
        with pytest.raises(ConfigError, match=r"'engine-1' has left \(drained; 0 turns moved\)"):
            await rollouts.drain("engine-1")


async def test_a_publish_does_not_wait_for_a_draining_engine_and_ends_its_time(
    model: Path,
) -> None:
    async with tidegate.serve(model=model, **{**SLOW, "step_time_min_s": 0.05}) as rollouts:
        _, batch = await mid_turn(rollouts, 4)
        drain = await draining(rollouts)
        assert await rollouts.publish(Weights(model).step()) == 1
        assert await drain > 0
        assert [(e.name, e.weight_version) for e in rollouts.engines] == [("engine-0", 1)]
        await batch
    assert rollouts.statistics().ledger.error == 0


async def test_no_turn_runs_on_a_draining_engine_once_a_pause_has_returned(model: Path) -> None:
    async with tidegate.serve(model=model, **SLOW) as rollouts:
        _, batch = await mid_turn(rollouts, 2)
        drain = await draining(rollouts)
        await rollouts.pause("keep")
        generated = rollouts.statistics().ledger.generated
        assert names(rollouts) == ["engine-0"]
        assert await drain > 0
        await asyncio.sleep(0.05)
        assert rollouts.statistics().ledger.generated == generated
        await rollouts.resume()
        await batch


async def test_an_engine_killed_while_it_drains_loses_no_turn(model: Path) -> None:
    async with tidegate.serve(model=model, **SLOW) as rollouts:
        _, batch = await mid_turn(rollouts, 2)
        drain = await draining(rollouts)
        process_of("engine-1").kill()
        await drain
        assert len((await batch).rewards) == 8
        assert names(rollouts) == ["engine-0"]
    assert rollouts.statistics().ledger.error == 0


async def test_turns_wait_without_an_engine_until_one_is_started(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidegate.serve(model=model, **{**SLOW, "engines": 1}) as rollouts:
        with pytest.raises(ConfigError, match="no engine is named 'engine-7'; connected engines: "):
            await rollouts.drain("engine-7")
        _, batch = await mid_turn(rollouts, 4, "engine-0")
        await rollouts.scale(engines=0)
        assert names(rollouts) == []
        await rollouts.scale(engines=2)
        assert len(names(rollouts)) == 2
        await batch
        await rollouts.scale(engines=1)
        assert len(names(rollouts)) == 1
        await anext(rollouts.batches(range(2), episode=long_turn))
    assert rollouts.statistics().ledger.error == 0
    said = [message for message in caplog.messages if "is the last that takes turns" in message]
    assert said == [
        "engine=engine-0 is the last that takes turns: turns wait until another engine joins"
    ]


async def test_an_added_engine_serves_the_newest_weights(model: Path, tmp_path: Path) -> None:
    weights, run = Weights(model), tmp_path / "run"
    async with tidegate.serve(model=model, **{**SLOW, "engines": 1}, run_directory=run) as rollouts:
        batches = rollouts.batches(range(12), episode=long_turn)
        await anext(batches)
        await rollouts.publish(weights.step())
        await rollouts.scale(engines=3)
        assert names(rollouts) == ["engine-0", "engine-1", "engine-2"]
        async for _ in batches:
            version = await rollouts.publish(weights.step())
        assert {e.weight_version for e in rollouts.engines} == {version}
        assert all(engine.tokens for engine in rollouts.engines)
    audited(run)


async def test_an_engine_that_can_not_be_added_is_named_with_the_reason(
    model: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "model"
    moved.symlink_to(model)
    async with tidegate.serve(model=moved, **{**SLOW, "engines": 1}) as rollouts:
        moved.unlink()
        with pytest.raises(EngineStartFailed, match=r"'engine-1' did not start: .*is not a direct"):
            await rollouts.scale(engines=2)
        assert names(rollouts) == ["engine-0"]
        await anext(rollouts.batches(range(2), episode=long_turn))
        assert len(children()) == 1
