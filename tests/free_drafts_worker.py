"""Engine worker to which every step seems to take as long, with drafts and without.

So its drafts always pay, on a busy machine too, and tests of what drafts do see some.
"""

import sys
from unittest.mock import patch

from tidegate.engine import worker
from tidegate.engine.scheduling.drafts import Speculation

STEP_S = 0.01

if __name__ == "__main__":
    step_took = Speculation.step_took

    def take_as_long(self: Speculation, decodes: int, drafted: int, seconds: float) -> None:
        step_took(self, decodes, drafted, STEP_S)

    with patch.object(Speculation, "step_took", take_as_long):
        sys.exit(worker.main())
