"""What does an engine do that has no memory for its sixth step? A worker whose model asks for more.

It asks for more than any machine has, so the error is the one that torch really raises.
"""

import sys
from collections.abc import Sequence

import torch

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

STEPS_FED = 5


class HungryRunner(ModelRunner):
    """Computes a few steps, and has no memory for the next."""

    steps = 0

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """As ever, while memory lasts."""
        self.steps += 1
        if self.steps > STEPS_FED:
            torch.empty(1 << 54)
        return super().step(rows)


if __name__ == "__main__":
    vars(served_model)["ModelRunner"] = HungryRunner
    sys.exit(worker.main())
