"""A client that closes its connection frees the engines of its request, on every path."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tidegate
from tests.serving.vllm_server.vllm_serving import Client

pytestmark = pytest.mark.wire

ENDLESS = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [[3, 4, 5], [6]], "n": 2, "max_tokens": 1000, **ENDLESS},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2, **ENDLESS},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], **ENDLESS},
    "/inference/v1/generate": {"token_ids": [3, 4, 5], "sampling_params": {"n": 2, **ENDLESS}},
    "/generate": {  # SGLang's
        "input_ids": [[3, 4, 5], [6]],
        "sampling_params": {"n": 2, "max_new_tokens": 1000, **ENDLESS},
    },
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.VLLMServer]:
    """Its engines are paced: on a busy machine, too, no request ends before its client leaves."""
    with tidegate.vllm_server(
        model=model, engines=2, max_running_turns=4, step_time_min_s=0.02
    ) as server:
        yield server
        assert server.statistics().evaluation_ledger.error == 0


def send(server: tidegate.VLLMServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a whole request over a real connection; the caller closes it."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname or "", address.port or 0), timeout=60)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def turns_of_engines(server: tidegate.VLLMServer) -> int:
    """Number of turns that engines hold or that wait for one."""
    scheduler = server._handle._running.scheduler
    assert scheduler is not None
    turns = scheduler.core.turns
    return len(turns.waiting) + sum(len(engine.submissions) for engine in turns.engines.values())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", REQUESTS)
def test_turns_end_when_the_client_of_a_running_request_closes_its_connection(
    client: Client, server: tidegate.VLLMServer, path: str, stream: bool
) -> None:
    if stream and path.endswith("/batch"):
        pytest.skip("batches of conversations are not streamed")
    client.wait_until(lambda: turns_of_engines(server) == 0)
    before = client.tokens_generated()
    with send(server, path, REQUESTS[path] | {"stream": stream}):
        client.wait_until(lambda: client.tokens_generated() > before)
    client.wait_until(lambda: client.num_running() == 0)
    client.wait_until(lambda: turns_of_engines(server) == 0)
    # 1,000 tokens would have been sampled of each choice.
    assert client.tokens_generated() - before < 1000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_is_gone_before_its_request_began_leaves_no_turn_behind(
    client: Client, server: tidegate.VLLMServer, stream: bool
) -> None:
    for path, body in REQUESTS.items():
        if not (stream and path.endswith("/batch")):
            send(server, path, body | {"stream": stream}).close()
    client.wait_until(lambda: client.num_running() == 0)
    client.wait_until(lambda: turns_of_engines(server) == 0)


def test_a_client_that_leaves_while_its_prompt_is_scored_leaves_no_turn_behind(
    client: Client, server: tidegate.VLLMServer
) -> None:
    body = REQUESTS["/v1/completions"] | {"prompt": [3] * 20, "prompt_logprobs": 1}
    for _ in range(4):
        send(server, "/v1/completions", body).close()
    client.wait_until(lambda: client.num_running() == 0)
    client.wait_until(lambda: turns_of_engines(server) == 0)


def test_an_abort_frees_requests_whose_clients_have_left(
    client: Client, server: tidegate.VLLMServer
) -> None:
    one_each = {path: body for path, body in REQUESTS.items() if path != "/generate"}
    many = [send(server, path, body) for path, body in one_each.items() for _ in range(8)]
    client.wait_until(lambda: client.num_running() == len(many))
    for connection in many:
        connection.close()
    client.post("/abort_requests", {})
    client.post("/pause", mode="abort")
    assert turns_of_engines(server) == 0
