"""Access to the server: web pages, tokens, paths of files, requests that are too large."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidegate
from tests.reference_cycles import cycles_found
from tests.serving.vllm_server.vllm_serving import TIMEOUT_S, Client
from tidegate.errors import ConfigError
from tidegate.serving.http import scaffold
from tidegate.serving.http.server import MESSAGES_MAX
from tidegate.serving.openai import completions
from tidegate.serving.sglang import app as sglang
from tidegate.serving.vllm import app as vllm
from tidegate.transport.server_keys import own_key

pytestmark = pytest.mark.wire

PATHS = [*vllm.PATHS, *sglang.PATHS]
CONTROL = [one.path for one in PATHS if one.is_control]
BODIES: dict[str, Any] = {
    "/update_weights": {"update_info": {"path": "/"}},
    "/init_weight_transfer_engine": {"init_info": {}},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/collective_rpc": {"method": "reload_weights"},
}


@pytest.fixture
def stranger(server: tidegate.VLLMServer) -> Iterator[httpx.Client]:
    """A client without a token."""
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        yield http


def test_every_path_that_changes_what_is_served_wants_the_control_token(
    server: tidegate.VLLMServer, stranger: httpx.Client
) -> None:
    posts = {one.path for one in PATHS if one.method == "POST"}
    data = {path for path in posts if "completions" in path or "tokenize" in path}
    data |= {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
    data |= {"/inference/v1/generate", "/skyrl/v1/generate", "/finish_session", "/generate"}
    assert set(CONTROL) == posts - data
    for path in CONTROL:
        for token in ("", "x" * 32, server.control_token[:-1] if server.control_token else ""):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = stranger.post(path, json=BODIES.get(path, {}), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, 401), path
            assert "--no-control-token" in answer.json()["error"]["message"]
    assert stranger.get("/is_paused").json() == {"is_paused": False}
    assert stranger.get("/weight_info").json() == {"weight_version": "default"}
    completion = {"prompt": "x", "max_tokens": 1, "logprobs": 20, "ignore_eos": True}
    answer = stranger.post("/v1/completions", json=completion)
    assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
    ],
)
def test_a_page_of_a_stranger_is_refused_on_every_path(
    client: Client, stranger: httpx.Client, headers: dict[str, str]
) -> None:
    for one in PATHS:
        answer = stranger.request(one.method, one.path, headers=headers)
        assert answer.status_code == 403, one.path
        assert answer.json()["error"]["type"] == "PermissionDeniedError"
        if "Origin" in headers:  # with a right token, too
            assert client.http.request(one.method, one.path, headers=headers).status_code == 403


@pytest.mark.parametrize("needs_control_token", [True, False])
def test_every_path_but_the_listed_ones_wants_a_key(model: Path, needs_control_token: bool) -> None:
    with (
        tidegate.vllm_server(
            model=model, api_key="the-key", needs_control_token=needs_control_token
        ) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as stranger,
    ):
        answers = {one.path: stranger.request(one.method, one.path) for one in PATHS}
        open_paths = {path for path, answer in answers.items() if answer.status_code != 401}
        assert open_paths == {"/health", "/ping", "/liveness", "/metrics"}
        stranger.headers["Authorization"] = "Bearer the-key"
        assert stranger.get("/server_info").status_code == 200
        status = stranger.post("/resume").status_code
        assert status == (401 if needs_control_token else 200)
        stranger.headers["Authorization"] = f"Bearer {server.control_token}"
        both = [stranger.get("/server_info"), stranger.post("/resume")]
        assert [each.status_code for each in both] == [200 if needs_control_token else 401] * 2


def test_without_a_control_token_trainers_that_know_none_are_served(model: Path) -> None:
    with tidegate.vllm_server(model=model, needs_control_token=False) as server:
        assert server.control_token is None
        answer = httpx.post(f"{server.url}/pause", timeout=TIMEOUT_S)
        assert answer.json() == {"status": "paused"}


def test_a_control_token_that_is_too_short_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="could be guessed"):
        tidegate.vllm_server(model=model, control_token="short")


# ---------------------------------------------------------------- paths of files


def test_files_outside_the_named_directories_are_never_read_nor_revealed(
    client: Client, model: Path, tmp_path: Path
) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    for name in ("adapter_config.json", "model.safetensors"):
        (there / name).write_text("{}")
    link = model / "link"
    link.symlink_to(there)
    up = model / ".." / ".." / there.relative_to(tmp_path.parent.parent)

    def reported(path: Path | str) -> list[tuple[int, str]]:
        """The text of each path's answer, without the name of the file."""
        client.post("/start_weight_update")
        asked = [
            ("/update_weights", {"update_info": {"path": str(path)}}),
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}),
            (
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(path)}},
            ),
        ]
        answers = [client.http.post(name, json=body) for name, body in asked]
        return [
            (a.status_code, a.json()["error"]["message"].replace(str(path), "")) for a in answers
        ]

    expected = reported(missing)
    assert [status for status, _ in expected] == [500, 404, 500]
    assert all("--weight-directory" in message for _, message in expected)
    for path in (there, link, up, there / "model.safetensors", "/etc/passwd", "/proc/self/environ"):
        assert reported(path) == expected
    link.unlink()
    for path in ("a\0b", "x" * 10_000, ""):
        assert [status for status, _ in reported(path)] == [500, 404, 500]


