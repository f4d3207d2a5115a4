"""A Tinker server for tests to kill: slow at training, with a snapshot every few requests.

python mortal_server.py MODEL STATE PORT
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tidegate
from tidegate.serving.tinker import journal
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


def main(model: str, state: str, port: str) -> None:
    journal.SNAPSHOT_REQUESTS = 5
    settings: dict[str, Any] = {"model": model, "engines": 1, "port": int(port)}
    with tidegate.tinker_server(
        **settings, state_directory=state, make_backend=SlowTraining
    ) as server:
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
