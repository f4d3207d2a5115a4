"""Clients of a gateway in tests, without a socket where that is enough."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tidegate.serving.gateway.app import gateway_app
from tidegate.serving.gateway.gateway import Gateway

CHAT = "/v1/chat/completions"
END = "<|im_end|>"


@asynccontextmanager
async def client_of(gateway: Gateway, key: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gateway_app(gateway))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    base_url = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers) as c:
        yield c


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]
