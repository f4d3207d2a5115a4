"""Pauses, aborts, sleep and caches of the server.

Expected answers are those observed of vLLM 0.32 and 0.33.
"""

import pytest

import tidegate
from tests.held_credit import paused, turns_continue_until
from tests.serving.vllm_server.vllm_serving import (
    CONTEXT_TOKENS_MAX,
    LONG,
    PROMPT,
    BackgroundRequest,
    Client,
)
from tidegate.transport.messages import CancelTurn, Message, Resume

pytestmark = pytest.mark.wire

# ---------------------------------------------------------------- pauses and aborts


def aborted(message: Message) -> bool:
    return isinstance(message, CancelTurn)


def test_a_pause_that_aborts_gives_what_there_is_and_refuses_more(
    client: Client, server: tidegate.VLLMServer
) -> None:
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG)
        assert client.post("/pause") == {"status": "paused"}  # abort is what no mode means
    (choice,) = request.answer["choices"]
    assert choice["finish_reason"] == "abort"
    count = len(choice["token_ids"])
    assert 0 < count < CONTEXT_TOKENS_MAX - 3
    assert len(choice["logprobs"]["content"]) == count
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert client.get("/is_paused") == {"is_paused": True}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    error = client.refusal("/v1/completions", {"prompt": "x"})
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert client.post("/resume") == client.post("/resume") == {"status": "resumed"}
    assert client.get("/is_paused") == {"is_paused": False}
    assert client.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["choices"]


@pytest.mark.parametrize("clears", ["true", "false"])
def test_a_pause_that_keeps_freezes_requests_and_queues_new_ones(
    client: Client, server: tidegate.VLLMServer, clears: str
) -> None:
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG)
        client.post("/pause", mode="keep", clear_cache=clears)
    frozen = client.tokens_generated()
    late = BackgroundRequest(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    client.wait_until(lambda: client.num_running() == 2)
    assert client.tokens_generated() == frozen
    client.post("/resume")
    assert len(request.answer["choices"][0]["token_ids"]) == CONTEXT_TOKENS_MAX - 3
    assert late.answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_mode_in_the_body_is_not_read_and_a_strange_one_is_refused(client: Client) -> None:
    client.post("/pause", {"mode": "keep"})
    assert client.refusal("/v1/completions", {"prompt": "x"})["code"] == 503  # as by abort
    assert client.refusal("/pause", mode="sometimes")["param"] == "query.mode"


def test_a_pause_that_waits_lets_requests_end(client: Client, server: tidegate.VLLMServer) -> None:
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG)
        client.post("/pause", mode="wait")
    assert request.answer["choices"][0]["finish_reason"] == "length"
    assert client.get("/is_paused") == {"is_paused": True}


def test_a_resume_ends_a_pause_that_still_waits(
    client: Client, server: tidegate.VLLMServer
) -> None:
    with turns_continue_until(server, lambda message: isinstance(message, Resume)):
        request = client.begin(server, "/inference/v1/generate", LONG)
        pausing = BackgroundRequest(server, "/pause", mode="wait")
        client.wait_until(lambda: client.http.post("/v1/completions", json={}).status_code == 503)
        client.post("/resume")
    assert pausing.answer == {"status": "paused"}
    assert client.get("/is_paused") == {"is_paused": False}
    assert request.answer["choices"][0]["finish_reason"] == "length"


def test_an_abort_ends_a_pause_that_still_waits(
    client: Client, server: tidegate.VLLMServer
) -> None:
    with turns_continue_until(server, aborted):
        request = client.begin(server, "/inference/v1/generate", LONG)
        pausing = BackgroundRequest(server, "/pause", mode="wait")
        client.wait_until(lambda: client.http.post("/v1/completions", json={}).status_code == 503)
        client.post("/pause", mode="abort")
    assert request.answer["choices"][0]["finish_reason"] == "abort"
    assert pausing.answer == {"status": "paused"}
    assert client.get("/is_paused") == {"is_paused": True}


def test_requests_are_aborted_by_the_ids_that_answers_have(
    client: Client, server: tidegate.VLLMServer
) -> None:
    with turns_continue_until(server, paused):
        one = client.begin(server, "/inference/v1/generate", LONG | {"request_id": "one"})
        two = BackgroundRequest(server, "/inference/v1/generate", LONG | {"request_id": "two"})
        client.wait_until(lambda: client.num_running() == 2)
        client.post("/pause", mode="keep")
    reported = client.post("/abort_requests", {"request_ids": ["one", "no"]})
    assert reported == {"status": "aborted", "aborted": 2}  # as many as asked for
    assert client.num_running() == 2
    client.post("/abort_requests", {"request_ids": ["generate-tokens-one"]})
    assert one.answer["choices"][0]["finish_reason"] == "abort"
    assert client.num_running() == 1
    assert not two.is_answered
    client.post("/resume")
    assert client.post("/abort_requests", {})["status"] == "aborted"
    assert two.answer["choices"][0]["finish_reason"] in ("abort", "length")
    assert client.refusal("/abort_requests")["message"].startswith("Invalid JSON format")


# ---------------------------------------------------------------- caches and sleep


def test_the_prefix_cache_is_not_clean_while_requests_hold_some(
    client: Client, server: tidegate.VLLMServer
) -> None:
    assert client.post("/reset_prefix_cache") == {"success": True}
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG)
        client.post("/pause", mode="keep")
    assert client.post("/reset_prefix_cache") == {"success": False}
    again = {"reset_running_requests": "true"}
    assert client.post("/reset_prefix_cache", **again) == {"success": True}
    assert client.get("/is_paused") == {"is_paused": True}
    client.post("/resume")
    assert len(request.answer["choices"][0]["token_ids"]) == CONTEXT_TOKENS_MAX - 3


@pytest.mark.parametrize("level", [1, 2])
def test_engines_sleep_and_wake_part_by_part(client: Client, level: int) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    before = client.post("/v1/completions", greedy)["choices"][0]["token_ids"]
    assert client.post("/sleep", level=level) == {"status": "sleeping", "level": level}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    reported = client.post("/wake_up", tags="weights")
    assert reported == {"status": "sleeping", "tags": ["weights"]}
    assert client.get("/is_sleeping") == {"is_sleeping": True}
    reported = client.post("/wake_up", tags="kv_cache")
    assert reported == {"status": "awake", "tags": ["kv_cache"]}
    assert client.get("/is_sleeping") == {"is_sleeping": False}
    assert client.post("/wake_up") == {"status": "awake", "tags": None}
    assert client.post("/v1/completions", greedy)["choices"][0]["token_ids"] == before


def test_a_sleep_returns_requests_that_were_kept(
    client: Client, server: tidegate.VLLMServer
) -> None:
    with turns_continue_until(server, paused):
        request = client.begin(server, "/inference/v1/generate", LONG)
        client.post("/pause", mode="keep")
    client.post("/sleep", level=0)
    assert request.answer["choices"][0]["finish_reason"] == "abort"
    assert client.post("/wake_up", tags="scheduling")["status"] == "awake"


def test_caches_are_given_back_by_paused_engines_only(client: Client) -> None:
    assert client.refusal("/release_kv_cache_memory")["code"] == 500
    client.post("/pause")
    assert client.post("/release_kv_cache_memory") == {"status": "kv_cache_released"}
    assert client.post("/wake_up") == {"status": "awake", "tags": None}
