"""A gateway for one test, and a session of it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.orchestrator.episodes.talking import Talk
from tests.serving.gateway.gateway_clients import client_of
from tidegate.serving.gateway.gateway import Gateway
from tidegate.serving.gateway.sessions import Session


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway(token="master")
    yield gateway
    gateway.close()


@pytest.fixture
def template() -> str:
    return "chatml"


@pytest.fixture
def talk(tmp_path: Path, template: str) -> Talk:
    return Talk(tmp_path, template)


@pytest.fixture
def session(gateway: Gateway, talk: Talk) -> Session:
    return gateway.open(talk.episode, {"question": "1+2?"})


@pytest.fixture
async def client(gateway: Gateway, session: Session) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(gateway, session.api_key) as client:
        yield client
