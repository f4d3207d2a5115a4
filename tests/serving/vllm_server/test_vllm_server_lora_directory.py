"""Adapters that are loaded from ``--lora-directory`` when a request first names them."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.held_credit import turns_continue_until
from tests.models import make_model
from tests.serving.vllm_server.vllm_serving import (
    CONTEXT_TOKENS_MAX,
    LONG,
    PROMPT,
    BackgroundRequest,
    Client,
)
from tidegate.errors import ConfigError
from tidegate.serving.control import weight_updates
from tidegate.transport.messages import FinishWeightUpdate

pytestmark = [
    pytest.mark.wire,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's use
]

ADAPTERS = ("model_a_000001", "model_a_000002")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import peft

    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        base = make_model("qwen3", seed=0, max_position_embeddings=CONTEXT_TOKENS_MAX)
        config = peft.LoraConfig(r=4 + seed, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(base, config).save_pretrained(str(path / name))
    (path / "empty").mkdir()
    return path


@pytest.fixture(scope="module")
def server(model: Path, directory: Path) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(
        model=model, served_model_name="tiny", lora_directory=directory
    ) as server:
        yield server


def logprobs(client: Client, model: str) -> Any:
    # What SkyRL's Tinker server posts.
    body = {"model": model, "prompt": PROMPT, "n": 1, "seed": 3, "max_tokens": 4, "stream": False}
    body |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    (choice,) = client.post("/v1/completions", body | {"return_token_ids": True})["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    return choice["logprobs"]["token_logprobs"]


def test_an_unknown_model_name_is_loaded_from_the_directory_once_while_others_wait(
    client: Client, server: tidegate.VLLMServer
) -> None:
    scheduler = server._handle._running.scheduler
    assert scheduler is not None
    before = scheduler.core.next_version
    with ThreadPoolExecutor(8) as threads:
        reported = list(threads.map(lambda _: logprobs(client, ADAPTERS[0]), range(8)))
    assert all(each == reported[0] for each in reported)
    assert scheduler.core.next_version == before + 1
    assert logprobs(client, ADAPTERS[1]) != reported[0]
    assert logprobs(client, "tiny") != reported[0]
    cards = {card["id"]: card["parent"] for card in client.get("/v1/models")["data"]}
    assert cards == {"tiny": None, ADAPTERS[0]: "tiny", ADAPTERS[1]: "tiny"}


def test_the_adapter_that_was_not_named_for_longest_is_unloaded_unless_it_is_in_use(
    client: Client, server: tidegate.VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed() -> list[str]:
        return [card["id"] for card in client.get("/v1/models")["data"][1:]]

    for name in listed():
        client.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    monkeypatch.setattr(weight_updates, "LORA_DIRECTORY_ADAPTERS_MAX", 1)
    first, second = ADAPTERS
    before = logprobs(client, first)
    logprobs(client, second)
    assert listed() == [second]
    assert logprobs(client, first) == before
    assert listed() == [first]
    with turns_continue_until(server, lambda message: isinstance(message, FinishWeightUpdate)):
        running = client.begin(server, "/inference/v1/generate", LONG | {"model": first})
        logprobs(client, second)
    assert listed() == [first, second]
    assert running.answer["choices"][0]["finish_reason"] == "length"


def test_an_adapter_stays_loaded_while_a_prompt_is_scored_with_it(
    client: Client, server: tidegate.VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_updates, "LORA_DIRECTORY_ADAPTERS_MAX", 1)
    first, second = ADAPTERS
    scheduler = server._handle._running.scheduler
    assert scheduler is not None
    client.post("/tokenize", {"prompt": "a", "model": first})
    client.post("/pause", mode="keep", clear_cache="false")
    body = {"prompt": PROMPT, "model": first, "max_tokens": 1, "prompt_logprobs": 0}
    scored = BackgroundRequest(server, "/v1/completions", body)
    client.wait_until(lambda: any(scheduler.scores._sent.values()))
    client.post("/tokenize", {"prompt": "a", "model": second})
    client.post("/resume")
    assert len(scored.answer["choices"][0]["prompt_logprobs"]) == len(PROMPT)


def test_an_adapter_that_was_loaded_by_name_from_elsewhere_is_not_unloaded_for_others(
    client: Client, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_updates, "LORA_DIRECTORY_ADAPTERS_MAX", 1)
    first, second = ADAPTERS
    own = logprobs(client, first)
    body = {"lora_name": first, "lora_path": str(directory / "elsewhere" / "x")}
    shutil.copytree(directory / second, directory / "elsewhere" / "x")
    client.post("/load_lora_adapter", body)
    replaced = logprobs(client, first)
    assert replaced != own
    logprobs(client, second)
    assert logprobs(client, first) == replaced


@pytest.mark.parametrize("name", ["no", "empty", ".", "..", "../model", f"x/../{ADAPTERS[0]}"])
def test_a_name_that_is_no_adapter_of_the_directory_is_not_found(client: Client, name: str) -> None:
    refused = client.refusal("/v1/completions", {"prompt": PROMPT, "model": name})
    assert refused["code"] == 404


def test_a_lora_directory_that_does_not_exist_is_refused_at_start(model: Path) -> None:
    with pytest.raises(ConfigError, match="lora_directory must be a directory"):
        tidegate.vllm_server(model=model, lora_directory=model / "no")
