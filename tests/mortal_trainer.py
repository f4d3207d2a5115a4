"""Trainer process that may be killed at any time and resumes from its checkpoint.

``python -m tests.mortal_trainer MODEL DIRECTORY ADDRESS TASKS [curriculum]`` prints a line per
trained batch, and waits for a line on standard input before the next, so that a test can kill it in
time.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tidegate


async def two_turns(episode: tidegate.Episode, task: int) -> float:
    """Two turns with an observation between them; the reward is arbitrary."""
    episode.append([10 + task % 40, 11, 12])
    await episode.generate(max_tokens=10)
    episode.append([13, 14])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


def weights(model: Path, batches: int) -> dict[str, torch.Tensor]:
    """Return the weights after this many batches, deterministically."""
    noise = torch.Generator().manual_seed(batches)
    state = load_file(model / "model.safetensors")
    return {k: t + 0.02 * torch.randn(t.shape, generator=noise) for k, t in state.items()}


def live(process: "subprocess.Popen[str]", batches: int | None) -> None:
    """Let a trainer train, one line a batch; kill it after ``batches`` of them, None: never."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdout as lines:
        for number, _ in enumerate(lines, 1):
            if number == batches:
                process.kill()
                break
            process.stdin.write("go on\n")
            process.stdin.flush()


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Replace the checkpoint atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(checkpoint))
    os.replace(draft, path)


def check(curriculum: tidegate.Curriculum, trained: list[int]) -> None:
    """Check that a curriculum's statistics count each trained group once, over all processes."""
    seen = curriculum.statistics
    assert curriculum.num_draws == len(trained) == curriculum.num_draws_max
    assert {item: each.trained_groups for item, each in seen.items()} == Counter(trained)
    assert all(each.rollouts >= 2 * each.draws for each in seen.values())


async def main(model: Path, directory: Path, address: str, num_tasks: int, *, draws: bool) -> None:
    """Train until the tasks are used up; ``draws``: they are drawn from half as many."""
    curriculum = tidegate.Curriculum(range(num_tasks // 2), draws=num_tasks) if draws else None
    tasks: Any = range(num_tasks) if curriculum is None else curriculum
    path = directory / "checkpoint.json"
    checkpoint = json.loads(path.read_text()) if path.exists() else {"trained": [], "state": None}
    async with tidegate.serve(
        model=model,
        engines=0,
        listen_address=address,
        group_size=2,
        groups_per_batch=2,
        run_directory=directory,
        journal=True,
        resume=checkpoint["state"] or True,
    ) as rollouts:
        if rollouts.is_resumed:
            await rollouts.publish(weights(model, len(checkpoint["trained"])))
        async for batch in rollouts.batches(tasks, episode=two_turns):
            assert (batch.staleness <= 2).all()
            checkpoint["trained"].append([*batch.tasks[::2]])
            checkpoint["state"] = rollouts.state_dict()
            save(path, checkpoint)
            sys.stdout.write(f"{batch.tasks}\n")
            sys.stdout.flush()
            await rollouts.publish(weights(model, len(checkpoint["trained"])))
            await rollouts.ack(checkpoint["state"])
            sys.stdin.readline()  # blocks, as training does
        statistics = rollouts.statistics()
        assert statistics.ledger.error == 0
        assert statistics.max_staleness_seen <= 2
        if curriculum is not None:
            check(curriculum, [task for batch in checkpoint["trained"] for task in batch])
        save(directory / "ledger.json", {"trained": statistics.ledger.trained})


SCORED: list[int] = []
"""Tasks whose episode has attached a teacher in this process."""


async def scored_turn(episode: tidegate.Episode, task: int) -> float:
    """One turn with the policy as its teacher."""
    episode.append([10 + task, 11])
    await episode.generate(max_tokens=5, stop_token_ids=[])
    await episode.attach_teacher(top_logprobs=2)
    SCORED.append(task)
    return float(task)


async def first_scored_batch(**options: Any) -> dict[str, Any]:
    """Return the first batch's tasks, tokens and teacher columns; print them before a publish."""
    async with tidegate.serve(**options) as rollouts:
        if rollouts.is_resumed:
            await rollouts.publish(weights(options["model"], 1))
        async for batch in rollouts.batches(range(24), episode=scored_turn):
            assert batch.teacher_logprobs is not None
            assert batch.teacher_top_logprobs is not None
            columns = batch.token_ids, batch.teacher_logprobs, batch.teacher_top_logprobs
            first = {"tasks": [*batch.tasks], "columns": [column.tolist() for column in columns]}
            if rollouts.is_resumed:
                return first
            sys.stdout.write(json.dumps(first) + "\n")
            sys.stdout.flush()
            sys.stdin.readline()  # until it is killed
    raise AssertionError("no batch came")


def train_until_killed(options: str) -> None:
    """Print the first batch of a new run with these settings, as JSON, and wait."""
    asyncio.run(first_scored_batch(**json.loads(options)))


if __name__ == "__main__":
    model, directory, address, num_tasks, *tasks = sys.argv[1:]
    asyncio.run(main(Path(model), Path(directory), address, int(num_tasks), draws=bool(tasks)))
