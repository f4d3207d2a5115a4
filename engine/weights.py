"""Where does each published tensor go? One version's weights, as the model computes with them.

It knows nothing of versions' numbers, nor of how tensors travel. Query, key and value projections
lie on top of each other in one matrix, so do gate and up; the LM head is float32 whatever the rest
is. Matrices are ``[out, in]`` as published: ``mm`` on the transpose is 2 to 12 % faster for the few
rows of a decode step, but copying into it runs at 0.8 GB/s instead of 11. One object serves update
after update: its pages are touched once, for first touches of fresh pages cost more than copies.

Letters in shapes: V vocabulary, H hidden, I intermediate, Q query heads x head_dim, K the same for
KV heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate.engine.checkpoint import read_tensors
from tidegate.engine.model_config import ModelConfig
from tidegate.errors import ModelError, WeightsRefused

LOADABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Others (float8, int8, …) mean nothing without their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. None where the architecture has no such tensor."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: torch.Tensor
    """[Q + 2K, H]"""
    qkv_bias: torch.Tensor | None
    """[Q + 2K]"""
    qk_norm: torch.Tensor | None
    """[query heads + KV heads, head_dim]: the norm's weight, repeated for each head."""
    output: torch.Tensor
    """[H, Q]"""
    output_bias: torch.Tensor | None
    """[H]"""
    mlp_norm: torch.Tensor
    """[H]"""
    gate_up: torch.Tensor
    """[2I, H]"""
    gate_up_bias: torch.Tensor | None
    """[2I]"""
    down: torch.Tensor
    """[H, I]"""
    down_bias: torch.Tensor | None
    """[H]"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes: its shape on disk, and the views to copy it into."""

    shape: tuple[int, ...]
    targets: tuple[torch.Tensor, ...]


class Weights:
    """All tensors of one version. Fill it with :meth:`load`, on any one thread at a time.

    A thread may load into one object while another computes with a different one: copies run
    outside the interpreter's lock.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[LayerWeights],
        final_norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.config = config
        self.embedding = embedding
        """[V, H]"""
        self.layers = layers
        self.final_norm = final_norm
        """[H]"""
        self.head = head
        """[V, H], float32; the embedding itself where that is tied and float32."""
        self._places = dict(_places(self))
        self._loaded: set[str] = set()

    @classmethod
    def allocate(cls, config: ModelConfig, dtype: torch.dtype) -> "Weights":
        """Make room for one version, to be filled; the head is float32 whatever ``dtype`` is."""
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = torch.empty(vocabulary, dtype=dtype)
        shares = config.tied_head and dtype == torch.float32
        return cls(
            config,
            embedding,
            [_allocate_layer(config, dtype) for _ in range(config.num_layers)],
            torch.empty(config.hidden_size, dtype=dtype),
            embedding if shares else torch.empty(vocabulary, dtype=torch.float32),
        )

    @property
    def dtype(self) -> torch.dtype:
        """What everything but the head is stored and computed in."""
        return self.embedding.dtype

    def start(self) -> None:
        """Begin a new version in the same memory: nothing counts as loaded any more."""
        self._loaded.clear()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor that Hugging Face calls ``name`` into its place, casting it.

        A tied model's ``lm_head.weight`` is ignored: it is the embedding.

        Raises:
            WeightsRefused: the model has no such tensor, or it has another shape or kind.
        """
        place = self._places.get(name)
        if place is None:
            if _is_redundant(name, self.config):
                return
            raise WeightsRefused(
                f"{self.config.architecture} of {self.config.num_layers} layers has no tensor "
                f"{name!r}; publish the model that config.json describes, by its names there"
            )
        if tuple(tensor.shape) != place.shape:
            raise WeightsRefused(
                f"{name} has shape {list(tensor.shape)}, expected {list(place.shape)}"
            )
        if tensor.dtype not in LOADABLE_DTYPES:
            raise WeightsRefused(
                f"{name} is {tensor.dtype}; publish float32, bfloat16, float16 or float64"
            )
        with torch.no_grad():
            for target in place.targets:
                target.copy_(tensor)
        self._loaded.add(name)

    def missing(self) -> list[str]:
        """The names not loaded since :meth:`start`, in the model's order."""
        return [name for name in self._places if name not in self._loaded]


