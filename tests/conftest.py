"""Where do kernels run in tests, and for how long may any? On a GPU, else in Triton's interpreter.

Triton reads the variable when it is imported, which any test's imports may do: so it is set before.
"""

import os
from pathlib import Path

import pytest

SLOW_TIMEOUT_S = 600
"""A whole run that takes one minute on an idle machine took more than three beside eight others."""

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns, an error in tests
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time before they count as hung."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
