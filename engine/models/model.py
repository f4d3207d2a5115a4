"""Forward pass of a decoder-only transformer on the CPU, from token ids to logits.

Weights are an argument, so the next step can use another version. Compiled kernels compute it where
they can be built, and torch elsewhere.

Letters in shapes: T tokens of a step, S tokens of the step whose logits are needed (to sample the
next token, or to score), H hidden size, A query heads, D head_dim, I intermediate size, B blocks of
a context, P positions, V vocabulary, L mixture layers, k experts per token.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from tidegate.engine.models.layer_weights import LayerWeights
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.weights.lora import AdapterTokens, add_low_rank
from tidegate.kernels.attention import RowGroup, attend, write_kv
from tidegate.kernels.layers import Layers
from tidegate.kernels.native import (
    HEAD_DIMS,
    LastTokens,
    Native,
    SlotMapping,
    native,
    swigluoai,
)
from tidegate.kernels.norm import rms_norm, rms_norm_plus_one
from tidegate.kernels.rope import apply_rope
from tidegate.kernels.weight_matrix import Matrix

if TYPE_CHECKING:  # torch.distributed is for engines of several ranks
    from tidegate.engine.models.rank_group import RankGroup

log = logging.getLogger("tidegate")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of a gate, which is then multiplied by ``up``."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Rotations and attention groups of a step, for layers of one kind."""

    rotations: torch.Tensor
    """Cosines and signed sines of the rotary embedding (the axis of 2). [T, 2, D], one row per
    token, for torch; [P, 2, D], the table of all positions, for compiled code."""
    groups: Sequence[RowGroup | LastTokens]
    """Attention groups in the order of their tokens; together they cover all T."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Index tensors of a step that runs layer by layer; shared by all layers."""

    attention: Sequence[AttentionPlan]
    """Attention plan of each layer; layers of one kind share theirs."""
    slot_mapping: SlotMapping
    write_index: torch.Tensor | None
    """KV slots to write; None for compiled code, which uses ``slot_mapping``."""
    scratch: torch.Tensor
    """Reused memory for the scores of :func:`~tidegate.kernels.attention.attend`."""
    native: Native | None
    """Compiled code for this model; None uses torch."""
    adapters: Sequence[AdapterTokens] = ()


class DensePlan(NamedTuple):
    """Arguments of a step that runs all layers in one compiled call."""

    layers: Layers
    """Layers of the live weights, with their KV caches."""
    positions: torch.Tensor
    """[T], context position of each token."""
    tables: torch.Tensor
    """[T, B], blocks of each token's context."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Inputs of a forward pass."""

    token_ids: torch.Tensor
    """Tokens of the step, row after row, [T]."""
    sampled: torch.Tensor | None
    """[S], tokens whose hidden states are returned, to sample after or to score; None
    for all, in order."""
    native: Native | None
    """Compiled code for this model; None uses torch."""
    layers: LayerPlan | DensePlan
    routed_experts: torch.Tensor | None = None
    """[T, L, k], int64, filled by the forward pass with the ids of the experts that each token is
    routed to; None if no row asks."""


def forward(weights: Weights, caches: Sequence[torch.Tensor], plan: StepPlan) -> torch.Tensor:
    """Run a step; return the normed hidden states [S, H] of the plan's output tokens.

    ``caches`` holds one KV cache per layer; the step's keys and values are written there.
    """
    config = weights.config
    hidden = weights.embed(plan.token_ids)
    if config.embedding_scale != 1.0:  # rounded first, as transformers does
        hidden *= torch.tensor(config.embedding_scale, dtype=hidden.dtype)
    if isinstance(plan.layers, DensePlan):
        plan.layers.layers.add_(hidden, plan.layers.positions, plan.layers.tables)
    else:
        _add_layers(hidden, weights, caches, plan.layers, plan.routed_experts)
    if plan.sampled is not None:
        hidden = hidden.index_select(0, plan.sampled)
    return _norm(hidden, weights.final_norm, config, plan.native)


