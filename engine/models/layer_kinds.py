"""Which layers of a model attend alike, and which models' layers are one call of compiled code?

Knows no steps: what is made here is good for all steps of a version, or of all.
"""

from collections.abc import Sequence

import torch

from tidegate.engine.models.layer_weights import LayerWeights
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.models.rope_tables import make_rope_table
from tidegate.kernels.layers import DenseLayer, Layers, Projection, Traits


class LayerKinds:
    """The kinds of attention that a model's layers have; a step is planned once for each."""

    def __init__(self, config: ModelConfig, positions: int, dtype: torch.dtype) -> None:
        kinds = list(dict.fromkeys(layer.attention for layer in config.layers))
        self.windows = [kind.window_tokens for kind in kinds]
        """Of each kind."""
        self.rotations = [
            make_rope_table(kind.rope, head_dim=config.head_dim, positions=positions, dtype=dtype)
            for kind in kinds
        ]
        """Of each kind, [P, 2, D] for all positions there are."""
        self.of_layers = [kinds.index(layer.attention) for layer in config.layers]
        """Each layer's."""


def dense_layers(
    weights: Weights, caches: Sequence[torch.Tensor], kinds: LayerKinds
) -> Layers | None:
    """All layers as one call, for a model that compiled code is there for.

    None where a layer has what is computed between those functions: experts, norms of what blocks
    give, other ranks' sums, or products that are torch's.
    """
    if weights.group is not None or not all(map(_is_dense, weights.layers)):
        return None
    config = weights.config
    traits = Traits(
        num_heads=config.num_heads,
        norm_epsilon=config.norm_epsilon,
        attention_scale=config.attention_scale or config.head_dim**-0.5,
        attention_soft_cap=config.attention_soft_cap,
    )
    layers = [
        _dense(layer, cache, kinds.rotations[kind], kinds.windows[kind])
        for layer, cache, kind in zip(weights.layers, caches, kinds.of_layers, strict=True)
    ]
    return Layers(layers, traits)


def _is_dense(layer: LayerWeights) -> bool:
    matrices = layer.qkv, layer.output, *layer.gate_up, *layer.down
    return (
        layer.router is None
        and layer.attention_post_norm is None
        and layer.mlp_post_norm is None
        and all(matrix.panels is not None for matrix in matrices)
    )


def _dense(
    layer: LayerWeights, cache: torch.Tensor, rotations: torch.Tensor, window_tokens: int | None
) -> DenseLayer:
    return DenseLayer(
        input_norm=layer.input_norm,
        qkv=Projection(layer.qkv, layer.qkv_bias),
        qk_norm=layer.qk_norm,
        rotations=rotations,
        cache=cache,
        window_tokens=window_tokens,
        output=Projection(layer.output, layer.output_bias),
        mlp_norm=layer.mlp_norm,
        gate_up=Projection(layer.gate_up[0], layer.gate_up_bias),
        down=Projection(layer.down[0], layer.down_bias),
    )
