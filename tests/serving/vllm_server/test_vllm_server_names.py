"""Weights by the directory's names, and by those of the state_dict()."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tidegate
from tests.models import make_model, make_model_directory
from tests.serving.vllm_server.vllm_serving import PROMPT, Client, difference

pytestmark = pytest.mark.wire

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tied": False}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "granitemoe": EXPERTS | {"num_local_experts": 4},
    "minimax_m2": EXPERTS | {"num_local_experts": 4, "head_dim": 16},
    "glm4_moe": EXPERTS
    | {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
    "qwen3_moe": {},
}
"""All but the last are computed by transformers."""


@contextmanager
def serving(path: Path) -> Iterator[Client]:
    """A server that reads files beside the model's directory, too."""
    with (
        tidegate.vllm_server(
            model=path, weight_checksums=True, weight_directories=[path.parent]
        ) as server,
        Client(server) as client,
    ):
        yield client


def send(client: Client, path: Path, names: list[str] | None = None) -> None:
    info = {"path": str(path)} | ({} if names is None else {"names": names})
    client.post("/start_weight_update")
    client.post("/update_weights", {"update_info": info})
    client.post("/finish_weight_update")


def expect(client: Client, model: Any) -> None:
    """The log-probs are those of this model of transformers."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    (choice,) = client.post("/v1/completions", body | {"return_token_ids": True})["choices"]
    said = list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))
    assert difference(said, model, PROMPT) < 1e-4


def state_file(path: Path, model: Any) -> Path:
    """A file of a model by the names of its ``state_dict()``."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_are_updated_by_either_names_and_reload_their_own_directory(
    family: str, tmp_path: Path
) -> None:
    fields = FAMILIES[family]
    paths = [make_model_directory(tmp_path / f"{n}", family, seed=n, **fields) for n in range(3)]
    models = [make_model(family, seed=seed, **fields) for seed in range(3)]
    with serving(paths[0]) as client:
        before = client.post("/weight_checker", {"action": "checksum"})["checksums"]
        send(client, paths[1])
        expect(client, models[1])
        send(client, state_file(tmp_path / "state.safetensors", models[2]))
        expect(client, models[2])
        on_disk = load_file(paths[0] / "model.safetensors").keys()
        fused = min(models[1].state_dict().keys() - on_disk - {"lm_head.weight"})
        part = state_file(tmp_path / "part.safetensors", models[1])
        send(client, part, [fused])
        with torch.no_grad():
            models[2].state_dict()[fused].copy_(models[1].state_dict()[fused])
        expect(client, models[2])
        strange = "model.layers.0.block_sparse_moe.experts.4.w1.weight"
        save_file({strange: torch.zeros(96, 64)}, tmp_path / "strange.safetensors")
        client.post("/start_weight_update")
        info = {"update_info": {"path": str(tmp_path / "strange.safetensors")}}
        assert strange in client.refusal("/update_weights", info)["message"]
        client.post("/collective_rpc", {"method": "reload_weights"})
        expect(client, models[0])
        same = {"action": "compare", "baseline": before}
        assert client.post("/weight_checker", same) == {"match": True, "mismatches": []}


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_head_that_differs_from_a_tied_embedding_is_refused_and_an_equal_one_taken(
    family: str, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path / "model", family)
    model = make_model(family, seed=1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with serving(path) as client:
        save_file(state, tmp_path / "equal.safetensors")
        send(client, tmp_path / "equal.safetensors")
        expect(client, model)
        state["lm_head.weight"] += 1.0
        save_file(state, tmp_path / "other.safetensors")
        client.post("/start_weight_update")
        info = {"update_info": {"path": str(tmp_path / "other.safetensors")}}
        client.post("/update_weights", info)
        assert "lm_head.weight differs" in client.refusal("/finish_weight_update")["message"]
        expect(client, model)
