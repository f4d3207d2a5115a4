"""State dicts of Megatron-core's ranks, written from a Hugging Face checkpoint.

The order of elements follows what Megatron-core computes with them: ``SelfAttention`` splits the
output of ``linear_qkv`` by query group and then in q, k and v; ``ColumnParallelLinear`` and
``RowParallelLinear`` give each rank a run of rows or columns; ``MLP`` splits each rank's output of
``linear_fc1`` in halves.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tidegate.integrations.megatron import MegatronRanks

State = dict[str, torch.Tensor]

PADDED_VOCABULARY_MULTIPLE = 64
"""Rows per rank that the vocabulary is padded to a multiple of, as Megatron's 128 by default."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of Megatron-core's groups."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def ranks(self, rank: int, layers: int) -> MegatronRanks:
        """Return a process's place: ranks count tensor, then data, then pipeline groups up."""
        stage, within = divmod(rank, self.tensor * self.data)
        dense, experts = divmod(within, self.tensor), within // self.expert_tensor
        return MegatronRanks(
            tensor_rank=dense[1],
            tensor_size=self.tensor,
            data_rank=dense[0],
            expert_rank=experts % self.expert,
            expert_size=self.expert,
            expert_tensor_rank=within % self.expert_tensor,
            expert_tensor_size=self.expert_tensor,
            expert_data_rank=experts // self.expert,
            first_layer=stage * (layers // self.pipeline),
        )


def rows(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a column-parallel layer's weight, whose rows are outputs."""
    count = whole.shape[0] // size
    assert count * size == whole.shape[0]
    return whole[rank * count : (rank + 1) * count].clone()


def columns(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a row-parallel layer's weight, whose columns are inputs."""
    return rows(whole.t().contiguous(), rank, size).t().contiguous()


def qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Return q1 q2 k1 v1 | q3 q4 k2 v2 | …, as ``SelfAttention`` splits it."""
    split = [each.tensor_split(groups) for each in (q, k, v)]
    return torch.cat([piece for group in zip(*split, strict=True) for piece in group])


def padded(whole: torch.Tensor, size: int) -> torch.Tensor:
    """Return the vocabulary's tensor with rows of no token at its end."""
    multiple = PADDED_VOCABULARY_MULTIPLE * size
    missing = -len(whole) % multiple
    return torch.cat([whole, torch.full((missing, whole.shape[1]), 7.0, dtype=whole.dtype)])


def megatron_state(
    whole: State, config: Any, sizes: Sizes, rank: int, *, engine: bool = True
) -> State:
    """Return a rank's state dict; of TransformerEngine's layers if ``engine``, or of local ones."""
    place = sizes.ranks(rank, config.num_hidden_layers)
    at, size = place.tensor_rank, place.tensor_size
    per_stage = config.num_hidden_layers // sizes.pipeline
    stage = place.first_layer // per_stage
    state: State = {}
    if stage == 0:
        words = padded(whole["model.embed_tokens.weight"], size)
        state["embedding.word_embeddings.weight"] = rows(words, at, size)
    for local in range(per_stage):
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{place.first_layer + local}."
        layer = {
            name.removeprefix(theirs): tensor
            for name, tensor in whole.items()
            if name.startswith(theirs)
        }
        for name, tensor in _layer(layer, config, place, engine=engine).items():
            state[ours + name] = tensor
    if stage == sizes.pipeline - 1:
        state["decoder.final_layernorm.weight"] = whole["model.norm.weight"].clone()
        if not config.tie_word_embeddings or stage > 0:
            head = whole.get("lm_head.weight", whole["model.embed_tokens.weight"])
            state["output_layer.weight"] = rows(padded(head, size), at, size)
    return state


def _layer(layer: State, config: Any, place: MegatronRanks, *, engine: bool) -> State:
    at, size = place.tensor_rank, place.tensor_size
    is_mixture = "mlp.gate.weight" in layer
    attention, first = "self_attention.", "self_attn."
    before = "self_attention.linear_qkv.layer_norm_weight" if engine else "input_layernorm.weight"
    fused = engine and not is_mixture
    between = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    state = {
        before: layer["input_layernorm.weight"],
        between: layer["post_attention_layernorm.weight"],
        attention + "linear_proj.weight": columns(layer[first + "o_proj.weight"], at, size),
    }
    for kind in ("weight", "bias"):
        if f"{first}q_proj.{kind}" in layer:
            q, k, v = (layer[f"{first}{letter}_proj.{kind}"] for letter in "qkv")
            joined = qkv(q, k, v, groups=config.num_key_value_heads)
            state[f"{attention}linear_qkv.{kind}"] = rows(joined, at, size)
    for letter in "qk":
        if f"{first}{letter}_norm.weight" in layer:
            state[f"{attention}{letter}_layernorm.weight"] = layer[f"{first}{letter}_norm.weight"]
    if engine:
        state[attention + "linear_qkv._extra_state"] = torch.empty(0, dtype=torch.uint8)
    if not is_mixture:
        return state | {f"mlp.{n}": t for n, t in _mlp(layer, "mlp.", at, size).items()}
    state["mlp.router.weight"] = layer["mlp.gate.weight"]
    local_experts = config.num_experts // place.expert_size
    for local in range(local_experts):
        theirs = f"mlp.experts.{place.expert_rank * local_experts + local}."
        at, size = place.expert_tensor_rank, place.expert_tensor_size
        for name, tensor in _mlp(layer, theirs, at, size).items():
            grouped, sequential = f"{name}{local}", f"local_experts.{local}.{name}"
            state["mlp.experts." + (grouped if engine else sequential)] = tensor
    return state


def _mlp(layer: State, prefix: str, at: int, size: int) -> State:
    halves = [rows(layer[f"{prefix}{half}_proj.weight"], at, size) for half in ("gate", "up")]
    return {
        "linear_fc1.weight": torch.cat(halves),
        "linear_fc2.weight": columns(layer[prefix + "down_proj.weight"], at, size),
    }
