"""Adapters are read as PEFT writes them, and unsupported ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tidegate.errors import ConfigError
from tidegate.orchestrator.weight_sync.adapter_files import checked_name, load_adapter

NAME = "model.layers.0.self_attn.q_proj"
TENSORS = {
    f"base_model.model.{NAME}.lora_A.weight": torch.ones(4, 8),
    f"base_model.model.{NAME}.lora_B.weight": torch.ones(8, 4),
}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False}


def test_a_directory_of_pefts_is_its_tensors_and_its_scale(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    loaded = load_adapter(tmp_path)
    assert loaded.scale == 1.5
    assert loaded.tensors.keys() == {f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"}


def test_names_of_a_models_own_state_dict_and_rank_stabilised_scales_are_understood() -> None:
    tensors = {n.replace(".weight", ".default.weight"): t for n, t in TENSORS.items()}
    loaded = load_adapter(tensors, CONFIG | {"use_rslora": True})
    assert loaded.scale == 3.0
    assert loaded.tensors.keys() == {f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules trained whole"),
        ({"rank_pattern": {"q_proj": 8}}, "ranks that differ"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"r": 0}, "needs r >= 1"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"r": 8}, "has rank 4, and the config says r=8"),
    ],
)
def test_what_asks_for_more_than_two_matrices_and_a_scale_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_adapter(TENSORS, CONFIG | fields)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no LoRA adapter that can be read"):
        load_adapter(tmp_path)
    with pytest.raises(ConfigError, match="need its config"):
        load_adapter(TENSORS)
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is no matrix of a LoRA"):
        load_adapter(TENSORS | {"model.norm.weight": torch.ones(8)}, CONFIG)
    twice = {n.replace(".weight", ".other.weight"): t for n, t in TENSORS.items()}
    with pytest.raises(ConfigError, match="appears twice"):
        load_adapter(TENSORS | twice, CONFIG)
    with pytest.raises(ConfigError, match="has no tensors"):
        load_adapter({}, CONFIG)
    with pytest.raises(ConfigError, match=r"lora_A.weight contains NaN or infinity"):
        load_adapter({n: t * float("nan") for n, t in TENSORS.items()}, CONFIG)
    with pytest.raises(ConfigError, match="an adapter's name is"):
        checked_name("")
