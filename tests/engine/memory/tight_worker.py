"""Engine worker that has memory for small steps only.

It allocates more than any machine has, so torch raises its real error.
"""

import sys
from collections.abc import Sequence

import torch

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

TOKENS_MAX = 5


class TightRunner(ModelRunner):
    """Runner that runs out of memory within larger steps."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        output = super().step(rows)
        if sum(len(row.token_ids) for row in rows) > TOKENS_MAX:
            torch.empty(1 << 54)
        return output


if __name__ == "__main__":
    vars(served_model)["ModelRunner"] = TightRunner
    sys.exit(worker.main())
