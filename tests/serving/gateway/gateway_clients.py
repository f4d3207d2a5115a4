"""Clients of a gateway in tests, without a socket where that is enough."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.orchestrator.episodes.talking import Talk
from tidegate.serving.gateway.app import gateway_app
from tidegate.serving.gateway.gateway import Gateway
from tidegate.serving.gateway.sessions import Session

CHAT = "/v1/chat/completions"
END = "<|im_end|>"


@asynccontextmanager
async def client_of(gateway: Gateway, key: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gateway_app(gateway))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    base_url = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers) as c:
        yield c


@asynccontextmanager
async def session_of(
    gateway: Gateway, tmp_path: Path, template: str = "chatml"
) -> AsyncIterator[tuple[Talk, Session, httpx.AsyncClient]]:
    talk = Talk(tmp_path, template)
    session = gateway.open(talk.episode, {"question": "1+2?"})
    async with client_of(gateway, session.api_key) as client:
        yield talk, session, client


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]
