"""LoRA adapters: low-rank products added to a layer's projections, for some of a step's tokens.

Query, key and value are one matrix in the model, and so are gate and up. So their adapters are
fused too: the A matrices stacked, the B matrices side by side, each in the rows of its projection.

Hu et al. 2021, arXiv:2106.09685.

Letters in shapes: r rank of one adapter, R summed ranks of a fused projection, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from tidegate.errors import WeightsRefused
from tidegate.kernels.weight_matrix import Matrix, make_matrix

if TYPE_CHECKING:  # which imports this file
    from tidegate.engine.weights import weight_store

LayerMatrix = Literal["qkv", "output", "gate_up", "down"]
"""Matrices of a layer that an adapter can change."""

PROJECTIONS: dict[LayerMatrix, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Hugging Face's names of the projections in each matrix, in the order of their rows."""

RANK_MAX = 512
"""Largest rank. Above it an adapter costs about as much as a full set of weights."""

OwnCopyTargets = Mapping[str, "weight_store.CopyTarget"]
"""Copy targets of the model's own tensors, by Hugging Face's names."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank factors of one matrix, in the same layout as the model's matrices, so that a row's
    output depends on the batch no more than without an adapter."""

    lora_a: Matrix
    """[R, in], the A matrices."""
    lora_b: Matrix
    """[out, R], the B matrices times the adapter's scale."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Layout of a model's matrices."""

    dtype: torch.dtype
    is_packed: bool


Adapter = Sequence[Mapping[LayerMatrix, LowRank]]
"""Factors of each changed matrix, per layer."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """An adapter, and the step's tokens that it applies to."""

    adapter: Adapter
    tokens: torch.Tensor | None
    """Indices of the tokens; None for all."""


def add_low_rank(
    adapters: Sequence[AdapterTokens],
    layer: int,
    matrix: LayerMatrix,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Add the adapters' products of ``x`` [T, in] to ``y`` [T, out] in place."""
    for group in adapters:
        low_rank = group.adapter[layer].get(matrix)
        if low_rank is None:
            continue
        inputs = x if group.tokens is None else x.index_select(0, group.tokens)
        added = low_rank.lora_b.linear(low_rank.lora_a.linear(inputs))
        if group.tokens is None:
            y.add_(added)  # not fused with the product, which would change the bits
        else:
            y.index_add_(0, group.tokens, added)


def make_adapter(
    tensors: Mapping[str, torch.Tensor],
    scale: float,
    targets: OwnCopyTargets,
    *,
    num_layers: int,
    layout: MatrixLayout,
) -> Adapter:
    """Lay out an adapter's tensors for a model's matrices.

    Args:
        tensors: ``model.layers.N.PROJECTION.lora_A.weight`` [r, in], ``….lora_B.weight`` [out, r].
        scale: factor of their product.
        targets: copy targets of the model's own tensors; a sharded tensor's adapter is sliced
            alike.
        num_layers: number of the model's layers.
        layout: layout of the model's matrices.

    Raises:
        WeightsRefused: a projection lacks one of the two tensors, or is not of this model.
    """
    pairs = _pairs(tensors, targets)
    layers: list[dict[LayerMatrix, LowRank]] = []
    for layer_number in range(num_layers):
        prefix = f"model.layers.{layer_number}."
        layer: dict[LayerMatrix, LowRank] = {}
        for matrix, names in PROJECTIONS.items():
            found = [(name, pairs.pop(prefix + name, None)) for name in names]
            if any(pair is not None for _, pair in found):
                rows = [_rows(targets[f"{prefix}{name}.weight"]) for name in names]
                layer[matrix] = _fuse([pair for _, pair in found], rows, scale, layout)
        layers.append(layer)
    if pairs:
        raise WeightsRefused(
            f"the adapter has tensors of {min(pairs)}, and engines serve adapters of "
            f"{', '.join(name for names in PROJECTIONS.values() for name in names)}, not of "
            "experts; train those only (target_modules), or merge the adapter and publish the "
            "weights"
        )
    return layers


def check_adapter(tensors: Mapping[str, torch.Tensor], targets: OwnCopyTargets) -> None:
    """Validate an adapter's tensors without making it.

    Raises:
        WeightsRefused: a projection lacks one of the two tensors, or is not of this model.
    """
    _pairs(tensors, targets)


_Pair = tuple[torch.Tensor, torch.Tensor]


def _pairs(tensors: Mapping[str, torch.Tensor], targets: OwnCopyTargets) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for projection in sorted({name.rpartition(".lora_")[0] or name for name in tensors}):
        lora_a = tensors.get(f"{projection}.lora_A.weight")
        lora_b = tensors.get(f"{projection}.lora_B.weight")
        if lora_a is None or lora_b is None:
            raise WeightsRefused(
                f"the adapter has one of {projection!r}'s lora_A.weight and lora_B.weight without "
                "the other; publish both"
            )
        matrix = targets.get(f"{projection}.weight")
        shape = () if matrix is None else matrix.shape
        if matrix is None or len(shape) != 2:
            raise WeightsRefused(
                f"the adapter has tensors of {projection!r}, which is no matrix of this model; was "
                "it trained on another model?"
            )
        rank = lora_a.shape[0]
        if not 0 < rank <= RANK_MAX:
            raise WeightsRefused(
                f"the adapter's {projection} has rank {rank}, and ranks must be in [1, {RANK_MAX}]"
            )
        for name, tensor, expected in (
            ("lora_A", lora_a, (rank, shape[1])),
            ("lora_B", lora_b, (shape[0], rank)),
        ):
            if tuple(tensor.shape) != expected or not tensor.is_floating_point():
                raise WeightsRefused(
                    f"the adapter's {projection}.{name}.weight is {tensor.dtype} of shape "
                    f"{list(tensor.shape)}, and this model needs floating point of shape "
                    f"{list(expected)}; was it trained on another model?"
                )
        pairs[projection] = _cut(lora_a, lora_b, matrix)
    return pairs


def _cut(lora_a: torch.Tensor, lora_b: torch.Tensor, matrix: "weight_store.CopyTarget") -> _Pair:
    """Return the adapter's part for a sharded matrix: of its inputs (A) or of its outputs (B)."""
    if matrix.part is None:
        return lora_a, lora_b
    return (lora_a, matrix.cut(lora_b)) if matrix.part.dim == 0 else (matrix.cut(lora_a), lora_b)


def _rows(matrix: "weight_store.CopyTarget") -> int:
    """Return the number of a projection's outputs on this rank."""
    is_cut = matrix.part is not None and matrix.part.dim == 0
    return matrix.part.count if is_cut and matrix.part is not None else matrix.shape[0]


def _fuse(
    parts: Sequence[_Pair | None], rows: Sequence[int], scale: float, layout: MatrixLayout
) -> LowRank:
    lora_a = torch.cat([pair[0] for pair in parts if pair is not None])
    lora_b = torch.zeros(sum(rows), lora_a.shape[0])
    row = column = 0
    for pair, width in zip(parts, rows, strict=True):
        if pair is not None:
            rank = pair[0].shape[0]
            lora_b[row : row + width, column : column + rank] = pair[1].float() * scale
            column += rank
        row += width
    return LowRank(_matrix(lora_a, layout), _matrix(lora_b, layout))


def _matrix(tensor: torch.Tensor, layout: MatrixLayout) -> Matrix:
    rows, columns = tensor.shape
    matrix = make_matrix(rows, columns, layout.dtype, is_packed=layout.is_packed)
    matrix.rows(0, rows).copy_(tensor)
    return matrix
