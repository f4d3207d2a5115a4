"""Engine worker that is out of memory from its sixth step on, or, if ``tight``, in large steps.

It allocates more than any machine has, so torch raises its real error.
"""

import sys
from collections.abc import Sequence

import torch

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

STEPS_FED = 5

TOKENS_MAX = 5
"""Tokens of a step above which a ``tight`` worker is out of memory."""


class HungryRunner(ModelRunner):
    """Runner that computes a few steps, and then runs out of memory."""

    steps = 0

    def step(self, rows: Sequence[Row]) -> StepOutput:
        self.steps += 1
        if self.steps > STEPS_FED:
            torch.empty(1 << 54)
        return super().step(rows)


class TightRunner(ModelRunner):
    """Runner that runs out of memory within larger steps."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        output = super().step(rows)
        if sum(len(row.token_ids) for row in rows) > TOKENS_MAX:
            torch.empty(1 << 54)
        return output


if __name__ == "__main__":
    tight = "tight" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "tight"]
    vars(served_model)["ModelRunner"] = TightRunner if tight else HungryRunner
    sys.exit(worker.main())
