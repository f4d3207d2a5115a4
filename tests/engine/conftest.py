"""Fixtures of tests with a real engine process: two models, and processes that serve one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.orchestra import Models, Orchestra
from tests.models import make_model_directory
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory
from tidegate.transport.messages import Goodbye, Shutdown


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directories = [
        make_model_directory(tmp_path_factory.mktemp("model") / str(seed), seed=seed)
        for seed in range(2)
    ]
    config = ModelConfig.from_directory(directories[0])
    weights = [load_directory(path, config, torch.float32) for path in directories]
    return Models(directories, config, weights)


@pytest.fixture(scope="module")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestra]:
    """One process shared by all tests that leave it running and without turns."""
    options = ["--max-running-turns", "8", "--max-step-tokens", "32", "--num-kv-blocks", "128"]
    directory = tmp_path_factory.mktemp("engine")
    with Orchestra(directory, models.directories[0], options) as orchestra:
        hello = orchestra.welcome()
        assert (hello.engine, hello.num_kv_blocks, hello.vocab_size) == ("engine-0", 128, 96)
        yield orchestra
        orchestra.send(Shutdown())
        assert orchestra.await_one(Goodbye).reason == "asked to shut down"
        assert orchestra.exit_status() == 0


@pytest.fixture
def fresh(models: Models, tmp_path: Path) -> Iterator[Orchestra]:
    """A process of a single test's own."""
    with Orchestra(tmp_path, models.directories[0]) as orchestra:
        yield orchestra
