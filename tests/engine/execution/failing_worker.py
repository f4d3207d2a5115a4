"""A worker whose model's code raises for some turns, as the test's ``--engine`` name says."""

import sys
from collections.abc import Sequence

from tidegate.engine import worker
from tidegate.engine.execution import served_model
from tidegate.engine.execution.runner import ModelRunner, Row, StepOutput

POISON = 7
"""A token that the model's code raises an error for."""

EXIT = 8
"""A token that it exits for."""

LONG = 30
"""More positions than its tables have."""


class FailingRunner(ModelRunner):
    """Raises in the midst of a step that has a turn of a bad kind."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """As ever, unless a row is bad."""
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
    """Raises at every step."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Never works."""
        raise RuntimeError("no kernel image is available")


if __name__ == "__main__":
    broken = "broken" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "broken"]
    vars(served_model)["ModelRunner"] = BrokenRunner if broken else FailingRunner
    sys.exit(worker.main())
