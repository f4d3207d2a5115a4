"""One run for the trainers of a file, and where they meet it."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.orchestrator.trainer.remote.remote_runs import SMALL
from tidegate.transport.security import make_keys


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tidegate.Rollouts]:
    """One run for many trainers: each test listens anew."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(keys)
    make_keys(keys, "trainer")
    rollouts = tidegate.serve(
        model=model, curve_key_directory=keys, listen_address="tcp://127.0.0.1:*", **SMALL
    )
    asyncio.run(rollouts.__aenter__())
    yield rollouts
    asyncio.run(rollouts.__aexit__(None, None, None))
    assert rollouts.statistics().ledger.error == 0
    assert rollouts.statistics().max_staleness_seen <= 2
    assert children(recursive=True) == []


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tg") as directory:
        yield f"ipc://{directory}/trainer"


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
