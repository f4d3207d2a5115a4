"""Routed experts and sampling masks in vLLM's API, as vLLM encodes them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate
from tests.models import make_model_directory
from tests.serving.vllm_server.vllm_serving import PROMPT, Client

pytestmark = pytest.mark.wire

SAMPLING = {"max_tokens": 6, "top_k": 4, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}


def experts_of(choice: dict[str, Any]) -> "np.ndarray[Any, Any]":
    file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
    experts: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
    return experts


def stream(client: Client, body: dict[str, Any]) -> list[Any]:
    """Return all events of a streamed answer but the last."""
    with client.http.stream("POST", "/inference/v1/generate", json=body | {"stream": True}) as http:
        data = [line.removeprefix("data: ") for line in http.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_answers_have_experts_of_all_positions_but_the_last_and_each_tokens_kept_set(
    tmp_path: Path,
) -> None:
    model = make_model_directory(tmp_path / "moe", "qwen3_moe")
    settings: Any = {"attachments": ["routed_experts", "kept_tokens"]}
    with tidegate.vllm_server(model=model, **settings) as server, Client(server) as client:
        [choice] = client.generate(token_ids=PROMPT, sampling_params=SAMPLING)["choices"]
        parts = stream(client, {"token_ids": PROMPT, "sampling_params": SAMPLING})
        body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "top_k": 4}
        [completion] = client.post("/v1/completions", body)["choices"]
        greedy = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        later = greedy | {"routed_experts_prompt_start": 3}
        asked = {"token_ids": PROMPT, "sampling_params": greedy}
        [npy] = client.generate(**asked)["choices"]
        [later_rollout] = client.generate(**asked | {"sampling_params": later})["choices"]
        raw = client.http.post(
            "/skyrl/v1/generate", json=asked | {"sampling_params": later}
        ).content

    tokens = len(PROMPT) + 6
    for each in (choice, completion):
        experts = experts_of(each)
        assert experts.shape[0] == tokens - 1
        assert experts.ndim == 3
        assert experts.dtype == np.uint8
    kept = choice["sampling_mask"]
    assert [len(ids) for ids in kept] == [4] * 6
    assert all(token in ids for token, ids in zip(choice["token_ids"], kept, strict=True))

    chunks = [part["choices"][0] for part in parts if part["choices"]]
    assert [chunk["routed_experts"] is not None for chunk in chunks[:-1]] == [False] * (
        len(chunks) - 1
    )
    assert experts_of(chunks[-1]).shape[0] == tokens - 1
    assert [len(ids) for chunk in chunks for ids in chunk["sampling_mask"]] == [4] * 6

    assert np.array_equal(experts_of(later_rollout), experts_of(npy)[3:])
    # SkyRL's client searches for these bytes, before it reads the JSON.
    assert raw.count(b'"routed_experts":{"data":"') == 1
    [packed] = json.loads(raw)["choices"]
    assert packed["token_ids"] == npy["token_ids"]
    envelope = packed["routed_experts"]
    data = np.frombuffer(base64.b64decode(envelope["data"]), envelope["dtype"])
    assert envelope["dtype"] == "uint8"
    assert np.array_equal(data.reshape(envelope["shape"]), experts_of(later_rollout))


def test_skyrls_route_says_which_flag_is_missing(client: Client) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    refusal = client.refusal("/skyrl/v1/generate", body)
    assert refusal["code"] == 501
    assert "start it with --enable-return-routed-experts" in refusal["message"]
