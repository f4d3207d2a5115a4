"""Sessions of the gateway: their keys, and how agents claim and end them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from httpx import AsyncClient

from tests.orchestrator.episodes.talking import Talk, user
from tests.serving.gateway.gateway_clients import CHAT, END, client_of
from tidegate.errors import ConfigError, ContextFull, InfrastructureFailed, PolicyFailed
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.serving.gateway.app import PATHS
from tidegate.serving.gateway.gateway import (
    Endpoint,
    Gateway,
)
from tidegate.serving.gateway.sessions import Session
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

pytestmark = pytest.mark.wire


async def test_a_request_without_the_key_of_an_open_session_is_refused(
    talk: Talk, session: Session, client: AsyncClient, gateway: Gateway
) -> None:
    body = {"messages": [user("q")]}
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": session.api_key},
        {"Authorization": ""},
        {"Authorization": "Bearer master"},
        {"Authorization": "Bearer master", "X-Session-Id": "another"},
    ):
        refused = await client.post(CHAT, json=body, headers=headers)
        assert refused.status_code == 401, headers
        assert refused.json()["error"]["code"] == "invalid_api_key"
    talk.engine.words += [f"yes{END}"] * 2
    its_clients_own = {"X-Session-Id": "another"}
    assert (await client.post(CHAT, json=body, headers=its_clients_own)).status_code == 200
    by_id = {"Authorization": "Bearer master", "X-Session-Id": session.session_id}
    assert (await client.post(CHAT, json=body, headers=by_id)).status_code == 200
    gateway.end(session)
    assert (await client.post(CHAT, json=body)).status_code == 401


async def test_every_path_but_health_wants_a_key(gateway: Gateway) -> None:
    async with client_of(gateway, "") as stranger:
        answers = {each.path: await stranger.request(each.method, each.path) for each in PATHS}
    assert {path for path, each in answers.items() if each.status_code != 401} == {"/health"}


FIRST_REQUEST = """
import asyncio, sys, types, tidegate

async def agent(endpoint, task):
    host, port = endpoint.base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    print((await reader.read()).splitlines()[0].decode())
    return 0.0

