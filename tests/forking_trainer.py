"""Trainer process that forks during its run, in each way that trainers do.

``python -m tests.forking_trainer MODEL DIRECTORY`` prints a line for each call in a child process,
with the error it raised, and exits with status 0 if the run was unaffected.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

import tidegate
from tests.mortal_trainer import two_turns, weights

CHILD_TIMEOUT_S = 60
"""Far longer than a child takes: reaching it kills the child, and the trainer fails."""


def met(name: str, ask: Callable[[], object]) -> None:
    """Print what a call in a child process raises; SIGALRM ends a call that hangs."""
    signal.alarm(CHILD_TIMEOUT_S)
    try:
        said: object = ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
        said = type(error).__name__
    sys.stdout.write(f"{name}: {said}\n")
    sys.stdout.flush()


class Batches(IterableDataset[Any]):
    """A user's dataset over a run, read by a DataLoader's worker."""

    def __init__(self, rollouts: tidegate.SyncRollouts) -> None:
        self._rollouts = rollouts

    def __iter__(self) -> Any:
        signal.alarm(CHILD_TIMEOUT_S)
        return iter(self._rollouts.batches(range(4), episode=two_turns))


def first_loaded(dataset: Batches) -> object:
    """Read a dataset in a DataLoader's forked worker."""
    loader: Any = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    return next(iter(loader))


def fork_and_leave(rollouts: tidegate.SyncRollouts) -> None:
    """Fork; the child uses the run, and exits as any other process does."""
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the forked child ended with status {status}"
        return
    met("statistics", rollouts.statistics)
    met("batches", lambda: next(iter(rollouts.batches(range(4), episode=two_turns))))
    met("publish", lambda: rollouts.publish({}))
    met("state_dict", rollouts.state_dict)
    met("score", lambda: rollouts.score([[1, 2, 3]]))
    sys.exit(0)  # through the `with` statement, finalizers and atexit


def main(model: Path, directory: Path) -> None:
    """Train on six batches; fork after the second."""
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        run_directory=directory,
        journal=True,
    ) as rollouts:
        for number, batch in enumerate(rollouts.batches(range(12), episode=two_turns), 1):
            assert len(batch.rewards) == 4
            rollouts.publish(weights(model, number))
            if number == 2:
                fork_and_leave(rollouts)
                worker = multiprocessing.get_context("fork").Process(
                    target=met, args=("Process", rollouts.statistics)
                )
                worker.start()
                worker.join(CHILD_TIMEOUT_S)
                assert worker.exitcode == 0
                met("DataLoader", lambda: first_loaded(Batches(rollouts)))
                signal.alarm(0)
        assert number == 6
        assert rollouts.statistics().ledger.error == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
