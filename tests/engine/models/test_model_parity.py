"""Parity of our model code with transformers, for every architecture and batch shape."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tidegate.engine.execution.runner import ModelRunner, RowSampling
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory

pytestmark = pytest.mark.slow

TOLERANCE_NATS = 1e-4
"""In float32; the worst difference seen is a tenth of it."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 3.0}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE_BY_HAND = YARN_ROPE | {
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
HALF_SLIDES = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
LOCAL_AND_GLOBAL_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 8.0},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-untied-bias": ("qwen3", {"tied": False, "attention_bias": True}),
    "qwen3-sharded-bfloat16": ("qwen3", {"dtype": "bfloat16", "shards": 3}),
    "qwen3-window-above": ("qwen3", HALF_SLIDES),
    "qwen3-yarn-rope": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied-one-kv-head": ("qwen2", {"tied": False, "num_key_value_heads": 1}),
    "qwen2-window-above": ("qwen2", HALF_SLIDES | {"seed": 2}),
    "qwen2-window-by-layer-types": (
        "qwen2",
        HALF_SLIDES | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama-untied": ("llama", {"tied": False}),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn-rope-by-hand": ("llama", {"rope_parameters": YARN_ROPE_BY_HAND}),
    "mistral": ("mistral", {}),
    "mistral-untied-window-of-one-block": ("mistral", {"tied": False, "sliding_window": 8}),
    "mistral-window-of-3-one-kv-head": (
        "mistral",
        {"sliding_window": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen3-moe": ("qwen3_moe", {"tied": False}),
    "qwen3-moe-idle-experts": (
        "qwen3_moe",
        {"num_experts": 40, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "qwen3-moe-all-experts": ("qwen3_moe", {"num_experts_per_tok": 6, "norm_topk_prob": False}),
    "qwen3-moe-some-layers-dense": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "gemma2": ("gemma2", {}),
    "gemma2-untied-no-gqa": ("gemma2", {"tied": False, "num_key_value_heads": 4}),
    "gemma2-bias-no-caps": (
        "gemma2",
        {
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gpt-oss": ("gpt_oss", {"tied": False}),
    "gpt-oss-no-window-one-kv-head": (
        "gpt_oss",
        {"layer_types": ["full_attention", "full_attention"], "num_key_value_heads": 1},
    ),
    "gpt-oss-plain-rope": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gpt-oss-no-attention-bias": ("gpt_oss", {"attention_bias": False, "sliding_window": 3}),
    "gemma3-one-kv-head": ("gemma3_text", {"num_key_value_heads": 1, "num_hidden_layers": 7}),
    "gemma3-own-ropes": ("gemma3_text", {"rope_parameters": LOCAL_AND_GLOBAL_ROPES}),
}

PROMPT_TOKENS = (1, 2, 3, 5, 16, 17, 33, 50, 140)
"""Around the block size, and on both sides of the padding levels."""

NEW_TOKENS = 32
"""More than the windows, so that each turn moves past its prompt's start."""

CHUNKS = ((1,), (3, 5, 1, 7), (64,), (2, 40), (13,))


def load_runner(
    path: Path, dtype: torch.dtype = torch.float32, *, is_compiled: bool = True
) -> ModelRunner:
    config = ModelConfig.from_directory(path)
    weights = load_directory(path, config, dtype, is_packed=None if is_compiled else False)
    native = native_for(config, dtype) if is_compiled else None
    return ModelRunner(config, weights, num_blocks=128, block_tokens=8, native=native)


def load_peer(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()


def make_turns(sampling: RowSampling = GREEDY, vocab_size: int = 96) -> list[DrivenTurn]:
    random = np.random.default_rng(1)
    return [
        DrivenTurn(
            random.integers(0, vocab_size, length).tolist(), sampling, CHUNKS[n % len(CHUNKS)]
        )
        for n, length in enumerate(PROMPT_TOKENS)
    ]


def peer_logits(peer: Any, turn: DrivenTurn) -> torch.Tensor:
    """Return the peer's logits [sampled, V] for each sampled token of a turn."""
    with torch.no_grad():
        logits: torch.Tensor = peer(torch.tensor([turn.context])).logits[0].float()
    return logits[len(turn.prompt) - 1 : -1]


def assert_sampled_by(peer: Any, turns: list[DrivenTurn]) -> None:
    """Assert that greedy turns have the peer's tokens and log-probs."""
    for turn in turns:
        logprobs = torch.log_softmax(peer_logits(peer, turn), -1)
        assert turn.sampled == logprobs.argmax(-1).tolist()
        assert turn.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=TOLERANCE_NATS)


@pytest.mark.parametrize("model", MODELS)
def test_greedy_turns_in_mixed_chunked_batches_equal_transformers(
    model: str, tmp_path: Path
) -> None:
    architecture, options = MODELS[model]
    path = make_model_directory(tmp_path, architecture, **options)
    by_torch, by_compiled_code = make_turns(), make_turns()

    drive(load_runner(path, is_compiled=False), by_torch, new_tokens=NEW_TOKENS)
    drive(load_runner(path), by_compiled_code, new_tokens=NEW_TOKENS)

    assert_sampled_by(load_peer(path), by_torch + by_compiled_code)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.6), (12, 0.8), (200, 0.5)])
def test_reported_logprobs_are_those_after_every_sampling_option(
    shared_model: Path, temperature: float, top_k: int, top_p: float
) -> None:
    turns = make_turns(RowSampling(temperature, top_k, top_p, seed=3, index=0))

    drive(load_runner(shared_model), turns, new_tokens=5)

    peer = load_peer(shared_model)
    for turn in turns:
        expected = [
            reference_logprobs(row, temperature, top_k, top_p)[token_id]
            for row, token_id in zip(peer_logits(peer, turn).numpy(), turn.sampled, strict=True)
        ]
        assert turn.logprobs == pytest.approx(expected, abs=TOLERANCE_NATS)


def reference_logprobs(
    logits: np.ndarray[Any, Any], temperature: float, top_k: int, top_p: float
) -> np.ndarray[Any, Any]:
    """Apply temperature, then top-k, then top-p to one row, by their definitions."""
    scaled = logits.astype(np.float64) / temperature
    ranked = np.argsort(-scaled)[: top_k or None]
    weights = np.exp(scaled[ranked] - scaled[ranked[0]])
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    kept = ranked[before < top_p]
    logprobs = np.full_like(scaled, -np.inf)
    logprobs[kept] = scaled[kept] - np.log(np.exp(scaled[kept] - scaled[ranked[0]]).sum())
    logprobs[kept] -= scaled[ranked[0]]
    return logprobs


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Large initial weights make sharp distributions; these leave top-p something to cut.
    path = tmp_path_factory.mktemp("model")
    return make_model_directory(path, "qwen3", initializer_range=0.1)
