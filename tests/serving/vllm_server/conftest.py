"""Server over two real engines, one for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer
from tests.serving.vllm_server.vllm_serving import CONTEXT_TOKENS_MAX, Client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    vocab = chat_tokenizer().get_vocab_size()
    make_model_directory(path, vocab_size=vocab, max_position_embeddings=CONTEXT_TOKENS_MAX)
    return add_chat_template(path, "chatml")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.VLLMServer]:
    settings: dict[str, Any] = {"engines": 2, "max_running_turns": 4}
    with tidegate.vllm_server(model=model, served_model_name="tiny", **settings) as server:
        yield server
        ledger = server.statistics().evaluation_ledger
        assert ledger.error == 0
        assert ledger.generated == ledger.discarded_total


@pytest.fixture
def client(server: tidegate.VLLMServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client
        client.post("/resume")
        client.wait_until(lambda: client.num_running() == 0)
