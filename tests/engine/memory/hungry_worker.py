"""Engine worker that is out of memory from its sixth step on.

It allocates more than any machine has, so torch raises its real error.
"""

import sys
from collections.abc import Sequence

import torch

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

STEPS_FED = 5


class HungryRunner(ModelRunner):
    """Runner that computes a few steps, and then runs out of memory."""

    steps = 0

    def step(self, rows: Sequence[Row]) -> StepOutput:
        self.steps += 1
        if self.steps > STEPS_FED:
            torch.empty(1 << 54)
        return super().step(rows)


if __name__ == "__main__":
    vars(served_model)["ModelRunner"] = HungryRunner
    sys.exit(worker.main())