gateway = tidegate.Gateway()
before = set(sys.modules)
asyncio.run(gateway.episode(agent)(types.SimpleNamespace(rollout_id=0), "task"))
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(imported & {"tidegate", "starlette", "jinja2"}))
"""
"""Program whose gateway gets its first request; prints the status and what was imported for it."""


def test_the_gateway_imports_nothing_of_its_own_on_the_loop_of_a_run() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_REQUEST], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.splitlines() == ["HTTP/1.1 200 OK", ""], ran.stderr


async def test_an_agent_from_outside_takes_a_task_and_posts_its_reward(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    playing = asyncio.ensure_future(gateway.episode()(talk.episode, {"question": "1+2?"}))
    async with client_of(gateway, "master") as client:
        assert (await client.post("/sessions", headers={"Authorization": ""})).status_code == 401
        session = (await client.post("/sessions")).json()
        assert session["task"] == {"question": "1+2?"}
        path = f"/sessions/{session['id']}/reward"
        own = {"Authorization": f"Bearer {session['api_key']}"}
        talk.engine.words.append(f"3{END}")
        asked = await client.post(CHAT, json={"messages": [user("q")]}, headers=own)
        assert asked.status_code == 200
        for bad in ('{"reward": "much"}', '{"reward": NaN}', '{"reward": 1e999}', "{}"):
            assert (await client.post(path, content=bad, headers=own)).status_code == 400
        others = await client.post("/sessions/another/reward", json={"reward": 0.1}, headers=own)
        assert others.status_code == 401  # it would have been this session's
        assert (await client.post(path, json={"reward": 0.5}, headers=own)).status_code == 200
        assert await playing == 0.5
        assert (await client.post(path, json={"reward": 1}, headers=own)).status_code == 401
    assert gateway.num_sessions == 0


async def test_a_task_is_not_given_to_an_agent_that_has_disconnected(
    gateway: Gateway, tmp_path: Path
) -> None:
    opener = gateway.episode()
    first = asyncio.ensure_future(opener(Talk(tmp_path, "chatml").episode, "first"))
    headers = {"Authorization": "Bearer master"}
    async with httpx.AsyncClient(headers=headers, timeout=60.0, base_url=gateway.url) as client:
        assert (await client.post("/sessions")).json()["task"] == "first"
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/sessions", timeout=0.3)
        await client.get("/health")  # after it: the server has seen it go by now
        second = asyncio.ensure_future(opener(Talk(tmp_path, "chatml").episode, "second"))
        assert (await client.post("/sessions", timeout=20.0)).json()["task"] == "second"
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})


async def test_another_run_is_refused_while_one_is_served_and_a_closed_gateway_refuses_all(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.words.append(f"3{END}")
    playing = asyncio.ensure_future(gateway.episode()(talk.episode, "first"))
    await asyncio.sleep(0)

    def play_elsewhere() -> None:
        asyncio.run(gateway.episode()(talk.episode, "second"))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="serves one run at a time"):
        await asyncio.to_thread(play_elsewhere)
    assert gateway.num_sessions == 1
    playing.cancel()
    await asyncio.wait({playing})
    gateway.close()
    with pytest.raises(ConfigError, match="is closed"):
        await asyncio.to_thread(play_elsewhere)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user("q")], "n": 2}),
        ("/v1/completions", {"prompt": "q", "n": 2}),
        ("/v1/completions", {"prompt": ["q", "r"]}),
        ("/v1/responses", {"model": "m", "input": "q"}),
        ("/v1/messages", {"model": "m", "max_tokens": 8, "messages": [user("q")]}),
        ("/inference/v1/generate", {"token_ids": [30], "sampling_params": {"n": 2}}),
    ],
)
async def test_a_client_that_closes_its_connection_has_its_turns_given_up(
    gateway: Gateway, tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    if stream and path == "/inference/v1/generate":
        pytest.skip("the gateway streams no tokens")
    talk = Talk(tmp_path, "chatml")
    num_turns = 1 if path in ("/v1/responses", "/v1/messages") else 2
    asked, given_up = asyncio.Event(), asyncio.Event()
    running: set[int] = set()

    async def never(
        rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        rollout.turns.append(Turn(rollout, sampling))
        running.add(rollout.rollout_id)
        if len(running) == num_turns:
            asked.set()
        await asyncio.Event().wait()
        raise AssertionError("no test sets it")

    def give_up(rollout: Rollout) -> None:
        running.discard(rollout.rollout_id)
        if not running:
            given_up.set()

    talk.engine.generate = never  # type: ignore[method-assign]
    talk.engine.give_up_turn = give_up  # type: ignore[method-assign]

    async def agent(endpoint: Endpoint, task: object) -> float:
        address = urlsplit(endpoint.base_url)
        data = json.dumps(body | {"stream": stream}).encode()
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"Authorization: Bearer {endpoint.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await asked.wait()
        writer.close()
        await given_up.wait()
        return 1.0

    assert await gateway.episode(agent)(talk.episode, "task") == 1.0


async def test_a_task_whose_agent_left_before_it_got_it_goes_to_the_next(
    gateway: Gateway, tmp_path: Path
) -> None:
    session = gateway.open(Talk(tmp_path, "chatml").episode, "task")
    gateway._unclaimed.append(session)
    assert await gateway.claim("master") is session
    gateway.unclaim(session)
    assert await gateway.claim("master") is session
    gateway.end(session)
    gateway.unclaim(session)  # its rollout has ended meanwhile
    assert not gateway._unclaimed


async def test_an_agent_that_is_not_async_has_a_thread(gateway: Gateway, tmp_path: Path) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.words.append(f"3{END}")

    def agent(endpoint: Endpoint, task: object) -> float:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        answer = httpx.post(url, json={"messages": [user("q")]}, headers=headers, timeout=60.0)
        return float(answer.json()["choices"][0]["message"]["content"])

    assert await gateway.episode(agent)(talk.episode, "task") == 3.0


async def test_an_agent_that_neither_returns_nor_posts_a_reward_gets_an_error(
    gateway: Gateway, tmp_path: Path
) -> None:
    async def forgetful(endpoint: object, task: object) -> None:
        return None

    with pytest.raises(ConfigError, match="posted no reward"):
        await gateway.episode(forgetful)(Talk(tmp_path, "chatml").episode, "task")


@pytest.mark.parametrize(
    ("cause", "error"), [("policy", PolicyFailed), ("infrastructure", InfrastructureFailed)]
)
async def test_an_agent_from_outside_reports_a_failure_by_whose_doing_it_is(
    gateway: Gateway, tmp_path: Path, cause: str, error: type[PolicyFailed | InfrastructureFailed]
) -> None:
    talk = Talk(tmp_path, "chatml")
    playing = asyncio.ensure_future(gateway.episode()(talk.episode, "task"))
    async with client_of(gateway, "master") as client:
        session = (await client.post("/sessions")).json()
        path = f"/sessions/{session['id']}/failure"
        own = {"Authorization": f"Bearer {session['api_key']}"}
        for bad in (
            {"cause": "nobody", "reason": "x"},
            {"cause": cause},
            {"cause": cause, "reason": "Sandbox lost"},
        ):
            assert (await client.post(path, json=bad, headers=own)).status_code == 400
        body = {"cause": cause, "reason": "sandbox_lost", "message": "container 7 is gone"}
        assert (await client.post(path, json=body, headers=own)).status_code == 200
        with pytest.raises(error, match="container 7 is gone") as raised:
            await playing
    assert isinstance(raised.value, PolicyFailed | InfrastructureFailed)
    assert raised.value.reason == "sandbox_lost"


async def test_an_agent_that_fails_after_a_refused_turn_fails_by_the_turns_error(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client's error is of a status 400, which says nothing of who has caused it."""
    talk = Talk(tmp_path, "chatml")

    async def agent(endpoint: Endpoint, task: object) -> float:
        async with client_of(gateway, endpoint.api_key) as client:
            answer = await client.post(CHAT, json={"messages": [user("q")]})
            answer.raise_for_status()
        return 1.0

    async def full(*arguments: object) -> Turn:
        raise ContextFull(tokens=900, tokens_max=800)

    monkeypatch.setattr(talk.engine, "generate", full)
    with pytest.raises(ContextFull, match="900 tokens") as raised:
        await gateway.episode(agent)(talk.episode, "task")
    assert isinstance(raised.value.__cause__, httpx.HTTPStatusError)


async def test_an_agent_whose_prompt_no_context_holds_fails_by_a_full_context(
    gateway: Gateway, tmp_path: Path
) -> None:
    talk = Talk(tmp_path, "chatml")
    talk.engine.context_tokens = 1000
    text = "word " * 100_000
    asked: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"messages": [user(text)]}, "context_length_exceeded"),
        ("/v1/completions", {"prompt": text}, "context_length_exceeded"),
        ("/v1/responses", {"input": text}, "context_length_exceeded"),
        ("/v1/messages", {"messages": [user(text)], "max_tokens": 9}, "prompt is too long: "),
    ]

    async def agent(endpoint: Endpoint, task: object) -> float:
        async with client_of(gateway, endpoint.api_key) as client:
            for path, body, words in asked:
                answer = await client.post(path, json={"model": "policy", **body})
                assert answer.status_code == 400
                assert words in answer.text
            answer.raise_for_status()
        return 1.0

    with pytest.raises(ContextFull) as raised:
        await gateway.episode(agent)(talk.episode, "task")
    assert raised.value.tokens < len(talk.model.encoder.encode(text))  # a lower bound
    assert not talk.episode.num_tokens
