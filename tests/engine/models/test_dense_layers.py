"""A step through all layers in one compiled call equals one layer by layer, bit by bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import make_model_directory
from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling
from tidegate.engine.models.model import DensePlan, forward, native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Quantization, Weights, fill_from_directory

SAMPLING = RowSampling(1.0, 0, 1.0, 0, 0)

BLOCK_TOKENS = 4

NUM_BLOCKS = 330

HALF_SLIDES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms-of-queries-and-keys": ("qwen3", {}),
    "all-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "one-window": ("mistral", {"sliding_window": 3}),
    "two-kinds-of-layers": ("qwen2", HALF_SLIDES),
    "norms-after-blocks": ("gemma2", {"sliding_window": 5}),
    "norms-of-one-more-than-the-gain": ("gemma3_text", {}),
    "an-odd-inner-size": ("llama", {"intermediate_size": 97, "head_dim": 8}),
}


def make_runner(
    path: Path,
    name: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    *,
    quantization: Quantization | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    is_packed: bool = True,
    is_deterministic: bool = False,
    **fields: Any,
) -> ModelRunner:
    directory = make_model_directory(path, name, **fields)
    config = replace(
        ModelConfig.from_directory(directory), attention_soft_cap=soft_cap, attention_scale=scale
    )
    native = native_for(config, dtype)
    if native is None:
        pytest.skip("no C++ compiler: engines compute by torch's code here")
    weights = Weights.allocate(config, dtype, is_packed=is_packed, quantization=quantization)
    fill_from_directory(weights, directory)
    return ModelRunner(
        config,
        weights,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        native=native,
        is_deterministic=is_deterministic,
    )


def decoding(count: int) -> list[Row]:
    """Return rows of one token, with contexts of every length up to five blocks."""
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    return [
        Row(np.array([n], np.int32), (3 * n + 1) % 20, blocks[5 * n : 5 * n + 5], SAMPLING)
        for n in range(count)
    ]


class LayerByLayer(ModelRunner):
    """Runner that never uses the one-call path."""

    def _dense_layers(self) -> None:
        return None


def assert_the_same_bits(runner: ModelRunner, rows: list[Row]) -> None:
    """Compare hidden states and KV cache."""
    weights = runner.weights
    other = LayerByLayer(
        weights.config,
        weights,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        native=native_for(weights.config, weights.dtype),
        is_deterministic=runner._is_deterministic,
    )
    torch.manual_seed(0)
    for actual, reference in zip(runner.cache_tensors(), other.cache_tensors(), strict=True):
        actual.copy_(torch.randn(actual.shape))
        reference.copy_(actual)
    plans = runner._plan(rows), other._plan(rows)
    assert goes_at_once(runner, rows)
    assert not goes_at_once(other, rows)

    with torch.inference_mode():
        at_once = forward(weights, runner._caches, plans[0])
        layer_by_layer = forward(weights, other._caches, plans[1])

    assert torch.equal(at_once, layer_by_layer)
    assert at_once.isfinite().all()
    for actual, reference in zip(runner._caches, other._caches, strict=True):
        assert torch.equal(actual, reference)


def goes_at_once(runner: ModelRunner, rows: list[Row]) -> bool:
    return isinstance(runner._plan(rows).layers, DensePlan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_all_layers_in_one_call_give_the_same_bits_as_one_by_one(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    architecture, fields = MODELS[name]
    runner = make_runner(tmp_path, architecture, dtype, **fields)
    for count in (1, 5, 16):
        assert_the_same_bits(runner, decoding(count))


def test_all_layers_in_one_call_match_with_rounded_weights_and_capped_scores(
    tmp_path: Path,
) -> None:
    runner = make_runner(
        tmp_path, dtype=torch.bfloat16, quantization="int8", soft_cap=2.0, scale=0.7
    )
    assert_the_same_bits(runner, decoding(7))


def test_all_layers_in_one_call_match_with_several_threads(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, hidden_size=256, intermediate_size=1100)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_the_same_bits(runner, decoding(64))
    finally:
        torch.set_num_threads(threads)


def test_all_layers_in_one_call_match_for_prompts_whose_tokens_attend_singly(
    tmp_path: Path,
) -> None:
    runner = make_runner(tmp_path, is_deterministic=True)
    prompts = [
        Row(np.arange(tokens, dtype=np.int32), start, list(range(block, block + 4)), SAMPLING)
        for tokens, start, block in ((3, 0, 320), (7, 6, 324))
    ]
    assert_the_same_bits(runner, [*decoding(3), *prompts])


def test_a_step_with_a_prompt_runs_layer_by_layer(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    prompt = Row(np.array([1, 2, 3], np.int32), 0, [77], SAMPLING)

    assert not goes_at_once(runner, [*decoding(3), prompt])
    assert goes_at_once(runner, decoding(3))


@pytest.mark.parametrize(
    "options",
    [{"name": "qwen3_moe"}, {"quantization": "fp8"}, {"is_packed": False}],
    ids=["experts", "fp8", "plain-matrices"],
)
def test_models_with_other_operations_run_layer_by_layer(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert not goes_at_once(make_runner(tmp_path, **options), decoding(3))


def test_weights_swapped_in_are_those_that_all_layers_compute_with(tmp_path: Path) -> None:
    runner = make_runner(tmp_path / "old")
    new = make_runner(tmp_path / "new", seed=1)
    rows = decoding(6)
    expected = new.step(rows)
    old = runner.step(rows)

    runner.swap(new.weights)
    now = runner.step(rows)

    assert now.logprobs.tolist() == expected.logprobs.tolist() != old.logprobs.tolist()
