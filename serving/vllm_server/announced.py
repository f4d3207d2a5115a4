"""Which tensors does a trainer announce? Names, dtypes and shapes, and where each is in a buffer.

It knows no way for their bytes to come, and not what the model has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.serving.vllm_server.failures import UpdateError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that is to come."""

    name: str
    dtype: "torch.dtype"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values alone."""
        return math.prod(self.shape) * self.dtype.itemsize


def announced_tensors(info: Mapping[str, Any]) -> list[Announced]:
    """Those that ``update_info`` announces, in the order in which they come.

    Raises:
        UpdateError: the columns are not there, don't fit each other, or are no tensors.
    """
    import torch

    try:
        rows = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        told = [Announced(str(n), getattr(torch, d), tuple(map(int, s))) for n, d, s in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UpdateError(
            f"Invalid update_info: names, dtype_names and shapes must be of one length: {error!r}"
        ) from None
    for one in told:
        if not isinstance(one.dtype, torch.dtype) or min(one.shape, default=0) < 0:
            raise UpdateError(f"Invalid update_info: {one.name} is no tensor: {one!r}")
    return told


def unpacked(buffer: "torch.Tensor", tensors: Sequence[Announced]) -> "dict[str, torch.Tensor]":
    """Copies, in the host's memory, of what lies one after another in a buffer of bytes."""
    told = {}
    start = 0
    for one in tensors:
        part = buffer[start : start + one.num_bytes].to("cpu", copy=True)
        told[one.name] = part.view(one.dtype).view(one.shape)
        start += one.num_bytes
    return told
