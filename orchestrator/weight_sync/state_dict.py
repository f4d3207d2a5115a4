"""Reads a trainer's state dict for publishing: whole tensors, each once, as bytes on the host.

Called by the publish path and by remote trainers. FSDP and tensor parallelism leave each rank a
shard of each tensor (a DTensor): the rank that publishes gathers one whole tensor at a time, and
the other ranks call :func:`take_part`, so no device holds more than one whole tensor beside its
shards. torch is imported when a tensor is read, because `tidegate audit` runs without it. Its
tensors go to a sender of ``transport/weight_channels/``.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from tidegate.transport.weight_channels import NamedBuffer

if TYPE_CHECKING:
    import torch


def whole(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor; gather a DTensor first, for which each of its ranks must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("torch.Tensor", gather())


def own_part(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return this process's shard of a DTensor, or the tensor itself.

    Two entries of a state dict are the same tensor if their own parts share memory.
    """
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else cast("torch.Tensor", local())


def take_part(state_dict: "Mapping[str, torch.Tensor]") -> None:
    """Give this rank's shards to the rank that publishes ``state_dict``.

    Every rank but the publishing one calls this, with the same names in the same order. Gathered
    tensors are released at once.
    """
    for tensor in state_dict.values():
        whole(tensor.detach())


def distinct_tensors(
    state_dict: "Mapping[str, torch.Tensor]",
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield each tensor to publish once, gathered, under its first name.

    Tensors that share their memory, such as tied embeddings, are yielded once.
    """
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in state_dict.items():
        own = own_part(tensor.detach())
        gathered = whole(tensor.detach())  # gathered even if unused: other ranks take part
        key = (own.data_ptr(), gathered.shape)
        if key in seen and own.numel():
            continue
        seen.add(key)
        yield name, gathered


def named_buffers(state_dict: "Mapping[str, torch.Tensor]") -> list[NamedBuffer]:
    """Return the bytes of a state dict on the host; copies only what is not there already."""
    import torch

    buffers: list[NamedBuffer] = []
    for name, tensor in distinct_tensors(state_dict):
        host = tensor.to("cpu").contiguous()
        buffers.append(
            NamedBuffer(
                name=name,
                dtype=str(host.dtype).removeprefix("torch."),
                shape=tuple(host.shape),
                data=host.view(-1).view(torch.uint8).numpy().data,
            )
        )
    return buffers
