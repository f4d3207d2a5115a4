"""Shards of Hugging Face tensors, from the state dict of a Megatron-core rank.

    ranks = MegatronRanks.current(first_layer=model.decoder.layers[0].layer_number - 1)
    parts = hugging_face_parts(model.state_dict(), hugging_face_config, ranks)
    rollouts.publish(parts, sharded=True)  # on every rank

The layout is that of Megatron-core 0.16: ``transformer/attention.py`` (rows of ``linear_qkv``),
``transformer/mlp.py`` (gate and up halves), ``transformer/moe/moe_layer.py`` (numbers of experts),
``tensor_parallel/layers.py`` (rows of the vocabulary). ``mbridge/core/bridge.py`` and
``mbridge/models/qwen3moe.py`` of ISEEKYAN/mbridge pair the names in the same way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.weight_sync.state_dict import LocalShard

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Hugging Face model types whose tensors the names below are of."""

VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Names of the tensors with a row per token."""

REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Names of a layer's tensors that every tensor-parallel rank holds whole."""

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))"
)
"""Names of a ``SequentialMLP``'s and of a ``TEGroupedMLP``'s experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRanks:
    """Place of a process in Megatron-core's groups."""

    tensor_rank: int = 0
    tensor_size: int = 1
    data_rank: int = 0
    """Rank among those with the same dense tensors: of data and context parallelism together."""
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1
    expert_data_rank: int = 0
    """Rank among those with the same parts of the same experts."""
    first_layer: int = 0
    """Number in the model, from 0, of the layer that the state dict numbers 0. Pipeline stages
    number their own layers."""

    @classmethod
    def current(cls, *, first_layer: int) -> "MegatronRanks":
        """Return this process's place, which ``megatron.core.parallel_state`` knows."""
        from megatron.core import parallel_state as state

        return cls(
            tensor_rank=state.get_tensor_model_parallel_rank(),
            tensor_size=state.get_tensor_model_parallel_world_size(),
            data_rank=state.get_data_parallel_rank(with_context_parallel=True),
            expert_rank=state.get_expert_model_parallel_rank(),
            expert_size=state.get_expert_model_parallel_world_size(),
            expert_tensor_rank=state.get_expert_tensor_parallel_rank(),
            expert_tensor_size=state.get_expert_tensor_parallel_world_size(),
            expert_data_rank=state.get_expert_data_parallel_rank(),
            first_layer=first_layer,
        )


def hugging_face_parts(
    state_dict: "Mapping[str, torch.Tensor]", config: Any, ranks: MegatronRanks
) -> dict[str, LocalShard]:
    """Return the parts of Hugging Face tensors that this rank sends, by name.

    If several ranks hold a part, it is in the result of the first. If a rank has several model
    chunks, as in a virtual pipeline, merge their results.

    Args:
        state_dict: of a ``GPTModel`` of local or TransformerEngine layers, or of its wrapper. Its
            norms are stored without ``layernorm_zero_centered_gamma``, which no name shows.
        config: Hugging Face config of the model, of one of :data:`MODEL_TYPES`.
        ranks: place of this process.

    Raises:
        WeightsRefused: a tensor has no known name, or not the rows that ``config`` and ``ranks``
            give it, or is of a subclass, such as TransformerEngine's ``Float8Tensor``.
    """
    import torch

    if config.model_type not in MODEL_TYPES:
        raise WeightsRefused(
            f"names of model type {config.model_type!r} are unknown, only those of "
            f"{', '.join(MODEL_TYPES)} are known; make tidegate.LocalShard values of its tensors"
        )
    parts: dict[str, LocalShard] = {}
    for name, tensor in state_dict.items():
        if name.endswith("_extra_state"):  # TransformerEngine's, of FP8
            continue
        if type(tensor.detach()) is not torch.Tensor:
            raise WeightsRefused(
                f"{name!r} is a {type(tensor).__name__}, whose elements may be rounded or on other "
                "ranks; pass its dequantized local torch.Tensor"
            )
        group, found = _parts(re.sub(r"^(module\.)+", "", name), tensor, config, ranks)
        if group.is_sender:
            parts.update(found)
    if config.tie_word_embeddings and parts.keys() >= set(VOCABULARY.values()):
        raise WeightsRefused(
            "config ties the output layer to the embedding, and the state dict has both; build the "
            "model with share_embeddings_and_output_weights=True, or serve an untied model"
        )
    if config.tie_word_embeddings:
        parts.pop("lm_head.weight", None)  # the last pipeline stage's copy of the embedding
    return parts


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that a tensor is cut among."""

    rank: int
    size: int
    is_sender: bool
    """Whether this process is the first that holds its part."""

    def part(self, tensor: "torch.Tensor", dimension: int = 0) -> LocalShard:
        """Return this rank's of ``size`` equal parts along ``dimension``."""
        shape, start = list(tensor.shape), [0] * tensor.ndim
        start[dimension] = self.rank * shape[dimension]
        shape[dimension] *= self.size
        return LocalShard(tensor, tuple(shape), tuple(start))


