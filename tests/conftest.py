"""Where do kernels run in tests? On a GPU if there is one, else in Triton's interpreter.

Triton reads the variable when it is imported, which any test's imports may do: so it is set before.
"""

import os
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns, an error in tests
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
