"""Server over a real engine, with the model that SGLang's answers were recorded with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate
from tests.models import make_model_directory
from tests.serving.vllm_server.vllm_serving import Client


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of models and weights that the server may read."""
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    return make_model_directory(directory / "model", tied=False)


@pytest.fixture(scope="module")
def server(directory: Path, model: Path) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(model=model, engines=1, weight_directories=[directory]) as server:
        yield server
        ledger = server.statistics().evaluation_ledger
        assert ledger.error == 0
        assert ledger.generated == ledger.discarded_total


@pytest.fixture
def client(server: tidegate.VLLMServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client
        client.post("/continue_generation", {})
        client.wait_until(lambda: client.num_running() == 0)
