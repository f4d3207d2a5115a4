"""Trainer of the crash-restart test, which survives kills by one atomic checkpoint per batch.

Asynchronous GRPO on the demo's task. Weights, optimizer, the record of trained batches and the
run's ``state_dict()`` are saved in one file before the weights are published; a restart resumes
from it. It ends after the batch during which DIR/stop appears.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

import tidegate
from examples.calculator import Episode, Task, solve, tasks
from examples.grpo import load_trainer, train_step

CHECKPOINT_FILE = "checkpoint.pt"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "trainer.log"
RESULT_FILE = "result.json"
STOP_FILE = "stop"


@dataclass(frozen=True, slots=True)
class NumberedTask:
    """A task with a unique number, because the demo's tasks repeat."""

    number: int
    task: Task


@dataclass(frozen=True, slots=True)
class Options:
    directory: Path
    """Directory of its checkpoint, event log, output log and the run's own files."""
    address: str
    """Address that engines connect to."""
    model: Path
    max_staleness: int
    seed: int
    group_size: int = 8
    groups_per_batch: int = 8
    learning_rate: float = 3e-4


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The trainer's own record of a batch that contributed to its weights."""

    number: int
    """Number of the batch, counted from 1."""
    trainer_version: int
    tasks: list[int]
    """Task numbers, one per group, in the order of hand-over."""
    oldest_versions: list[int]
    """Per rollout, the version that sampled its oldest token."""
    sampled_tokens: int
    reward: float


class Trainer:
    def __init__(self, options: Options) -> None:
        self.directory = options.directory
        self.model, self.optimizer = load_trainer(options.model, options.learning_rate)
        self.trained: list[TrainedBatch] = []
        self.state: dict[str, Any] | None = None
        if (self.directory / CHECKPOINT_FILE).exists():
            self._load(self.directory / CHECKPOINT_FILE)

    def _load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.trained = [TrainedBatch(**batch) for batch in checkpoint["trained"]]
        self.state = checkpoint["run"]

    def train(self, batch: tidegate.Batch, state: dict[str, Any]) -> None:
        train_step(self.model, self.optimizer, batch)
        self.trained.append(describe(batch, number=state["batches"]))
        self.state = state
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "trained": [asdict(batch) for batch in self.trained],
            "run": state,
        }
        path = self.directory / CHECKPOINT_FILE
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)


def describe(batch: tidegate.Batch, number: int) -> TrainedBatch:
    in_order = dict(zip(batch.group_ids.tolist(), batch.tasks, strict=True))
    never = torch.iinfo(batch.weight_versions.dtype).max
    oldest = batch.weight_versions.masked_fill(~batch.loss_mask, never).amin(1)
    return TrainedBatch(
        number=number,
        trainer_version=batch.trainer_version,
        tasks=[task.number for task in in_order.values() if isinstance(task, NumberedTask)],
        oldest_versions=oldest[oldest != never].tolist(),
        sampled_tokens=batch.sampled_tokens,
        reward=batch.rewards.mean().item(),
    )


class EventLog:
    """Event log of all restarts, including those that never got far."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, event: str, **facts: object) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), "at_s": time.time(), **facts})
        with self._path.open("a") as file:
            file.write(line + "\n")


async def train(options: Options) -> None:
    """Resume from the checkpoint, if there is one, and train until DIR/stop exists."""
    events = EventLog(options.directory / EVENTS_FILE)
    events.note("started")
    trainer = Trainer(options)
    events.note("loaded", batches=len(trainer.trained))
    async with tidegate.serve(
        resume=True if trainer.state is None else trainer.state,
        model=options.model,
        engines=0,
        listen_address=options.address,
        max_staleness=options.max_staleness,
        group_size=options.group_size,
        groups_per_batch=options.groups_per_batch,
        run_directory=options.directory / "run",
        journal=True,
        engine_timeout_s=3.0,
        heartbeat_interval_s=0.5,
        seed=options.seed,
    ) as rollouts:
        events.note("serving", is_resumed=rollouts.is_resumed)
        if rollouts.is_resumed:
            await rollouts.publish(trainer.model.state_dict())
            events.note("published", version=rollouts.version)
        async for batch in rollouts.batches(numbered(options.seed), episode=solve_numbered):
            state = rollouts.state_dict()
            events.note("received", number=state["batches"])
            trainer.train(batch, state)
            await rollouts.ack(state)
            version = await rollouts.publish(trainer.model.state_dict())
            events.note("published", version=version)
            if (options.directory / STOP_FILE).exists():
                break
        write_result(options.directory, trainer, rollouts)


def write_result(directory: Path, trainer: Trainer, rollouts: tidegate.Rollouts) -> None:
    result = {
        "trained": [asdict(batch) for batch in trainer.trained],
        "ledger": asdict(rollouts.statistics().ledger),
        "ledger_error": rollouts.statistics().ledger.error,
    }
    (directory / RESULT_FILE).write_text(json.dumps(result))


def numbered(seed: int) -> Iterator[NumberedTask]:
    for number, task in enumerate(tasks("train", seed)):
        yield NumberedTask(number, task)


async def solve_numbered(episode: Episode, task: NumberedTask) -> float:
    return await solve(episode, task.task)


def live(options: Options) -> None:
    """Run the trainer in this process, its output in DIR/trainer.log."""
    with (options.directory / LOG_FILE).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    # A progress bar holds a multiprocessing lock, which a kill would leak.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    asyncio.run(train(options))
