"""LoRA adapters: low-rank products added to a layer's projections, for some of a step's tokens.

Used by ``model.forward``, and by staging to make adapters. Query, key and value are one matrix
here, and so are gate and up. So their adapters are fused too: the A matrices stacked, the B
matrices side by side, each in the rows of its projection.

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

Place = Literal["qkv", "output", "gate_up", "down"]
"""Matrices of a layer that an adapter can change."""

PARTS: dict[Place, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Hugging Face's names of the projections in each matrix, in the order of their rows."""

RANK_MAX = 512
"""Largest rank. Above it an adapter costs about as much as a full set of weights."""

OwnCopyTargets = Mapping[str, "weight_store.CopyTarget"]
"""Places of the model's own tensors, by Hugging Face's names."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank factors of one matrix, in the same layout as the model's matrices, so that a row's
    output depends on the batch no more than without an adapter."""

    narrow: Matrix
    """[R, in], the A matrices."""
    wide: Matrix
    """[out, R], the B matrices times the adapter's scale."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Layout of a model's matrices."""

    dtype: torch.dtype
    is_packed: bool


Adapter = Sequence[Mapping[Place, LowRank]]
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
    place: Place,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Add the adapters' products of ``x`` [T, in] to ``y`` [T, out] in place."""
    for group in adapters:
        low_rank = group.adapter[layer].get(place)
        if low_rank is None:
            continue
        its = x if group.tokens is None else x.index_select(0, group.tokens)
        added = low_rank.wide.linear(low_rank.narrow.linear(its))
        if group.tokens is None:
            y.add_(added)  # not fused with the product, which would change the bits
        else:
            y.index_add_(0, group.tokens, added)


def make_adapter(
    tensors: Mapping[str, torch.Tensor],
    scale: float,
    places: OwnCopyTargets,
    *,
    num_layers: int,
    like: MatrixLayout,
) -> Adapter:
    """Lay out an adapter's tensors for a model's matrices.

    Args:
        tensors: ``model.layers.N.PROJECTION.lora_A.weight`` [r, in], ``….lora_B.weight`` [out, r].
        scale: factor of their product.
        places: of the model's own tensors; a sharded tensor's adapter is cut likewise.
        num_layers: of the model.
        like: layout of its matrices.

    Raises:
        WeightsRefused: a projection lacks one of the two tensors, or is not of this model.
    """
    pairs = _pairs(tensors, places)
    layers: list[dict[Place, LowRank]] = []
    for number in range(num_layers):
        prefix = f"model.layers.{number}."
        layer: dict[Place, LowRank] = {}
        for place, names in PARTS.items():
            found = [(name, pairs.pop(prefix + name, None)) for name in names]
            if any(pair is not None for _, pair in found):
                rows = [_rows(places[f"{prefix}{name}.weight"]) for name in names]
                layer[place] = _joint([pair for _, pair in found], rows, scale, like)
        layers.append(layer)
    if pairs:
        raise WeightsRefused(
            f"an adapter of {min(pairs)} can't be served: there are only those of "
            f"{', '.join(name for names in PARTS.values() for name in names)}, and none of experts"
        )
    return layers


def check_adapter(tensors: Mapping[str, torch.Tensor], places: OwnCopyTargets) -> None:
    """Validate an adapter's tensors without making it.

    Raises:
        WeightsRefused: a projection lacks one of the two tensors, or is not of this model.
    """
    _pairs(tensors, places)


_Pair = tuple[torch.Tensor, torch.Tensor]


def _pairs(tensors: Mapping[str, torch.Tensor], places: OwnCopyTargets) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for projection in sorted({name.rpartition(".lora_")[0] or name for name in tensors}):
        narrow = tensors.get(f"{projection}.lora_A.weight")
        wide = tensors.get(f"{projection}.lora_B.weight")
        if narrow is None or wide is None:
            raise WeightsRefused(
                f"an adapter has a tensor of {projection!r}, but not both of its lora_A.weight and "
                f"lora_B.weight"
            )
        place = places.get(f"{projection}.weight")
        shape = () if place is None else place.shape
        if place is None or len(shape) != 2:
            raise WeightsRefused(f"an adapter is of {projection!r}, which this model hasn't got")
        rank = narrow.shape[0]
        if not 0 < rank <= RANK_MAX:
            raise WeightsRefused(f"{projection} has rank {rank}; ranks are in [1, {RANK_MAX}]")
        for name, tensor, expected in (
            ("lora_A", narrow, (rank, shape[1])),
            ("lora_B", wide, (shape[0], rank)),
        ):
            if tuple(tensor.shape) != expected or not tensor.is_floating_point():
                raise WeightsRefused(
                    f"{projection}.{name}.weight is {tensor.dtype} of shape {list(tensor.shape)}, "
                    f"expected floating point of shape {list(expected)}"
                )
        pairs[projection] = _cut(narrow, wide, place)
    return pairs


def _cut(narrow: torch.Tensor, wide: torch.Tensor, place: "weight_store.CopyTarget") -> _Pair:
    """Return the adapter's part for a sharded matrix: of its inputs (A) or of its outputs (B)."""
    if place.part is None:
        return narrow, wide
    return (narrow, place.cut(wide)) if place.part.dim == 0 else (place.cut(narrow), wide)


def _rows(place: "weight_store.CopyTarget") -> int:
    """Return the number of a projection's outputs on this rank."""
    is_cut = place.part is not None and place.part.dim == 0
    return place.part.count if is_cut and place.part is not None else place.shape[0]


def _joint(
    parts: Sequence[_Pair | None], rows: Sequence[int], scale: float, like: MatrixLayout
) -> LowRank:
    narrow = torch.cat([pair[0] for pair in parts if pair is not None])
    wide = torch.zeros(sum(rows), narrow.shape[0])
    row = column = 0
    for pair, height in zip(parts, rows, strict=True):
        if pair is not None:
            rank = pair[0].shape[0]
            wide[row : row + height, column : column + rank] = pair[1].float() * scale
            column += rank
        row += height
    return LowRank(_matrix(narrow, like), _matrix(wide, like))


def _matrix(tensor: torch.Tensor, like: MatrixLayout) -> Matrix:
    rows, columns = tensor.shape
    matrix = make_matrix(rows, columns, like.dtype, is_packed=like.is_packed)
    matrix.rows(0, rows).copy_(tensor)
    return matrix
