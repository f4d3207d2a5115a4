"""What does the model compute for a step, on a device? As models/model.py, by other kernels.

Matrix products are torch's; attention, rotations, the cache's writing and norms are ours. Nothing
in here waits for the device, or asks it anything.

The sum of a layer's outputs is carried apart from its last part: adding that is the next norm's
work, which has to read the sum anyway.

Letters in shapes: T tokens of a step, S of them asked for, H hidden, A query heads, K KV heads, D
head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidegate.engine.device.plan import DevicePlan
from tidegate.engine.models.layer_weights import LayerWeights
from tidegate.engine.models.model import ACTIVATIONS
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.weights.weights import Weights
from tidegate.kernels.paged_attention import AttentionRule, paged_attention_triton
from tidegate.kernels.residual_norm import residual_norm_triton
from tidegate.kernels.rope_write import rope_write_triton


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """What a layer has besides its weights; the same in every step."""

    cache: torch.Tensor
    """[blocks, 2, K, block_tokens, D]"""
    table: torch.Tensor
    """[positions, 2, D]: its rotations."""
    rule: AttentionRule


def device_forward(
    weights: Weights, places: Sequence[LayerPlace], plan: DevicePlan
) -> torch.Tensor:
    """Run a step; return the normed hidden states [S, H] of the tokens asked for."""
    config = weights.config
    total = weights.embedding.take(plan.token_ids)
    if config.embedding_scale != 1.0:  # rounded first, as transformers does
        total *= float(torch.tensor(config.embedding_scale, dtype=total.dtype))
    update: torch.Tensor | None = None
    for layer, place in zip(weights.layers, places, strict=True):
        normed = _norm(total, update, layer.input_norm, config)
        attended = _attention(layer, config, normed, place, plan)
        update = layer.output.linear(attended, layer.output_bias)
        if layer.attention_post_norm is not None:
            update = _norm(update, None, layer.attention_post_norm, config)
        normed = _norm(total, update, layer.mlp_norm, config)
        update = _mlp(layer, config, normed)
        if layer.mlp_post_norm is not None:
            update = _norm(update, None, layer.mlp_post_norm, config)
    total = total.index_select(0, plan.asked)
    if update is not None:
        update = update.index_select(0, plan.asked)
    return _norm(total, update, weights.final_norm, config)


def rule_of(config: ModelConfig, window_tokens: int | None) -> AttentionRule:
    """How a layer with this window attends."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return AttentionRule(scale, window_tokens, config.attention_soft_cap)


def _attention(
    layer: LayerWeights,
    config: ModelConfig,
    normed: torch.Tensor,
    place: LayerPlace,
    plan: DevicePlan,
) -> torch.Tensor:
    """Write a layer's keys and values, and attend: [T, A * D]."""
    qkv = layer.qkv.linear(normed, layer.qkv_bias)
    qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    if layer.qk_norm is not None:
        turned = qkv[:, : config.num_heads + config.num_kv_heads]
        turned.copy_(_norm(turned, None, layer.qk_norm, config))
    query = rope_write_triton(
        qkv, place.cache, table=place.table, positions=plan.positions, slots=plan.slots
    )
    outputs = [
        paged_attention_triton(
            query[group.first_token : group.end_token], place.cache, group.rows, place.rule
        )
        for group in plan.groups
    ]
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return attended.view(-1, config.num_heads * config.head_dim)


def _mlp(layer: LayerWeights, config: ModelConfig, normed: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up[0].linear(normed, layer.gate_up_bias).chunk(2, dim=-1)
    inner = ACTIVATIONS[config.activation](gate).mul_(up)
    return layer.down[0].linear(inner, layer.down_bias)


def _norm(
    total: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    """Add ``update`` to ``total``, in place, and norm the sum."""
    epsilon = config.norm_epsilon
    return residual_norm_triton(total, update, weight, epsilon, gemma=config.norm_adds_one)
