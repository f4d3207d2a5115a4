"""Adapter's worker for a mixture on vLLM's CPU build, which is refused unless ``vllm_on_a_cpu/``
mends it."""

import sys
from unittest.mock import patch

from tidegate.engine.external import worker

if __name__ == "__main__":
    with patch("tidegate.engine.external.vllm.read_mixture", return_value=None):
        sys.exit(worker.main())
