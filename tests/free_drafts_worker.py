"""Engine worker whose steps are recorded as equally long, with drafts and without.

An engine drafts only where measured times say that it pays. By these times drafts cost nothing, so
tests of drafts see some, however busy the machine is.
"""

import sys
from unittest.mock import patch

from tidegate.engine import worker
from tidegate.engine.scheduling.drafts import Speculation

STEP_S = 0.01
"""Recorded time of every step, in seconds."""

if __name__ == "__main__":
    step_took = Speculation.step_took

    def take_as_long(self: Speculation, decodes: int, drafted: int, seconds: float) -> None:
        step_took(self, decodes, drafted, STEP_S)

    with patch.object(Speculation, "step_took", take_as_long):
        sys.exit(worker.main())
