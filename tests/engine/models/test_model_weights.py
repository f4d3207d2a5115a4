from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import make_model_directory
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, fill_from_directory, load_directory
from tidegate.errors import ModelError, WeightsRefused

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def weights(model: Path) -> Weights:
    return Weights.allocate(ModelConfig.from_directory(model), torch.float32)


def test_a_waiter_for_a_directory_to_be_read_is_notified_of_each_tensor(
    model: Path, weights: Weights
) -> None:
    beats: list[int] = []
    fill_from_directory(weights, model, lambda: beats.append(len(weights.missing())))
    assert len(beats) == len(dict(read_tensors(model)))
    assert beats == sorted(beats, reverse=True)
    assert beats[-1] == 0


def test_update_after_update_goes_into_the_same_memory(model: Path, weights: Weights) -> None:
    layer = weights.layers[1]
    matrices = [weights.head, layer.qkv, *layer.gate_up]
    addresses = [matrix.storage.data_ptr() for matrix in matrices]
    for factor in (1.0, 2.0):
        weights.start()
        for name, tensor in read_tensors(model):
            weights.load(name, tensor * factor)

    assert addresses == [matrix.storage.data_ptr() for matrix in matrices]
    once = load_directory(model, weights.config, torch.float32).layers[1]
    assert torch.equal(layer.qkv.unpacked(), 2 * once.qkv.unpacked())
    assert torch.equal(layer.gate_up[0].unpacked(), 2 * once.gate_up[0].unpacked())


def test_the_head_keeps_the_precision_that_was_published(model: Path) -> None:
    weights = Weights.allocate(ModelConfig.from_directory(model), torch.bfloat16)
    published = torch.randn(96, 64)

    weights.load(EMBEDDING, published)

    assert torch.equal(weights.head.unpacked(), published)
    assert torch.equal(weights.embedding.unpacked(), published.bfloat16())


def test_a_tied_head_takes_no_memory_in_float32_and_its_tensor_must_be_the_embedding(
    weights: Weights,
) -> None:
    assert weights.head is weights.embedding
    weights.load(EMBEDDING, torch.ones(96, 64))

    weights.load("lm_head.weight", torch.ones(96, 64))
    with pytest.raises(WeightsRefused, match=r"lm_head\.weight differs from"):
        weights.load("lm_head.weight", torch.zeros(96, 64))

    assert torch.equal(weights.head.unpacked(), torch.ones(96, 64))


def test_parameters_that_require_gradients_can_be_loaded(weights: Weights) -> None:
    weights.load(EMBEDDING, torch.nn.Parameter(torch.ones(96, 64)))

    assert not weights.embedding.storage.requires_grad


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(96, 64), "2 layers has no tensor"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(128), "no tensor"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(64, 96), r"\[64, 96\].*\[96, 64\]"),
        ("model.layers.0.self_attn.q_norm.weight", torch.zeros(4, 32), r"\[4, 32\].*\[32\]"),
        (EMBEDDING, torch.zeros(96, 64, dtype=torch.int8), "int8"),
        (f"_orig_mod.{EMBEDDING}", torch.zeros(96, 64), "torch.compile has added '_orig_mod'"),
        (f"module.{EMBEDDING}", torch.zeros(96, 64), f"name the tensor '{EMBEDDING}'"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    weights: Weights, name: str, tensor: torch.Tensor, words: str
) -> None:
    with pytest.raises(WeightsRefused, match=words) as refusal:
        weights.load(name, tensor)

    assert name in str(refusal.value)
    assert name in [*weights.missing(), name]


def test_a_directory_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "llama", tied=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors")

    with pytest.raises(ModelError, match=r"lacks 1 .*lm_head\.weight"):
        load_directory(path, ModelConfig.from_directory(path), torch.float32)


def test_a_directory_that_contradicts_its_config_is_refused(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen2")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path / "model.safetensors")

    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[65\]"):
        load_directory(path, ModelConfig.from_directory(path), torch.float32)
