"""LoRA turns compared with PEFT, in any batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.engine.models.test_model_parity import (
    TOLERANCE_NATS,
    load_peer,
    load_runner,
    make_turns,
    peer_logits,
)
from tests.engine.scheduling.driving import DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.weights.lora import Adapter
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter, load_adapter

# What PEFT asks of a model, transformers 5.23 calls by another name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 10, "target_modules": ALL},
    "stabilised": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ["v_proj"]},
    "some": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj", "down_proj"]},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),  # norms after blocks
}


def make_peft(path: Path, name: str) -> tuple[Any, LoadedAdapter]:
    """Return a PEFT model with a random adapter, and the adapter's tensors as published."""
    torch.manual_seed(len(name))
    config = peft.LoraConfig(init_lora_weights=False, **CONFIGS[name])
    model: Any = peft.get_peft_model(load_peer(path), config)
    return model.eval(), load_adapter(peft.get_peft_model_state_dict(model), config)


def lay_out(weights: Any, loaded: LoadedAdapter) -> Adapter:
    assert isinstance(weights, Weights)
    return weights.make_adapter(loaded.tensors, loaded.scale)


def assert_sampled_by(model: Any, turns: list[DrivenTurn]) -> None:
    for turn in turns:
        logprobs = torch.log_softmax(peer_logits(model, turn), -1)
        assert turn.sampled == logprobs.argmax(-1).tolist()
        assert turn.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=TOLERANCE_NATS)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_three_adapters_and_none_in_one_batch_are_each_as_peft_has_them_alone(
    name: str, is_compiled: bool, tmp_path: Path
) -> None:
    model_type, fields = MODELS[name]
    path = make_model_directory(tmp_path, model_type, **fields)
    runner = load_runner(path, is_compiled=is_compiled)
    peers = {adapter: make_peft(path, adapter) for adapter in CONFIGS}
    runner.weights.adapters = {
        adapter: lay_out(runner.weights, loaded) for adapter, (_, loaded) in peers.items()
    }
    names = ["", *CONFIGS]
    turns = [
        replace(turn, adapter=names[n % len(names)], sampled=[], logprobs=[])
        for n, turn in enumerate(make_turns())
    ]
    drive(runner, turns, new_tokens=8)
    assert_sampled_by(load_peer(path), [turn for turn in turns if not turn.adapter])
    for adapter, (peer, _) in peers.items():
        assert_sampled_by(peer, [turn for turn in turns if turn.adapter == adapter])


def test_a_batch_of_one_adapter_is_as_peft_has_it(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen2")
    runner = load_runner(path)
    peer, loaded = make_peft(path, "all")
    runner.weights.adapters = {"all": lay_out(runner.weights, loaded)}
    turns = [replace(t, adapter="all", sampled=[], logprobs=[]) for t in make_turns()]
    drive(runner, turns, new_tokens=8)
    assert_sampled_by(peer, turns)


def test_where_bits_must_not_depend_on_the_batch_those_of_adapters_do_not(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen2")
    model = open_model(path, "float32", is_deterministic=True)
    runner = model.make_runner(num_blocks=128, block_tokens=8)
    runner.weights.adapters = {
        name: lay_out(runner.weights, make_peft(path, name)[1]) for name in CONFIGS
    }
    names = ["", *CONFIGS]
    turns, alone = (
        [replace(turn, adapter=names[n % len(names)]) for n, turn in enumerate(make_turns())]
        for _ in range(2)
    )
    drive(runner, turns, new_tokens=6)
    for turn in alone:
        turn.chunks = (64,)
        drive(runner, [turn], new_tokens=6)
    assert [turn.sampled for turn in turns] == [turn.sampled for turn in alone]
    assert [turn.logprobs for turn in turns] == [turn.logprobs for turn in alone]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "without the other"),
        ({"model.layers.9.self_attn.q_proj": (4, 64)}, "is no matrix of this model"),
        ({"model.layers.0.self_attn.q_proj": (4, 63)}, r"shape \[4, 63\], .* \[4, 64\]"),
        ({"model.layers.0.mlp.down_proj": (600, 96)}, "rank 600, and ranks must be in"),
        ({"model.embed_tokens": (4, 64)}, "tensors of model.embed_tokens, and engines serve"),
        ({"model.layers.0.input_layernorm": (4, 64)}, "is no matrix of this model"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused_by_name(
    tensors: dict[str, tuple[int, int]], message: str, tmp_path: Path
) -> None:
    weights = load_runner(make_model_directory(tmp_path, "qwen2")).weights
    given: dict[str, torch.Tensor] = {}
    for name, (rank, width) in tensors.items():
        if name.endswith(".weight"):
            given[name] = torch.zeros(rank, width)
            continue
        given[f"{name}.lora_A.weight"] = torch.zeros(rank, width)
        index = weights._copy_targets.get(f"{name}.weight")
        given[f"{name}.lora_B.weight"] = torch.zeros(index.shape[0] if index else 64, rank)
    with pytest.raises(WeightsRefused, match=message):
        weights.make_adapter(given, 1.0)


def test_adapters_of_experts_and_of_models_that_transformers_computes_are_refused(
    tmp_path: Path,
) -> None:
    experts = load_runner(make_model_directory(tmp_path / "moe", "qwen3_moe")).weights
    name = "model.layers.0.mlp.experts.1.down_proj"
    pair = {
        f"{name}.lora_A.weight": torch.zeros(2, 40),
        f"{name}.lora_B.weight": torch.zeros(64, 2),
    }
    with pytest.raises(WeightsRefused, match="not of experts"):
        experts.make_adapter(pair, 1.0)
    other = open_model(make_model_directory(tmp_path / "gpt2", "gpt2"), "float32").allocate()
    with pytest.raises(WeightsRefused, match="GPT2LMHeadModel here, without adapters"):
        other.make_adapter(pair, 1.0)
