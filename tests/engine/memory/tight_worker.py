"""What does an engine do that has memory for small steps only? A worker whose model asks for more.

It asks for more than any machine has, so the error is the one that torch really raises.
"""

import sys
from collections.abc import Sequence

import torch

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

TOKENS_MAX = 5


class TightRunner(ModelRunner):
    """Computes small steps, and has no memory for others, found out in their midst."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """As ever, if it is small."""
        output = super().step(rows)
        if sum(len(row.token_ids) for row in rows) > TOKENS_MAX:
            torch.empty(1 << 54)
        return output


if __name__ == "__main__":
    vars(served_model)["ModelRunner"] = TightRunner
    sys.exit(worker.main())
