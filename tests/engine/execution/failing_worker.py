"""Engine worker whose model code raises for some turns, chosen by the ``--engine`` name."""

import sys
from collections.abc import Sequence

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

POISON = 7
"""Token for which the model code raises an error."""

EXIT = 8
"""Token for which the model code calls exit."""

LONG = 30
"""Number of positions above which the model code raises."""


class FailingRunner(ModelRunner):
    """Runner that raises within a step that has a failing turn."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        output = super().step(rows)
        for row in rows:
            if POISON in row.token_ids:
                raise IndexError("index out of range in self")
            if EXIT in row.token_ids:
                sys.exit("enough")
            if row.start + len(row.token_ids) > LONG:
                raise KeyError("position")
        return output


class BrokenRunner(ModelRunner):
    """Runner that raises at every step."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        raise RuntimeError("no kernel image is available")


if __name__ == "__main__":
    broken = "broken" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "broken"]
    vars(served_model)["ModelRunner"] = BrokenRunner if broken else FailingRunner
    sys.exit(worker.main())