# ---------------------------------------------------------------- keys


def test_a_key_comes_by_the_environment_or_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    file.chmod(0o600)
    assert own_key("K", {}) is None
    assert own_key("K", {"K": "sesame"}) == "sesame"
    assert own_key("K", {"K_FILE": str(file)}) == "sesame"
    with pytest.raises(ConfigError, match="both set"):
        own_key("K", {"K": "x", "K_FILE": str(file)})
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        own_key("K", {"K_FILE": str(file)})
    file.chmod(0o600)
    for content in ("", "two words", "two\nlines"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="one key"):
            own_key("K", {"K_FILE": str(file)})


def test_a_key_on_the_command_line_is_refused() -> None:
    command = [sys.executable, "-m", "tidegate.cli", "serve", "--model", "x"]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [*command, "--api-key", "sesame"], capture_output=True, text=True, env=environment,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "TIDEGATE_SERVER_KEY" in done.stderr
    assert "sesame" not in done.stderr + done.stdout


# ---------------------------------------------------------------- large requests


CHAT = [{"role": "user", "content": "x"}]
BAD_GRAMMAR = {"structured_outputs": {"grammar": "zzz"}}


@pytest.mark.parametrize(
    ("path", "bodies", "param"),
    [
        (
            "/v1/completions",
            [
                {"prompt": "x", "logprobs": 4096},
                {"prompt": "x", "logprobs": -1},
                {"prompt": [3] * 1000, "echo": True, "logprobs": 2, "n": 1024, "max_tokens": 0},
            ],
            "logprobs",
        ),
        ("/v1/completions", [{"prompt": "x", "prompt_logprobs": 21}], "prompt_logprobs"),
        ("/v1/completions", [{"prompt": "x", "stop": ["y"] * 65}], "stop"),
        (
            "/v1/chat/completions",
            [{"messages": CHAT, "logprobs": True, "top_logprobs": 21}],
            "logprobs",
        ),
        ("/v1/chat/completions", [{"messages": [{}] * (MESSAGES_MAX + 1)}], "messages"),
        ("/v1/chat/completions", [{"messages": CHAT, "tools": [{"x": "y" * 2**20}]}], "tools"),
        (
            "/inference/v1/generate",
            [
                {"token_ids": [5], "sampling_params": {"logprobs": 21}},
                {"token_ids": [5], "sampling_params": {"logprobs": 20, "n": 1024}},
            ],
            "logprobs",
        ),
    ],
)
def test_a_small_request_for_a_large_answer_is_refused_by_the_limits_name(
    client: Client, path: str, bodies: list[Any], param: str
) -> None:
    for body in bodies:
        reported = client.refusal(path, body)
        assert (reported["code"], reported["param"]) == (400, param)


def test_prompts_of_all_choices_together_are_limited(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "PROMPT_TOKENS_MAX", 100)
    sampling = {"max_tokens": 1, "n": 10}
    assert client.generate(token_ids=[5] * 10, sampling_params=sampling)["choices"]
    body = {"token_ids": [5] * 11, "sampling_params": sampling}
    assert client.refusal("/inference/v1/generate", body)["param"] == "n"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": "x", "stop": ["y"] * 65}),
        ("/v1/completions", {"prompt": "x", "model": "unknown"}),
        ("/v1/completions", {"prompt": "a" * 10**6}),
        ("/v1/completions", {"prompt": [1] * 2_000_001}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": CHAT * 5000}),
        ("/v1/chat/completions", {"messages": CHAT, **BAD_GRAMMAR}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True, **BAD_GRAMMAR}),
        ("/tokenize", {"messages": [{"role": "user"}]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/inference/v1/generate", {"token_ids": [10**9], "sampling_params": {}}),
        ("/generate", {"text": "x", "sampling_params": {"regex": "((("}}),
        ("/generate", {"text": "x", "stream": True, "sampling_params": {"regex": "((("}}),
        ("/update_weights", {"update_info": {"path": "/"}}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/no"}}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no"}),
        ("/nowhere", {}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True}),
    ],
)
def test_an_answer_leaves_no_reference_cycle_that_keeps_the_body(
    client: Client, path: str, body: Any
) -> None:
    client.http.post(path, json=body)  # fills caches
    with cycles_found() as cycles:
        client.http.post(path, json=body)
        client.wait_until(lambda: client.num_running() == 0)
    assert not cycles


def test_a_large_answer_is_that_of_a_small_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [30, 41, 52], "max_tokens": 8, "seed": 3, "n": 2, "logprobs": 2,
            "prompt_logprobs": 1, "return_token_ids": True}  # fmt: skip

    def asked() -> Any:
        return re.sub(r'"(id|created)": ?("[^"]*"|\d+)', "", client.http.post(
            "/v1/completions", json=body).text)  # fmt: skip

    small = asked()
    monkeypatch.setattr(scaffold, "LARGE_ANSWER_TOKENS", 1)
    monkeypatch.setattr(completions, "LARGE_PROMPT_LOGPROBS", 1)
    assert asked() == small