def _parts(
    name: str, tensor: "torch.Tensor", config: Any, ranks: MegatronRanks
) -> tuple[_Group, dict[str, LocalShard]]:
    """Return this rank's parts of the tensors that ``tensor`` contains, and its group for them.

    Raises:
        WeightsRefused: as :func:`hugging_face_parts`.
    """
    group = _Group(ranks.tensor_rank, ranks.tensor_size, ranks.data_rank == 0)
    replicated = _Group(0, 1, ranks.tensor_rank == ranks.data_rank == 0)
    layer = LAYER.fullmatch(name)
    if name in VOCABULARY:
        return group, _vocabulary(name, tensor, config, group)
    if name == "decoder.final_layernorm.weight":
        return replicated, {"model.norm.weight": replicated.part(tensor)}
    if layer is None:
        raise _unknown(name)
    prefix, rest = f"model.layers.{_layer_number(layer, config, ranks)}.", layer[2]
    if rest in REPLICATED:
        return replicated, {prefix + REPLICATED[rest]: replicated.part(tensor)}
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        return group, _query_key_value(name, prefix, tensor, config, group)
    if rest == "self_attention.linear_proj.weight":
        return group, {prefix + "self_attn.o_proj.weight": group.part(tensor, dimension=1)}
    matrix = rest.removeprefix("mlp.") if rest.startswith("mlp.") else ""
    prefix += "mlp."
    if hasattr(config, "num_experts") and (expert := EXPERT.fullmatch(rest)) is not None:
        matrix = expert[2] or expert[3]
        first = ranks.expert_rank * (config.num_experts // ranks.expert_size)
        prefix += f"experts.{first + int(expert[1] or expert[4])}."
        is_sender = ranks.expert_data_rank == 0
        group = _Group(ranks.expert_tensor_rank, ranks.expert_tensor_size, is_sender)
    if matrix == "linear_fc2.weight":
        return group, {prefix + "down_proj.weight": group.part(tensor, dimension=1)}
    if matrix not in ("linear_fc1.weight", "linear_fc1.bias"):
        raise _unknown(name)
    kind = matrix.removeprefix("linear_fc1.")
    halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
    return group, {f"{prefix}{half}_proj.{kind}": group.part(own) for half, own in halves}


def _unknown(name: str) -> WeightsRefused:
    return WeightsRefused(
        f"Megatron-core's tensor {name!r} has no known Hugging Face name; leave it out, and add "
        "tidegate.LocalShard values under the names and with the layout of the served model"
    )


def _layer_number(layer: re.Match[str], config: Any, ranks: MegatronRanks) -> int:
    number = ranks.first_layer + int(layer[1])
    if number >= config.num_hidden_layers:
        raise WeightsRefused(
            f"{layer[0]!r} would be layer {number}, from 0, of {config.num_hidden_layers}; pass "
            "first_layer=model.decoder.layers[0].layer_number - 1"
        )
    return number


def _vocabulary(
    name: str, tensor: "torch.Tensor", config: Any, group: _Group
) -> dict[str, LocalShard]:
    """Return this rank's rows of the vocabulary, without those that pad it."""
    part = group.part(tensor)
    if part.shape[0] < config.vocab_size:
        raise WeightsRefused(
            f"{name!r} has {len(tensor)} rows on each of {group.size} ranks, and config a "
            f"vocabulary of {config.vocab_size}; pass the config and ranks of this model"
        )
    own = tensor[: max(0, config.vocab_size - part.start[0])]
    shape = (config.vocab_size, *part.shape[1:])
    return {VOCABULARY[name]: LocalShard(own, shape, part.start)} if len(own) else {}


def _query_key_value(
    name: str, prefix: str, tensor: "torch.Tensor", config: Any, group: _Group
) -> dict[str, LocalShard]:
    """Return this rank's parts of the three projections.

    The whole tensor has, for each key-value head, the rows of its query heads, its key and its
    value. Ranks hold equal runs of rows, which may begin and end within a head's.
    """
    import torch

    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    head_rows = getattr(config, "head_dim", None) or config.hidden_size // heads
    query_rows = heads // key_heads * head_rows
    first, whole = group.part(tensor).start[0], group.part(tensor).shape[0]
    if whole != key_heads * (query_rows + 2 * head_rows):
        raise WeightsRefused(
            f"{name!r} has {len(tensor)} rows on each of {group.size} ranks, and config {heads} "
            f"heads, {key_heads} key-value heads and {head_rows} rows a head; pass the config and "
            "ranks of this model, whose attention must have no output gate"
        )
    # For each row: the key-value head, and the row among that head's.
    row = torch.arange(first, first + len(tensor))
    head, at = row // (query_rows + 2 * head_rows), row % (query_rows + 2 * head_rows)
    kind, parts = name.rpartition(".")[2], {}
    projections = {"q": query_rows, "k": head_rows, "v": head_rows}
    for projection, rows in projections.items():
        own = ((at >= 0) & (at < rows)).nonzero()[:, 0]
        if len(own):
            start = int(head[own[0]] * rows + at[own[0]]), *(0,) * (tensor.ndim - 1)
            shape = key_heads * rows, *tensor.shape[1:]
            part = LocalShard(tensor[own.to(tensor.device)], shape, start)
            parts[f"{prefix}self_attn.{projection}_proj.{kind}"] = part
        at = at - rows
    return parts
