"""Helpers that start a listening run, and connect trainers to it, in threads and in processes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import tidegate
from tests.remote_trainer import weights
from tidegate.errors import RunLost

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


async def named_turn(episode: tidegate.Episode, task: dict[str, int]) -> float:
    return await one_turn(episode, task["first"])


@contextlib.asynccontextmanager
async def listening(
    run: tidegate.Rollouts, address: str, **how: Any
) -> AsyncIterator["asyncio.Task[None]"]:
    """The run listens meanwhile; its end is awaited where it ends by itself."""
    usual: dict[str, Any] = {"episode": one_turn, "rank_timeout_s": 3.0, "trainer_timeout_s": 60.0}
    task = asyncio.create_task(tidegate.listen(run, address, **usual | how))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def joined(run: tidegate.Rollouts, address: str, **options: Any) -> tidegate.SyncRemoteRollouts:
    """A trainer on a thread of this process: the same wire, another loop."""
    return tidegate.connect_sync(address, curve_key_directory=keys_of(run), **options)


async def refused(run: tidegate.Rollouts, address: str, **who: int) -> None:
    """Return the reason for a refusal. The request is repeated until the time is up, so that is
    short if it can be."""
    late = joined(run, address, connect_timeout_s=2.0, **who)
    try:
        await asyncio.to_thread(late.__enter__)
    except RunLost as error:
        if "no run answered" not in str(error):
            raise
        late = joined(run, address, connect_timeout_s=30.0, **who)
        await asyncio.to_thread(late.__enter__)


def keys_of(run: tidegate.Rollouts) -> Path:
    """Of its trainers."""
    assert run.settings.fleet.curve_key_directory is not None
    return run.settings.fleet.curve_key_directory / "trainer"


class Trainer:
    """A trainer's process, and what it has said."""

    def __init__(self, address: str, model: Path, **options: Any) -> None:
        self._arguments = ("-m", "tests.remote_trainer", address, str(model), json.dumps(options))

    async def run(self) -> list[dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self._arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(120):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return [json.loads(line) for line in said.splitlines()]


def trained(
    run: tidegate.Rollouts, address: str, model: Path, **who: Any
) -> tuple[list[tidegate.Batch], list[int]]:
    """What a rank received, and the versions that were announced to it."""
    batches, versions = [], []
    with joined(run, address, **who) as rollouts:
        for batch in rollouts.batches():
            batches.append(batch)
            state = weights(model, batch.number) if rollouts.rank == 0 else None
            versions.append(rollouts.publish(state))
    return batches, versions
