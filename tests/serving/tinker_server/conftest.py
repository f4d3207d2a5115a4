"""Server of the Tinker API over a tiny model and two engines, called by the real SDK.

Tests without the SDK skip themselves: ``make test-tinker`` installs it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tests.serving.tinker_server.tenant_client import Tenant

IGNORED_WARNINGS = (
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    # Of the SDK: methods that the cookbook calls, and its own connections, which it leaves open.
    "ignore:DEPRECATED:FutureWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    for ignored in IGNORED_WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("served") / "model", "qwen3")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(model=model, engines=2) as server:
        yield server


@pytest.fixture
def service(server: tidegate.TinkerServer) -> Iterator[Any]:
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key="tml-anybody") as service:
        yield service


@pytest.fixture
def tenant(server: tidegate.TinkerServer) -> Iterator[Tenant]:
    with Tenant(server.url, "tml-anybody") as tenant:
        yield tenant


@pytest.fixture
def alice(server: tidegate.TinkerServer) -> Iterator[Tenant]:
    with Tenant(server.url, "tml-alice") as tenant:
        yield tenant


@pytest.fixture
def bob(server: tidegate.TinkerServer) -> Iterator[Tenant]:
    with Tenant(server.url, "tml-bob") as tenant:
        yield tenant


@pytest.fixture
def mortal(model: Path, tmp_path: Path) -> Iterator[Any]:
    """A :class:`MortalServer`, whose module needs the SDK."""
    from tests.serving.tinker_server.test_tinker_recovery import MortalServer

    server = MortalServer(model, tmp_path / "state")
    try:
        server.start()
        yield server
    finally:
        server.close()
