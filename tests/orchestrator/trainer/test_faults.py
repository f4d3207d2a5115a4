"""Tests that a run survives faults of real processes, and names those that it can't survive."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

import tidegate
from tests.forked_programs import children
from tests.orchestrator.trainer.runs import SINGLE, WAIT_S, engine_process, one_turn, until
from tidegate.errors import (
    EngineLagging,
    EpisodeError,
    RunBlocked,
    WeightsRefused,
)
from tidegate.orchestrator.episodes import runner as deadlines
from tidegate.orchestrator.scheduler import loop_watch
from tidegate.orchestrator.trainer import run as run_module
from tidegate.transport.private_directory import PrivateDirectory

pytestmark = [pytest.mark.wire, pytest.mark.usefixtures("nothing_is_left_running")]


IMPATIENT: dict[str, Any] = {"heartbeat_interval_s": 0.1, "stuck_after_s": 0.2}


def whats_stuck(rollouts: tidegate.Rollouts) -> dict[str, str]:
    """What is stuck, and where, by kind."""
    return {stuck.kind: f"{stuck.name}: {stuck.where}" for stuck in rollouts.statistics().stuck}


async def stuck(rollouts: tidegate.Rollouts, what: str) -> str:
    """Where something of that kind is stuck, once it is."""
    found: dict[str, str] = {}
    await until(lambda: found.update(whats_stuck(rollouts)) or what in found)
    return found[what]


# ---------------------------------------------------------------- engines


async def test_an_engine_started_anew_after_a_refused_publish_serves_the_last_good_weights(
    model: Path,
) -> None:
    weights = load_file(model / "model.safetensors")
    for tensor in weights.values():
        tensor *= 1.1
    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        await rollouts.publish(weights)
        before = await rollouts.evaluate(range(4), episode=one_turn)
        damaged = {name: tensor * 3 for name, tensor in weights.items()}
        del damaged["model.norm.weight"]
        with pytest.raises(WeightsRefused):
            await rollouts.publish(damaged)
        (engine,) = children(recursive=True)
        engine.kill()
        assert await rollouts.evaluate(range(4), episode=one_turn) == before
        assert [e.weight_version for e in rollouts.statistics().engines] == [1]
        assert await rollouts.publish(weights) == 2


async def test_an_engine_that_hung_for_so_long_that_it_was_given_up_is_welcome_again(
    model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SINGLE, **IMPATIENT, "engines": 0, "engine_timeout_s": 1.0}
    settings["listen_address"] = f"ipc://{tmp_path}/wire"
    with engine_process(model, settings["listen_address"]) as engine:
        async with tidegate.serve(model=model, **settings) as rollouts:
            before = await rollouts.evaluate(range(4), episode=one_turn)
            engine.send_signal(signal.SIGSTOP)
            await until(lambda: not rollouts.statistics().engines)
            engine.send_signal(signal.SIGCONT)
            assert await rollouts.evaluate(range(4), episode=one_turn) == before
            assert engine.poll() is None


async def test_a_publish_that_an_engine_does_not_take_says_which_and_how_far_it_is(
    model: Path,
) -> None:
    weights = load_file(model / "model.safetensors")
    settings = {**SINGLE, **IMPATIENT, "weight_update_timeout_s": 5.0}
    async with tidegate.serve(model=model, **settings) as rollouts:
        (engine,) = children(recursive=True)
        engine.suspend()
        publish = asyncio.create_task(rollouts.publish(weights))
        assert await stuck(rollouts, "publish") == "v1 staging: v1 is staging on engine-0"
        with pytest.raises(EngineLagging, match="v1 is staging on engine-0"):
            await publish
        assert (await rollouts.evaluate([0], episode=one_turn)).failures == 0  # by another


# ---------------------------------------------------------------- the user's code


async def test_episodes_that_hang_each_in_its_way_are_named_and_cost_their_rollouts_and_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "CANCEL_GRACE_S", 0.1)
    over = threading.Event()

    async def hangs(episode: tidegate.Episode, task: str) -> float:
        episode.append([5])
        await episode.generate(max_tokens=2)
        match task:
            case "never":
                await asyncio.Event().wait()
            case "in a thread":
                await asyncio.to_thread(over.wait, WAIT_S)
            case "deaf":
                while not over.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.01)
        return 1.0

    settings = {**SINGLE, **IMPATIENT, "episode_timeout_s": 3.0}
    try:
        async with tidegate.serve(model=model, **settings) as rollouts:
            tasks = ["never", "in a thread", "deaf", "healthy"]
            evaluation = asyncio.create_task(rollouts.evaluate(tasks, episode=hangs))
            why = "after turn 1 its episode neither requests another nor returns; task"
            hung = {f"rollout {n}": f"{why} {task!r}" for n, task in enumerate(tasks[:3])}
            await until(lambda: {s.name: s.where for s in rollouts.statistics().stuck} == hung)
            assert (await evaluation).rewards == [None, None, None, 1.0]
            assert (await evaluation).mean_reward == 0.25
            await until(lambda: "CancelledError" in whats_stuck(rollouts).get("episode", ""))
            await until(lambda: [s.name for s in rollouts.statistics().stuck] == ["rollout 2"])
            over.set()
            await until(lambda: not rollouts.statistics().stuck)
            assert (await rollouts.evaluate(["healthy"], episode=hangs)).rewards == [1.0]
    finally:
        over.set()
    assert rollouts.statistics().evaluation_ledger.error == 0


async def test_an_episode_that_blocks_the_loop_is_named_meanwhile(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "REPORT_AFTER_S", 0.2)
    monkeypatch.setattr(loop_watch, "CHECK_INTERVAL_S", 0.05)
    over = threading.Event()

    async def rude(episode: tidegate.Episode, task: int) -> float:
        over.wait(WAIT_S)
        return await one_turn(episode, task)

    try:
        async with tidegate.serve(model=model, **SINGLE) as rollouts:
            evaluation = asyncio.create_task(rollouts.evaluate([0], episode=rude))
            await until(lambda: whats_stuck(rollouts).get("loop", "").startswith("rollout 0: "))
            assert f"rude at {__file__}" in whats_stuck(rollouts)["loop"]
            over.set()
            assert (await evaluation).failures == 0
            await until(lambda: not rollouts.statistics().stuck)
    finally:
        over.set()


async def test_an_episode_that_never_gives_the_loop_back_ends_the_run_and_is_blamed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "REPORT_AFTER_S", 0.2)
    monkeypatch.setattr(loop_watch, "LIMIT_MIN_S", 0.4)
    monkeypatch.setattr(loop_watch, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(run_module, "EPISODES_END_TIMEOUT_S", 0.2)
    over = threading.Event()

    async def rude(episode: tidegate.Episode, task: int) -> float:
        over.wait(WAIT_S)
        return 1.0

    rollouts = tidegate.serve(model=model, **SINGLE, episode_timeout_s=0.1)
    try:
        async with rollouts:
            with pytest.raises(RunBlocked, match=r"rollout 0 has kept .*rude at .*to_thread"):
                await rollouts.evaluate([0], episode=rude)
            with pytest.raises(RunBlocked):
                await rollouts.evaluate([1], episode=one_turn)
    finally:
        over.set()
        thread = rollouts._running._thread
        await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive()


# ---------------------------------------------------------------- the trainer


TRAINER = """
import asyncio, sys, tidegate
async def solve(episode, task):
    episode.append([5, 6, 7])
    await episode.generate(max_tokens=200)
    return 1.0
