"""A model for the runs of this folder, and a check that a test leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_programs import children
from tests.models import make_model_directory
from tests.segments import weights_open


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def nothing_is_left_running() -> Iterator[None]:
    """Assert that the test leaves neither processes nor weights in shared memory behind."""
    before = weights_open()
    yield
    assert children(recursive=True) == []
    assert weights_open() <= before
