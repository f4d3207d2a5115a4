"""How are weights published that no rank has whole? One tensor at a time, gathered as it is copied.

FSDP and tensor parallelism leave each rank a shard of each tensor (a DTensor). The rank that
publishes asks for each whole tensor in turn, and the other ranks take part in that; so no device
holds more than one whole tensor beside its shards. Of runs and engines it knows nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


def whole(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor itself; or, of a DTensor, all of it, for which each of its ranks must ask."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("torch.Tensor", gather())


def own_part(tensor: "torch.Tensor") -> "torch.Tensor":
    """What of it is in this process's memory: by that, tensors are known to be one and the same."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else cast("torch.Tensor", local())


def take_part(state_dict: "Mapping[str, torch.Tensor]") -> None:
    """What all other ranks call while one publishes ``state_dict``: each gives its shards.

    Their state dicts must have the same names in the same order. What is gathered here is let go of
    at once.
    """
    for tensor in state_dict.values():
        whole(tensor.detach())
