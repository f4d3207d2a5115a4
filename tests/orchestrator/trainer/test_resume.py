"""Tests that a run continues after its process has died, with real engines."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.mortal_trainer import SCORED, first_scored_batch, live, two_turns, weights
from tidegate.errors import ConfigError, JournalExists, JournalLocked, ResumeMismatch
from tidegate.observability.audit.audit import audit_run
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.journal.replay import replay_journal
from tidegate.orchestrator.journal.resuming import open_run_journal
from tidegate.orchestrator.settings.config import run_settings

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}
TASKS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert children(recursive=True) == []


def settings(model: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "model": model, "run_directory": directory, "journal": True, **changes}


async def train(
    model: Path, directory: Path, resume: Any, batches: int, **changes: Any
) -> tuple[list[int], dict[str, Any], tidegate.RunStatistics]:
    """Train on some batches; the tasks trained, the last checkpoint's token, the statistics."""
    trained: list[int] = []
    state: dict[str, Any] = {}
    async with tidegate.serve(resume=resume, **settings(model, directory, **changes)) as rollouts:
        if rollouts.is_resumed:
            await rollouts.publish(weights(model, rollouts.version))
        if batches:
            async for batch in rollouts.batches(range(TASKS), episode=two_turns):
                assert (batch.staleness <= 2).all()
                trained += [task for task in batch.tasks[::2] if isinstance(task, int)]
                state = rollouts.state_dict()
                await rollouts.publish(weights(model, rollouts.version + 1))
                if len(trained) >= 2 * batches:
                    break
        return trained, state, rollouts.statistics()


async def test_each_task_is_trained_once_over_several_processes_of_a_run(
    model: Path, tmp_path: Path
) -> None:
    first, state, before = await train(model, tmp_path / "run", None, 3)
    second, state, middle = await train(model, tmp_path / "run", state, 4)
    third, _, after = await train(model, tmp_path / "run", state, 99)
    assert first + second + third == list(range(TASKS))
    assert (before.batches, middle.batches, after.batches) == (3, 7, 12)
    assert after.ledger.error == 0
    assert after.ledger.trained > middle.ledger.trained > before.ledger.trained
    assert after.max_staleness_seen <= 2
    for part in ("", "part-1", "part-2"):  # tokens sampled before a crash as well
        assert audit_run(tmp_path / "run" / part).agrees


async def test_batches_that_the_checkpoint_has_not_seen_are_handed_over_again(
    model: Path, tmp_path: Path
) -> None:
    first, _, _ = await train(model, tmp_path / "run", None, 3)
    again, _, after = await train(model, tmp_path / "run", True, 99)  # nothing was acknowledged
    assert first == list(range(6))
    assert sorted(again) == list(range(TASKS))  # what lost weights had sampled comes again later
    assert after.batches == 12


async def test_what_was_sampled_before_is_not_sampled_again(model: Path, tmp_path: Path) -> None:
    _, state, before = await train(model, tmp_path / "run", None, 2)
    _, _, resumed = await train(model, tmp_path / "run", state, 0)
    assert resumed.ledger.generated >= before.ledger.generated > 0
    assert resumed.ledger.trained == before.ledger.trained


