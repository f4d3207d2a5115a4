"""Models of the tests of external engines."""

from pathlib import Path

import pytest

from tests.engine.orchestra import Models


@pytest.fixture(scope="module")
def directories(models: Models) -> list[Path]:
    """Directories of two models of one shape."""
    return models.directories
