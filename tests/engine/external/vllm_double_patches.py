"""Changes of elements in the vLLM double, checked as by 0.33.0's checkpoint_weight_patch.py."""

import math
from collections.abc import Iterable, Mapping

import torch

from tidegate.engine.external.vllm_patches import TensorChange


def changed(
    served: Mapping[str, torch.Tensor], changes: Iterable[TensorChange]
) -> dict[str, torch.Tensor]:
    """Return the served tensors with changes, by copies in which NaN means "unchanged".

    Raises:
        ValueError, TypeError: as vLLM does, before anything has changed.
    """
    changes = list(changes)
    for change in changes:
        indices, values, count = change.indices, change.values, math.prod(change.shape)
        if not values.dtype.is_floating_point:
            raise TypeError(f"{change.name}: sparse checkpoint patches require a floating dtype")
        if (indices.ndim, values.ndim) != (1, 1) or indices.numel() != values.numel():
            raise ValueError(f"{change.name}: sparse indices and values must have matching lengths")
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{change.name}: sparse patch indices must be int32 or int64")
        in_order = indices.sort().values
        if (
            values.isnan().any()
            or ((indices < 0) | (indices >= count)).any()
            or (in_order[1:] == in_order[:-1]).any()
        ):
            raise ValueError(
                "Sparse checkpoint patches contain NaN values, out-of-range indices, or duplicate "
                "indices"
            )
    after = dict(served)
    for change in changes:
        whole = torch.full((math.prod(change.shape),), math.nan, dtype=change.values.dtype)
        whole.index_copy_(0, change.indices.long(), change.values)
        copied = whole.view(change.shape).to(served[change.name].dtype)
        assert copied.shape == served[change.name].shape, "a same-shaped final copy"
        after[change.name] = torch.where(copied.isnan(), served[change.name], copied)
    return after
