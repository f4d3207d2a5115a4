"""What does the model compute for a step? A decoder forward pass, from tokens to hidden states.

It knows nothing of turns or sampling: a plan says which tokens are where, and weights are an
argument, so that they can be others in the next step.

Letters in shapes: T tokens of a step, S rows to sample, H hidden, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidegate.engine.model_config import ModelConfig
from tidegate.engine.weights import LayerWeights, Weights
from tidegate.kernels.attention import RowGroup, attend, write_kv
from tidegate.kernels.norm import rms_norm
from tidegate.kernels.rope import apply_rope


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The index tensors of one step: computed once, used in every layer."""

    token_ids: torch.Tensor
    """[T]"""
    cosines: torch.Tensor
    """[T, 1, D]"""
    sines: torch.Tensor
    """[T, 1, D]"""
    write_index: torch.Tensor
    groups: Sequence[RowGroup]
    """In the order of their tokens, which together are all T."""
    scratch: torch.Tensor
    """Memory for :func:`~tidegate.kernels.attention.attend`."""
    sampled: torch.Tensor
    """[S] the tokens whose successors are sampled."""


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of a head's coordinates. [D/2], float32

    ``linear`` divides all by the factor; ``llama3`` only those whose waves are too long for the
    original context to show them, with a smooth passage in between.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    waves_in_context = scaling.original_context_tokens * frequencies / (2 * torch.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = ((waves_in_context - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)


def forward(weights: Weights, caches: Sequence[torch.Tensor], plan: StepPlan) -> torch.Tensor:
    """Run a step; return the normed hidden states [S, H] of the tokens to sample after.

    ``caches`` holds one KV cache per layer; the step's own keys and values are written there.
    """
    epsilon = weights.config.norm_epsilon
    hidden = F.embedding(plan.token_ids, weights.embedding)
    for layer, cache in zip(weights.layers, caches, strict=True):
        attended = _attention(layer, weights.config, hidden, cache, plan)
        _add_linear(hidden, attended, layer.output, layer.output_bias)
        normed = rms_norm(hidden, layer.mlp_norm, epsilon)
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        _add_linear(hidden, F.silu(gate).mul_(up), layer.down, layer.down_bias)
    return rms_norm(hidden.index_select(0, plan.sampled), weights.final_norm, epsilon)


def _attention(
    layer: LayerWeights,
    config: ModelConfig,
    hidden: torch.Tensor,
    cache: torch.Tensor,
    plan: StepPlan,
) -> torch.Tensor:
    """Write a layer's keys and values, and attend: [T, query heads * D]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    normed = rms_norm(hidden, layer.input_norm, config.norm_epsilon)
    qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(
        -1, heads + 2 * kv_heads, config.head_dim
    )
    turned = qkv[:, : heads + kv_heads]
    if layer.qk_norm is not None:
        turned = rms_norm(turned, layer.qk_norm, config.norm_epsilon)
    turned = apply_rope(turned, plan.cosines, plan.sines)
    keys_values = torch.cat([turned[:, heads:], qkv[:, heads + kv_heads :]], dim=1)
    write_kv(cache, plan.write_index, keys_values)
    query = turned[:, :heads]
    outputs = [
        attend(query[g.first_token : g.end_token], cache, g, plan.scratch) for g in plan.groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _add_linear(
    total: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Add a projection to the residual stream in place: one call and one buffer fewer."""
    total.addmm_(x, matrix.t())
    if bias is not None:
        total.add_(bias)
