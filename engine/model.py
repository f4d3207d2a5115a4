"""What does the model compute for a step? A decoder forward pass, from tokens to hidden states.

It knows nothing of turns or sampling: a plan says which tokens are where, and weights are an
argument, so that they can be others in the next step.

Letters in shapes: T tokens of a step, S rows to sample, H hidden, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from tidegate.engine.layer_weights import LayerWeights
from tidegate.engine.model_config import ModelConfig
from tidegate.engine.weights import Weights
from tidegate.kernels.attention import RowGroup, attend, write_kv
from tidegate.kernels.norm import rms_norm, rms_norm_plus_one
from tidegate.kernels.rope import apply_rope

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step's tokens are, and what they see, in layers of one kind."""

    cosines: torch.Tensor
    """[T, 1, D]"""
    sines: torch.Tensor
    """[T, 1, D]"""
    groups: Sequence[RowGroup]
    """In the order of their tokens, which together are all T."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The index tensors of one step: computed once, used in every layer."""

    token_ids: torch.Tensor
    """[T]"""
    attention: Sequence[AttentionPlan]
    """Each layer's; layers of a kind share one."""
    write_index: torch.Tensor
    scratch: torch.Tensor
    """Memory for :func:`~tidegate.kernels.attention.attend`."""
    sampled: torch.Tensor
    """[S] the tokens whose successors are sampled."""


def forward(weights: Weights, caches: Sequence[torch.Tensor], plan: StepPlan) -> torch.Tensor:
    """Run a step; return the normed hidden states [S, H] of the tokens to sample after.

    ``caches`` holds one KV cache per layer; the step's own keys and values are written there.
    """
    config = weights.config
    hidden = F.embedding(plan.token_ids, weights.embedding)
    if config.embedding_scale != 1.0:  # rounded first, as transformers does
        hidden *= torch.tensor(config.embedding_scale, dtype=hidden.dtype)
    activate = ACTIVATIONS[config.activation]
    for layer, cache, attention in zip(weights.layers, caches, plan.attention, strict=True):
        attended = _attention(layer, config, hidden, cache, plan, attention)
        _add(hidden, attended, layer.output, layer.output_bias, layer.attention_post_norm, config)
        normed = _norm(hidden, layer.mlp_norm, config)
        if layer.router is not None:
            hidden += _experts(layer, layer.router, config, normed, activate)
            continue
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        inner = activate(gate).mul_(up)
        _add(hidden, inner, layer.down, layer.down_bias, layer.mlp_post_norm, config)
    return _norm(hidden.index_select(0, plan.sampled), weights.final_norm, config)


def head_logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """The logits [S, V], in float32, of normed hidden states [S, H]."""
    logits = hidden.float() @ weights.head.t()
    cap = weights.config.logits_soft_cap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _attention(
    layer: LayerWeights,
    config: ModelConfig,
    hidden: torch.Tensor,
    cache: torch.Tensor,
    plan: StepPlan,
    attention: AttentionPlan,
) -> torch.Tensor:
    """Write a layer's keys and values, and attend: [T, query heads * D]."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    normed = _norm(hidden, layer.input_norm, config)
    qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(
        -1, heads + 2 * kv_heads, config.head_dim
    )
    turned = qkv[:, : heads + kv_heads]
    if layer.qk_norm is not None:
        turned = _norm(turned, layer.qk_norm, config)
    turned = apply_rope(turned, attention.cosines, attention.sines)
    keys_values = torch.cat([turned[:, heads:], qkv[:, heads + kv_heads :]], dim=1)
    write_kv(cache, plan.write_index, keys_values)
    query = turned[:, :heads]
    scale, cap = config.attention_scale, config.attention_soft_cap
    outputs = [
        attend(
            query[g.first_token : g.end_token], cache, g, plan.scratch, scale=scale, soft_cap=cap
        )
        for g in attention.groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _experts(
    layer: LayerWeights,
    router: torch.Tensor,
    config: ModelConfig,
    normed: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Send each token through the experts that the router scores highest: [T, H].

    The tokens of an expert are computed together; those that nobody chose are not looked at.
    """
    assert config.experts is not None  # whoever has a router
    per_token = config.experts.per_token
    shares, chosen = F.linear(normed, router).softmax(-1, dtype=torch.float32).topk(per_token)
    if config.experts.normalises:
        shares /= shares.sum(-1, keepdim=True)
    experts, order = chosen.flatten().sort(stable=True)
    tokens = order // per_token
    counts = experts.bincount(minlength=config.experts.count).tolist()
    mixed = torch.empty(tokens.numel(), normed.shape[1], dtype=normed.dtype)
    parts = zip(
        normed[tokens].split_with_sizes(counts), mixed.split_with_sizes(counts), strict=True
    )
    for expert, (part, out) in enumerate(parts):
        if part.shape[0]:
            gate, up = F.linear(part, layer.gate_up[expert]).chunk(2, dim=-1)
            torch.mm(activate(gate).mul_(up), layer.down[expert].t(), out=out)
    mixed *= shares.flatten()[order, None].to(mixed.dtype)
    return torch.zeros_like(normed).index_add_(0, tokens, mixed)


def _norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    norm = rms_norm_plus_one if config.norm_adds_one else rms_norm
    return norm(x, weight, config.norm_epsilon)


def _add(
    total: torch.Tensor,
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    post_norm: torch.Tensor | None,
    config: ModelConfig,
) -> None:
    """Add a block's last projection to the residual stream, in place."""
    if post_norm is not None:
        total += _norm(F.linear(x, matrix, bias), post_norm, config)
        return
    total.addmm_(x, matrix.t())  # one call and one buffer fewer
    if bias is not None:
        total.add_(bias)
