"""A Tinker server for tests to kill: slow at training, with a snapshot every few requests.

python mortal_server.py MODEL STATE PORT [DEATHS [RUN]]

The directory DEATHS has a file for each phase, of :data:`PHASES`, in which the server kills itself
(kill -9): once, unless ``always`` is in the file. ``error`` before a phase raises an error instead.
"""

import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tidegate
from tidegate.serving.tinker import checkpoints, journal, request_order, sampling, sessions
from tidegate.serving.tinker import server as server_module
from tidegate.serving.tinker.peft_training import PeftTraining
from tidegate.serving.tinker.training import AdamStep, BatchResult, LossBatch

CALL_S = 0.05
"""Time that each call of the trainer takes at least, so that a kill hits one."""


class SlowTraining(PeftTraining):
    """The reference backend, slowed down before and after each change."""

    def forward_backward(
        self, model_id: str, batch: LossBatch, *, forward_only: bool
    ) -> BatchResult:
        time.sleep(CALL_S / 2)
        result = super().forward_backward(model_id, batch, forward_only=forward_only)
        time.sleep(CALL_S / 2)
        return result

    def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]:
        time.sleep(CALL_S / 2)
        metrics = super().optim_step(model_id, step)
        time.sleep(CALL_S / 2)
        return metrics

    def save(self, model_id: str, directory: Path) -> None:
        super().save(model_id, directory)
        time.sleep(CALL_S)


PHASES: Mapping[str, tuple[Any, str]] = {
    "session record": (journal.ServerState, "note"),
    "model record": (journal.ModelJournal, "begin"),
    "request record": (journal.ModelJournal, "append"),
    "snapshot": (journal.ModelJournal, "begin_segment"),
    "forward-backward": (SlowTraining, "forward_backward"),
    "optimizer step": (SlowTraining, "optim_step"),
    "trainer's save": (SlowTraining, "save"),
    "trainer's load": (SlowTraining, "load"),
    "checkpoint": (checkpoints.CheckpointStore, "write"),
    "checkpoint's link": (checkpoints.CheckpointStore, "hold"),
    "sampler": (sessions.SessionTable, "add_sampler"),
    "sample": (sampling.SampleRunner, "sample"),
}
"""Functions before and after which the server may die, as ``before NAME`` and ``after NAME``."""


def die_in(deaths: Path) -> None:
    """Have the process kill itself in each phase that has a file, and remove the file."""

    def is_due(phase: str) -> bool:
        file = deaths / phase
        try:
            if file.read_text() != "always":
                file.unlink()  # of two threads, one succeeds
        except FileNotFoundError:
            return False
        return True

    def reach(phase: str) -> None:
        if is_due(phase):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due(f"error {phase}"):
            raise MemoryError("planted")

    def mortal(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            reach(f"before {name}")
            result = function(*args, **named)
            reach(f"after {name}")
            return result

        @functools.wraps(function)
        async def wait(*args: Any, **named: Any) -> Any:
            reach(f"before {name}")
            result = await function(*args, **named)
            reach(f"after {name}")
            return result

        return wait if inspect.iscoroutinefunction(function) else call

    for name, (owner, attribute) in PHASES.items():
        setattr(owner, attribute, mortal(name, getattr(owner, attribute)))


def main(
    model: str, state: str, port: str, deaths: str | None = None, run: str | None = None
) -> None:
    journal.SNAPSHOT_REQUESTS = 5
    request_order.WAITING_MAX = 40
    server_module.SWEEP_INTERVAL_S = 0.2
    if deaths is not None:
        die_in(Path(deaths))
    settings: dict[str, Any] = {"model": model, "engines": 1, "port": int(port)}
    settings["run_directory"] = run
    with tidegate.tinker_server(
        **settings, state_directory=state, make_backend=SlowTraining
    ) as server:
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