async def main():
    settings = {"engines": 2, "weight_channel": "disk"}
    async with tidegate.serve(model=sys.argv[1], **settings) as rollouts:
        from safetensors.torch import load_file
        await rollouts.publish(load_file(sys.argv[1] + "/model.safetensors"))
        print("ready", flush=True)
        async for batch in rollouts.batches(iter(int, 1), episode=solve):
            await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For sockets: pytest's own directories have names that are too long for them."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_a_trainer_that_is_killed_leaves_no_engine_socket_log_or_weights_behind(
    model: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "TMPDIR": str(short_path)}
    command = [sys.executable, "-c", TRAINER, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        engines = psutil.Process(trainer.pid).children(recursive=True)
        names = {path.name.split("-")[1] for path in short_path.iterdir()}
        assert names == {"orchestrator", "logs", "weights"}
        trainer.kill()
    _, alive = psutil.wait_procs(engines, timeout=WAIT_S)
    assert (len(engines), alive) == (2, [])
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    PrivateDirectory("next").remove()  # whatever engines have not seen to, the next run does
    assert list(short_path.iterdir()) == []


async def test_a_failed_run_still_has_its_statistics_inside_its_block(model: Path) -> None:
    async def wrong(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        raise TypeError("a bug in every reward")

    async with tidegate.serve(model=model, **SINGLE) as rollouts:
        with pytest.raises(EpisodeError):
            await anext(rollouts.batches(range(100), episode=wrong))
        statistics = rollouts.statistics()
        assert statistics.ledger.generated > 0
    assert rollouts.statistics().ledger == statistics.ledger