def load_directory(path: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Load the weights of a Hugging Face directory.

    Raises:
        ModelError: files are missing or damaged, or don't fit ``config``.
    """
    weights = Weights.allocate(config, dtype)
    for name, tensor in read_tensors(path):
        try:
            weights.load(name, tensor)
        except WeightsRefused as error:
            raise ModelError(f"{path} does not fit its own config.json: {error}") from error
    missing = weights.missing()
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the tensors that config.json asks for, "
            f"first {missing[0]}"
        )
    return weights


def _allocate_layer(config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
    def room(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def room_if(present: bool, *shape: int) -> torch.Tensor | None:
        return room(*shape) if present else None

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = (heads + 2 * kv_heads) * head_dim
    return LayerWeights(
        input_norm=room(hidden),
        qkv=room(qkv, hidden),
        qkv_bias=room_if(config.qkv_bias, qkv),
        qk_norm=room_if(config.qk_norm, heads + kv_heads, head_dim),
        output=room(hidden, heads * head_dim),
        output_bias=room_if(config.output_bias, hidden),
        mlp_norm=room(hidden),
        gate_up=room(2 * inner, hidden),
        gate_up_bias=room_if(config.mlp_bias, 2 * inner),
        down=room(hidden, inner),
        down_bias=room_if(config.mlp_bias, hidden),
    )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor says nothing new; old Llama directories hold the rotary frequencies."""
    tied = config.tied_head and name == "lm_head.weight"
    return tied or name.endswith(".rotary_emb.inv_freq")


def _places(weights: Weights) -> Iterator[tuple[str, _Place]]:
    config = weights.config
    embedding = [weights.embedding]
    if config.tied_head and weights.head is not weights.embedding:
        embedding.append(weights.head)
    vocabulary = tuple(weights.embedding.shape)
    yield "model.embed_tokens.weight", _Place(vocabulary, tuple(embedding))
    for number, layer in enumerate(weights.layers):
        for name, target in _layer_targets(layer, config):
            shape = tuple(target.shape)
            yield f"model.layers.{number}.{name}", _Place(shape, (target,))
        if layer.qk_norm is not None:
            parts = layer.qk_norm.split_with_sizes([config.num_heads, config.num_kv_heads])
            for letter, part in zip("qk", parts, strict=True):
                name = f"model.layers.{number}.self_attn.{letter}_norm.weight"
                yield name, _Place((config.head_dim,), (part,))
    yield "model.norm.weight", _Place((config.hidden_size,), (weights.final_norm,))
    if not config.tied_head:
        yield "lm_head.weight", _Place(vocabulary, (weights.head,))


def _layer_targets(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a layer as a view of Hugging Face's shape into our layout."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), (query, kv, kv), layer.qkv, layer.qkv_bias),
        ("self_attn", ("o_proj",), (config.hidden_size,), layer.output, layer.output_bias),
        ("mlp", ("gate_proj", "up_proj"), (inner, inner), layer.gate_up, layer.gate_up_bias),
        ("mlp", ("down_proj",), (config.hidden_size,), layer.down, layer.down_bias),
    )
    yield "input_layernorm.weight", layer.input_norm
    for block, names, widths, matrix, bias in fused:
        for name, part in zip(names, matrix.split_with_sizes(widths), strict=True):
            yield f"{block}.{name}.weight", part
        if bias is not None:
            for name, part in zip(names, bias.split_with_sizes(widths), strict=True):
                yield f"{block}.{name}.bias", part
    yield "post_attention_layernorm.weight", layer.mlp_norm
