"""Groups a model's layers by attention kind, and packs dense layers into one compiled call.

The groups hold for all weight versions, a compiled call for one version.
"""

from collections.abc import Sequence

import torch

from tidegate.engine.models.layer_weights import LayerWeights
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.models.rope_tables import make_rope_table
from tidegate.kernels.exact_matrix import ExactMatrix
from tidegate.kernels.layers import (
    LayerAddresses,
    Layers,
    LayerSizes,
    ModelEnds,
    at_or_0,
    product,
)
from tidegate.kernels.native import ACTIVATIONS
from tidegate.kernels.weight_matrix import PackedMatrix


class LayerKinds:
    """Distinct kinds of attention in a model; a step is planned once per kind."""

    def __init__(self, config: ModelConfig, positions: int, dtype: torch.dtype) -> None:
        kinds = list(dict.fromkeys(layer.attention for layer in config.layers))
        self.windows = [kind.window_tokens for kind in kinds]
        """Sliding window of each kind, in tokens; None for full attention."""
        self.rotations = [
            make_rope_table(kind.rope, head_dim=config.head_dim, positions=positions, dtype=dtype)
            for kind in kinds
        ]
        """Rotary table of each kind, [positions, 2, head_dim]."""
        self.of_layers = [kinds.index(layer.attention) for layer in config.layers]
        """Index of each layer's kind."""


def dense_layers(
    weights: Weights, caches: Sequence[torch.Tensor], kinds: LayerKinds
) -> Layers | None:
    """Return all layers as one compiled call; None if compiled code cannot run the whole model.

    It cannot run experts, tensor-parallel ranks, or matrices whose products torch computes.
    """
    if weights.group is not None or not all(map(_is_dense, weights.layers)):
        return None
    config = weights.config
    sizes = LayerSizes(
        layers=len(weights.layers),
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=caches[0].shape[3],
        inner=config.intermediate_size,
        activation=ACTIVATIONS.index(config.activation),
        norm_adds_one=config.norm_adds_one,
        epsilon=config.norm_epsilon,
        scale=config.attention_scale or config.head_dim**-0.5,
        soft_cap=config.attention_soft_cap or 0.0,
    )
    layers = [
        _addresses(layer, cache, kinds.rotations[kind], kinds.windows[kind])
        for layer, cache, kind in zip(weights.layers, caches, kinds.of_layers, strict=True)
    ]
    tensors = weights, caches, kinds
    return Layers(layers, sizes, _ends(weights), dtype=weights.dtype, tensors=tensors)


def _ends(weights: Weights) -> ModelEnds | None:
    """Return the rest of the model for whole steps of decodes; None if compiled code cannot run
    it: with a head that it does not multiply, or a soft cap of the logits."""
    config, head = weights.config, weights.head
    is_compiled = isinstance(head, PackedMatrix) and head.dtype == torch.float32
    is_exact = isinstance(head, ExactMatrix) == (weights.dtype == torch.bfloat16)
    if not is_compiled or not is_exact or config.labels or config.logits_soft_cap is not None:
        return None
    return ModelEnds(
        embedding=weights.embedding.storage.data_ptr(),
        final_norm=weights.final_norm.data_ptr(),
        head=head.storage.data_ptr(),
        embedding_is_packed=isinstance(weights.embedding, PackedMatrix),
        vocab=head.shape[0],
        embedding_scale=float(torch.tensor(config.embedding_scale, dtype=weights.dtype)),
    )


def _is_dense(layer: LayerWeights) -> bool:
    matrices = layer.qkv, layer.output, *layer.gate_up, *layer.down
    return layer.router is None and all(matrix.panels is not None for matrix in matrices)


def _addresses(
    layer: LayerWeights, cache: torch.Tensor, rotations: torch.Tensor, window_tokens: int | None
) -> LayerAddresses:
    return LayerAddresses(
        input_norm=layer.input_norm.data_ptr(),
        qk_norm=at_or_0(layer.qk_norm),
        attention_post_norm=at_or_0(layer.attention_post_norm),
        mlp_norm=layer.mlp_norm.data_ptr(),
        mlp_post_norm=at_or_0(layer.mlp_post_norm),
        rotations=rotations.data_ptr(),
        cache=cache.data_ptr(),
        qkv=product(layer.qkv, layer.qkv_bias),
        output=product(layer.output, layer.output_bias),
        gate_up=product(layer.gate_up[0], layer.gate_up_bias),
        down=product(layer.down[0], layer.down_bias),
        window=window_tokens or 0,
    )