def native_for(config: ModelConfig, dtype: torch.dtype) -> Native | None:
    """Return compiled code for a model if it supports the model and the machine; else None.

    A model with experts or a soft cap of its logits is supported: compiled code runs the rest of
    the model, and torch computes these two parts.
    """
    if config.head_dim not in HEAD_DIMS:
        log.warning(
            "compiled code=none: attention is compiled for heads of %s, this model's have %d; "
            "torch's operators are used, which are slower",
            ", ".join(map(str, HEAD_DIMS)),
            config.head_dim,
        )
        return None
    return native(dtype, config.activation, norm_adds_one=config.norm_adds_one)


def head_logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [S, V], float32, of normed hidden states [S, H]."""
    logits = weights.logits(hidden)
    cap = weights.config.logits_soft_cap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _add_layers(
    hidden: torch.Tensor,
    weights: Weights,
    caches: Sequence[torch.Tensor],
    plan: LayerPlan,
    routed_experts: torch.Tensor | None,
) -> None:
    """Run all layers, adding each block's output to ``hidden`` [T, H] in place."""
    mixtures = iter(()) if routed_experts is None else iter(routed_experts.unbind(1))
    config = weights.config
    group = weights.group
    layers = zip(weights.layers, caches, plan.attention, strict=True)
    for number, (layer, cache, attention) in enumerate(layers):
        attended = _attention(layer, config, hidden, cache, plan, attention, number)
        low_rank = partial(add_low_rank, plan.adapters, number, "output", attended)
        _add(
            hidden,
            attended,
            layer.output,
            layer.output_bias,
            layer.attention_post_norm,
            config,
            low_rank,
            plan.native,
            group,
        )
        normed = _norm(hidden, layer.mlp_norm, config, plan.native)
        if layer.router is not None:
            routed = next(mixtures, None)
            mixed = _experts(layer, layer.router, config, normed, plan.native, routed)
            if group is not None:
                mixed = _summed(mixed, group)
            hidden += mixed
            continue
        gate_up = layer.gate_up[0].linear(normed, layer.gate_up_bias)
        add_low_rank(plan.adapters, number, "gate_up", normed, gate_up)
        inner = _gated(gate_up, config.activation, plan.native)
        low_rank = partial(add_low_rank, plan.adapters, number, "down", inner)
        _add(
            hidden,
            inner,
            layer.down[0],
            layer.down_bias,
            layer.mlp_post_norm,
            config,
            low_rank,
            plan.native,
            group,
        )


def _attention(
    layer: LayerWeights,
    config: ModelConfig,
    hidden: torch.Tensor,
    cache: torch.Tensor,
    plan: LayerPlan,
    attention: AttentionPlan,
    number: int,
) -> torch.Tensor:
    """Write a layer's keys and values, and attend; return [T, A * D]."""
    normed = _norm(hidden, layer.input_norm, config, plan.native)
    qkv = layer.qkv.linear(normed, layer.qkv_bias)
    add_low_rank(plan.adapters, number, "qkv", normed, qkv)
    qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    query = _rotate_and_write(layer, config, qkv, cache, plan, attention)
    outputs = [
        _attend(query[group.first_token : group.end_token], cache, group, layer.sinks, config, plan)
        for group in attention.groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _rotate_and_write(
    layer: LayerWeights,
    config: ModelConfig,
    qkv: torch.Tensor,
    cache: torch.Tensor,
    plan: LayerPlan,
    attention: AttentionPlan,
) -> torch.Tensor:
    """Apply rotary embeddings, write keys and values; return the queries [T, A, D]."""
    if plan.native is not None:
        return plan.native.rotate_and_write(
            qkv, layer.qk_norm, attention.rotations, plan.slot_mapping, cache, config.norm_epsilon
        )
    assert plan.write_index is not None  # set whenever there is no compiled code
    heads, rotated_heads = config.num_heads, config.num_heads + config.num_kv_heads
    rotated = qkv[:, :rotated_heads]
    if layer.qk_norm is not None:
        rotated = _norm(rotated, layer.qk_norm, config, None)
    rotated = apply_rope(rotated, attention.rotations[:, :1], attention.rotations[:, 1:])
    keys_values = torch.cat([rotated[:, heads:], qkv[:, rotated_heads:]], dim=1)
    write_kv(cache, plan.write_index, keys_values)
    return rotated[:, :heads]


def _attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    group: RowGroup | LastTokens,
    sinks: torch.Tensor | None,
    config: ModelConfig,
    plan: LayerPlan,
) -> torch.Tensor:
    scale, cap = config.attention_scale, config.attention_soft_cap
    if isinstance(group, RowGroup):
        return attend(query, cache, group, plan.scratch, scale=scale, soft_cap=cap, sinks=sinks)
    assert plan.native is not None  # set whenever such groups are planned
    return plan.native.attend_last(query, cache, group, scale=scale, soft_cap=cap, sinks=sinks)


