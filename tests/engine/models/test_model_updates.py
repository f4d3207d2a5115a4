"""Weights published under a training model's names become those that the engine computes with."""

from pathlib import Path

import pytest
import torch

from tests.engine.models.test_model_parity import assert_sampled_by, make_turns
from tests.engine.scheduling.driving import drive
from tests.models import make_model, make_model_directory
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.errors import WeightsRefused

pytestmark = pytest.mark.slow

MODEL_TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gpt2",  # and this one is computed by transformers
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_published_state_dict_makes_outputs_those_of_the_new_weights(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    model = open_model(make_model_directory(tmp_path, model_type, tied=tied), "float32")
    runner = model.make_runner(num_blocks=128, block_tokens=8)
    trained = make_model(model_type, seed=1, tied=tied)
    before, after = make_turns(), make_turns()

    staged = model.allocate()
    for name, tensor in trained.state_dict().items():
        staged.load(name, tensor)
    assert staged.missing() == []
    drive(runner, before, new_tokens=2)
    runner.swap(staged)
    drive(runner, after, new_tokens=4)

    assert_sampled_by(make_model(model_type, tied=tied), before)
    assert_sampled_by(trained, after)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "gpt2"])
def test_the_version_before_can_be_loaded_into_again(model_type: str, tmp_path: Path) -> None:
    model = open_model(make_model_directory(tmp_path / "0", model_type), "float32")
    runner = model.make_runner(num_blocks=128, block_tokens=8)
    spare = model.allocate()
    for seed in (1, 2, 3):
        path = make_model_directory(tmp_path / str(seed), model_type, seed=seed)
        spare.start()
        for name, tensor in read_tensors(path):
            spare.load(name, tensor)
        assert spare.missing() == []
        live = runner.weights
        runner.swap(spare)
        spare = live

    turns = make_turns()
    drive(runner, turns, new_tokens=2)
    assert_sampled_by(make_model(model_type, seed=3), turns)


def test_experts_may_come_together_or_one_by_one_and_none_may_be_missing(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3_moe")
    model = open_model(path, "float32")
    one_by_one = dict(read_tensors(path))
    together = make_model("qwen3_moe").state_dict()
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in one_by_one
    assert together["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 80, 64)

    staged = model.allocate()
    for name, tensor in one_by_one.items():
        if ".1.mlp.experts." not in name:
            staged.load(name, tensor)
    assert len(staged.missing()) == 3 * 6
    staged.load("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(6, 80, 64))
    assert staged.missing() == [
        f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(6)
    ]
    staged.load("model.layers.1.mlp.experts.down_proj", torch.zeros(6, 64, 40))
    assert staged.missing() == []
    staged.start()
    all_missing = len(staged.missing())
    staged.load("model.layers.1.mlp.experts.down_proj", torch.zeros(6, 64, 40))
    assert len(staged.missing()) == all_missing - 6


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "words"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.6.up_proj.weight", (40, 64), "no tensor"),
        ("qwen3_moe", "model.layers.0.mlp.up_proj.weight", (40, 64), "no tensor"),
        ("qwen3_moe", "model.layers.0.mlp.experts.down_proj", (6, 40, 64), r"\[6, 64, 40\]"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", (6, 64, 96), r"\[6, 96, 64\]"),
        ("gpt_oss", "model.layers.0.mlp.gate.weight", (6, 64), "no tensor"),
        ("gemma2", "model.layers.0.self_attn.q_norm.weight", (24,), "no tensor"),
        ("gpt2", "transformer.h.2.attn.c_attn.bias", (192,), "no tensor"),
        ("gpt2", "transformer.wpe.weight", (512, 63), r"\[512, 63\].*\[512, 64\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_in_each_implementation_of_a_model(
    tmp_path: Path, model_type: str, name: str, shape: tuple[int, ...], words: str
) -> None:
    staged = open_model(make_model_directory(tmp_path, model_type), "float32").allocate()

    with pytest.raises(WeightsRefused, match=words):
        staged.load(name, torch.zeros(shape))
    with pytest.raises(WeightsRefused, match="int8"):
        staged.load(staged.missing()[0], torch.zeros(96, 64, dtype=torch.int8))