def worker(model: Path, address: str) -> subprocess.Popen[bytes]:
    """An engine that no run has started."""
    command = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    command += ["--model", str(model), "--engine", "outsider", "--max-running-turns", "8"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def trainer(model: Path, directory: Path, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.mortal_trainer", str(model), str(directory), address]
    command.append(str(TASKS))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_an_engine_serves_on_while_its_orchestrator_is_killed_and_started_again(
    model: Path, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/socket"
    engine = worker(model, address)
    try:
        for batches in (2, 3, None):
            process = trainer(model, tmp_path / "run", address)
            live(process, batches)
        assert process.returncode == 0
        assert engine.wait(60) == 0  # the last of them ends it, and nothing else
    finally:
        engine.kill()
        engine.wait()
    checkpoint = json.loads((tmp_path / "run" / "checkpoint.json").read_text())
    assert [task for batch in checkpoint["trained"] for task in batch] == list(range(TASKS))
    report = replay_journal(tmp_path / "run")
    assert report.difference is None
    assert (
        report.ledger.trained
        == json.loads((tmp_path / "run" / "ledger.json").read_text())["trained"]
    )
    assert report.ledger.discarded.get("rolled_back", 0) == 0


def test_a_kill_and_resume_hand_a_batch_over_with_the_teachers_columns_of_before(
    model: Path, tmp_path: Path
) -> None:
    values = settings(model, tmp_path / "run")
    program = "import sys; from tests.mortal_trainer import *; train_until_killed(*sys.argv[1:])"
    command = [sys.executable, "-c", program, json.dumps(values, default=str)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        before = json.loads(process.stdout.readline())
        process.kill()
    after = asyncio.run(first_scored_batch(resume=True, **values))
    assert after == before
    assert not set(before["tasks"]) & set(SCORED)  # they are in the journal


def test_what_does_not_belong_together_is_refused(model: Path, tmp_path: Path) -> None:
    values = settings(model, tmp_path / "run")
    opened = open_run_journal(run_settings(**values), None)
    assert opened.journal is not None
    token = {"run_id": opened.journal.header.run_id, "batches": 0, "version": 0, "offer": 0}
    with pytest.raises(JournalLocked, match="in use"):
        open_run_journal(run_settings(**values), True)
    opened.close()
    with pytest.raises(JournalExists, match="resume"):
        open_run_journal(run_settings(**values), None)
    refused: list[tuple[dict[str, Any], Any, str]] = [
        ({"group_size": 4}, True, "group_size=2.*group_size=4"),
        ({}, {**token, "batches": 7}, "7 batches.*only 0"),
        ({}, {**token, "run_id": "other"}, "run other"),
        ({}, {"batches": 1}, "state_dict"),
    ]
    for changes, resume, why in refused:
        with pytest.raises(ResumeMismatch, match=why):
            open_run_journal(run_settings(**{**values, **changes}), resume)
    reopened = open_run_journal(run_settings(**values), token)
    assert reopened.resumed == ev.RunResumed(0, 0)
    reopened.close()
    with pytest.raises(ConfigError, match="journal=True"):
        open_run_journal(run_settings(**{**values, "journal": False}), True)


async def test_other_tasks_than_before_end_the_run(model: Path, tmp_path: Path) -> None:
    _, state, _ = await train(model, tmp_path / "run", None, 1)
    async with tidegate.serve(resume=state, **settings(model, tmp_path / "run")) as rollouts:
        with pytest.raises(ResumeMismatch, match="same tasks in the same order"):
            async for _ in rollouts.batches(range(100, 200), episode=two_turns):
                pass


async def other_turns(episode: tidegate.Episode, task: int) -> float:
    """As :func:`two_turns`, by another name."""
    return await two_turns(episode, task)


async def four_end(episode: tidegate.Episode, task: int) -> float:
    """As :func:`two_turns`, for tasks 0 to 3; the others' episodes never end."""
    if task >= 4:
        await asyncio.Event().wait()
    return await two_turns(episode, task)


async def break_out_and_checkpoint(
    model: Path, directory: Path, second: EpisodeFunction, first: EpisodeFunction = two_turns
) -> tuple[list[int], dict[str, Any], int]:
    """Break out of one iterator and train a batch of another; what was trained, the checkpoint's
    token, and how many tasks of the first were taken."""
    trained: list[Any] = []
    async with tidegate.serve(**settings(model, directory, max_staleness=3)) as rollouts:
        async for batch in rollouts.batches(range(TASKS), episode=first):
            trained += batch.tasks[::2]
            await rollouts.publish(weights(model, 1))
            break
        async for batch in rollouts.batches(range(100, 100 + TASKS), episode=second):
            trained += batch.tasks[::2]
            state = rollouts.state_dict()
            scheduler = rollouts._running.scheduler
            assert scheduler is not None
            return trained, state, scheduler.core.tasks.counts[0]
    raise AssertionError("the second iterator gave no batch")


async def tasks_after_resume(
    model: Path, directory: Path, state: Any, episode: EpisodeFunction
) -> list[int]:
    trained: list[Any] = []
    async with tidegate.serve(
        resume=state, **settings(model, directory, max_staleness=3)
    ) as rollouts:
        await rollouts.publish(weights(model, 2))
        async for batch in rollouts.batches(range(100, 100 + TASKS), episode=episode):
            trained += batch.tasks[::2]
            await rollouts.publish(weights(model, rollouts.version + 1))
        assert rollouts.statistics().ledger.error == 0
    return trained


async def test_tasks_of_an_iterator_that_was_broken_out_of_survive_a_crash(
    model: Path, tmp_path: Path
) -> None:
    before, state, taken = await break_out_and_checkpoint(model, tmp_path / "run", two_turns)
    assert taken > 4
    after = await tasks_after_resume(model, tmp_path / "run", state, two_turns)
    assert set(range(taken)) <= {*before, *after}
    assert set(range(100, 100 + TASKS)) <= {*before, *after}
    assert len(before + after) == len({*before, *after})
    report = replay_journal(tmp_path / "run")
    assert report.difference is None
    assert "task_gone" not in report.ledger.discarded


async def test_tasks_whose_episode_is_another_one_now_are_dropped_and_the_log_says_so(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, state, taken = await break_out_and_checkpoint(
        model, tmp_path / "run", other_turns, first=four_end
    )
    after = await tasks_after_resume(model, tmp_path / "run", state, other_turns)
    gone = set(range(taken)) - {*before, *after}
    assert gone, "all had ended: nothing was left to drop"
    assert f"tasks=gone count={len(gone)}" in caplog.text


def test_two_batches_at_once_are_refused_and_a_replaced_one_says_so(
    model: Path, tmp_path: Path
) -> None:
    with tidegate.serve_sync(**{**SMALL, "model": model}) as rollouts:
        first = rollouts.batches(range(TASKS), episode=two_turns)
        next(first)
        rollouts.publish(weights(model, 1))
        second = rollouts.batches(range(100, 104), episode=two_turns)
        next(second)
        with pytest.raises(ConfigError, match=r"a later batches\(\).*has replaced these tasks"):
            next(first)
        trained: set[object] = set()
        rollouts.publish(weights(model, 2))
        for batch in second:
            trained |= {*batch.tasks}
            rollouts.publish(weights(model, rollouts.version + 1))
        assert trained & {*range(100, 104)}


async def test_a_second_batches_is_refused_while_the_first_waits(
    model: Path, tmp_path: Path
) -> None:
    async def slow(episode: tidegate.Episode, task: int) -> float:
        begun.set()
        await asyncio.sleep(3600)
        return 0.0

    begun = threading.Event()
    async with tidegate.serve(**{**SMALL, "model": model}) as rollouts:
        waiting = asyncio.ensure_future(anext(rollouts.batches(range(4), episode=slow)))
        assert await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(ConfigError, match="takes tasks from one iterator at a time"):
            await anext(rollouts.batches(range(4), episode=two_turns))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
