"""A gateway for one test."""

from collections.abc import Iterator

import pytest

from tidegate.serving.gateway.gateway import Gateway


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway(token="master")
    yield gateway
    gateway.close()
