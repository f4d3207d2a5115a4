"""Engines accept tensors by the directory's names and by the ``state_dict()``'s."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import make_model, make_model_directory
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.external.adapter import Capabilities
from tidegate.engine.external.host_weights import read_host_weights
from tidegate.engine.models.fallback_weights import FallbackWeights
from tidegate.errors import WeightsRefused
from tidegate.observability.audit.archived_model import load_version
from tidegate.orchestrator.weight_sync.parts import WeightParts
from tidegate.transport.weight_names import NameGroup, name_groups

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tied": False}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "granitemoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "head_dim": 16},
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
}


def make(path: Path, family: str, seed: int = 0) -> Path:
    return make_model_directory(path, family, seed=seed, **EXPERTS | MIXTURES[family])


def state_of(family: str, seed: int) -> dict[str, torch.Tensor]:
    model = make_model(family, seed=seed, **EXPERTS | MIXTURES[family])
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_through_transformers_are_updated_by_either_names(
    family: str, tmp_path: Path
) -> None:
    paths = [make(tmp_path / str(seed), family, seed) for seed in range(2)]
    model = open_model(paths[0], "float32")
    target = state_of(family, 1)
    on_disk = load_file(paths[1] / "model.safetensors")
    assert on_disk.keys() != target.keys()
    for tensors in (on_disk, target, dict(reversed(on_disk.items()))):
        weights = model.allocate()
        assert isinstance(weights, FallbackWeights)
        weights.start()
        for tensor in weights.module.state_dict().values():
            tensor.zero_()
        for name, tensor in tensors.items():
            assert weights.missing()
            weights.load(name, tensor)
        assert weights.missing() == []
        made = weights.module.state_dict()
        assert all(torch.equal(made[name], tensor) for name, tensor in target.items())


def test_one_expert_may_replace_that_of_the_version_before_and_an_unknown_one_is_refused(
    tmp_path: Path,
) -> None:
    model = open_model(make(tmp_path, "mixtral"), "float32")
    live, staged = model.allocate(), model.allocate()
    assert isinstance(staged, FallbackWeights)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    staged.start()
    staged.load(name, torch.ones(96, 64))
    staged.complete_from(live)
    target = state_of("mixtral", 0)
    target["model.layers.1.mlp.experts.gate_up_proj"][2, 96:] = 1.0
    made = staged.module.state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in target.items())
    with pytest.raises(WeightsRefused, match=r"experts\.4\.w3"):
        staged.load(name.replace("experts.2", "experts.4"), torch.ones(96, 64))
    with pytest.raises(WeightsRefused, match=r"shape \[95, 64\], expected \[96, 64\]"):
        staged.load(name, torch.ones(95, 64))


def test_a_directory_without_the_prefix_of_the_base_model_can_be_published(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "gpt2")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    model = open_model(path, "float32")
    for named in (bare, tensors):
        weights = model.allocate()
        weights.start()
        for name, tensor in named.items():
            weights.load(name, tensor)
        assert weights.missing() == []


def test_a_tensor_that_the_model_has_no_use_for_is_named(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "gpt2")
    tensors = load_file(path / "model.safetensors") | {"score.weight": torch.zeros(2, 64)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    warning = open_model(path, "float32").warning
    assert warning is not None
    assert "ignores 1 tensors" in warning
    assert "score.weight" in warning


def test_other_engines_are_given_directories_of_what_was_published_by_the_state_dict(
    tmp_path: Path,
) -> None:
    paths = [make(tmp_path / str(seed), "mixtral", seed) for seed in range(2)]
    capabilities = Capabilities(engine="vllm", context_tokens_max=512, running_turns_max=8)
    weights = read_host_weights(paths[0], capabilities).allocate_copy()
    weights.start()
    for name, tensor in state_of("mixtral", 1).items():
        weights.load(name, tensor)
    assert weights.missing() == []
    target = load_file(paths[1] / "model.safetensors")
    assert weights.by_name.keys() == target.keys()
    assert all(torch.equal(weights.by_name[name], target[name]) for name in target)


@pytest.mark.parametrize("is_by_directory", [True, False])
def test_an_audit_lays_parts_over_by_either_names(is_by_directory: bool, tmp_path: Path) -> None:
    make(tmp_path / "0", "mixtral")
    expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    target = state_of("mixtral", 0)
    target[fused][2, 96:] = 1.0
    part = {expert: torch.ones(96, 64)} if is_by_directory else {fused: target[fused]}
    (tmp_path / "1").mkdir()
    parts = WeightParts(over=0)
    parts.write(tmp_path / "1")
    save_file(part, tmp_path / "1" / parts.file_name)

    made = load_version(1, lambda version: tmp_path / str(version)).state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in target.items())


def test_names_whose_tensors_share_a_converted_one_are_one_group() -> None:
    converted = {"q": ["qkv"], "k": ["qkv"], "v": ["qkv"], "up": ["e.0", "e.1"], "norm": ["norm"]}
    groups = name_groups(converted, lambda names: [n for name in names for n in converted[name]])
    assert groups == [NameGroup(("q", "k", "v"), ("qkv",)), NameGroup(("up",), ("e.0", "e.1"))]