def _experts(
    layer: LayerWeights,
    router: Matrix,
    config: ModelConfig,
    normed: torch.Tensor,
    compiled: Native | None,
    routed: torch.Tensor | None,
) -> torch.Tensor:
    """Mixture of experts: run each token through its top-scored experts, and return the sum [T, H].

    Tokens of one expert are computed together. Experts on other ranks are left to those ranks. The
    chosen ids are written to ``routed`` [T, k], unless that is None.
    """
    assert config.experts is not None  # set whenever there is a router
    per_token, local = config.experts.per_token, config.experts.local
    gate_weights, expert_ids = (
        router.linear(normed, layer.router_bias).softmax(-1, dtype=torch.float32).topk(per_token)
    )
    if routed is not None:
        routed.copy_(expert_ids)
    if config.experts.normalises:
        gate_weights /= gate_weights.sum(-1, keepdim=True)
    experts, order = expert_ids.flatten().sort(stable=True)
    counts = experts.bincount(minlength=config.experts.count).tolist()
    first = sum(counts[: local.start])
    counts = counts[local.start : local.stop]
    order = order[first : first + sum(counts)]
    tokens = order // per_token
    outputs = [normed.new_empty((0, normed.shape[1]))]
    gate_up_biases = _each(layer.gate_up_bias, len(counts))
    down_biases = _each(layer.down_bias, len(counts))
    for expert, part in enumerate(normed[tokens].split_with_sizes(counts)):
        if part.shape[0]:
            gate_up = layer.gate_up[expert].linear(part, gate_up_biases[expert])
            inner = _gated(gate_up, config.activation, compiled)
            outputs.append(layer.down[expert].linear(inner, down_biases[expert]))
    mixed = torch.cat(outputs)
    mixed *= gate_weights.flatten()[order, None].to(mixed.dtype)
    return torch.zeros_like(normed).index_add_(0, tokens, mixed)


def _each(biases: torch.Tensor | None, experts: int) -> Sequence[torch.Tensor | None]:
    return [None] * experts if biases is None else biases.unbind()


def _norm(
    x: torch.Tensor, weight: torch.Tensor, config: ModelConfig, compiled: Native | None
) -> torch.Tensor:
    if compiled is not None:
        return compiled.norm(x, weight, config.norm_epsilon)
    norm = rms_norm_plus_one if config.norm_adds_one else rms_norm
    return norm(x, weight, config.norm_epsilon)


def _gated(
    gate_up: torch.Tensor,
    activation: str,
    compiled: Native | None,
) -> torch.Tensor:
    """Return ``activation(gate) * up`` [T, I] of the halves of ``gate_up``."""
    if compiled is not None:
        return compiled.gate(gate_up)
    if activation == "swigluoai":
        return swigluoai(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def _add(
    total: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    post_norm: torch.Tensor | None,
    config: ModelConfig,
    add_adapters: Callable[[torch.Tensor], None],
    compiled: Native | None,
    group: "RankGroup | None",
) -> None:
    """Add a block's last projection, with its LoRA adapters, to the residual stream in place."""
    if group is not None:
        projected = matrix.linear(x)
        add_adapters(projected)
        projected = _summed(projected, group)
        if bias is not None:
            projected += bias
        total += projected if post_norm is None else _norm(projected, post_norm, config, compiled)
        return
    if post_norm is None:
        matrix.add_linear_(total, x, bias)
        add_adapters(total)
        return
    projected = matrix.linear(x, bias)
    add_adapters(projected)
    total += _norm(projected, post_norm, config, compiled)


def _summed(x: torch.Tensor, group: "RankGroup") -> torch.Tensor:
    """Sum ``x`` over the ranks in float32, rounded once."""
    summed = x.float()
    group.all_reduce_(summed)
    return summed.to(x.dtype)
