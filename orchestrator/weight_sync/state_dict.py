"""Reads a trainer's state dict for publishing: each tensor once, as bytes on the host.

FSDP and tensor parallelism leave each rank a shard of each tensor (a DTensor). Either every rank
sends its own shards (:func:`own_parts`), which may also be :class:`LocalShard` records of a layout
that torch does not know; or the rank that publishes gathers one whole tensor at a time, and the
other ranks call :func:`take_part`, so no device holds more than one whole tensor beside its shards.
torch is imported when a tensor is read, because `tidegate audit` runs without it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.base import ITEM_BYTES
from tidegate.transport.weight_channels.cuda_memory import NamedTensor
from tidegate.transport.weight_names import DRAFT_PREFIX

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of a tensor, for ``publish(sharded=True)``, in place of a DTensor.

    Of the ranks that hold the same part, one passes it.
    """

    tensor: "torch.Tensor"
    """The part's elements."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """Index of the part's first element in the whole tensor, in each dimension."""


def without_shards(
    state_dict: "Mapping[str, torch.Tensor | LocalShard]",
) -> "Mapping[str, torch.Tensor]":
    """Return the state dict, whose values are tensors.

    Raises:
        ConfigError: a value is a :class:`LocalShard`.
    """
    shards = [name for name, value in state_dict.items() if isinstance(value, LocalShard)]
    if shards:
        raise ConfigError(
            f"{shards[0]!r} is a LocalShard, which only publish(sharded=True) and "
            "rollback(sharded=True) send; pass sharded=True on every rank"
        )
    return cast("Mapping[str, torch.Tensor]", state_dict)


def with_draft(
    state_dict: "Mapping[str, torch.Tensor]", draft: "Mapping[str, torch.Tensor] | None"
) -> "Mapping[str, torch.Tensor]":
    """Return the tensors of a publish: the policy's, and the draft model's under their prefix."""
    if draft is None:
        return state_dict
    return {**state_dict, **{DRAFT_PREFIX + name: tensor for name, tensor in draft.items()}}


def without_draft(state_dict: "Mapping[str, torch.Tensor]") -> "Mapping[str, torch.Tensor]":
    """Return the tensors of a publish without the draft model's; the same mapping if none are."""
    names = [name for name in state_dict if not name.startswith(DRAFT_PREFIX)]
    if len(names) == len(state_dict):
        return state_dict
    return {name: state_dict[name] for name in names}


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

    Tensors that share their memory, such as tied embeddings, are yielded once; other views of the
    same memory, such as a transposed one, are other tensors. A draft model's are too, because an
    engine stores both models.
    """
    seen: set[object] = set()
    for name, tensor in state_dict.items():
        own = own_part(tensor.detach())
        gathered = whole(tensor.detach())  # gathered even if unused: other ranks take part
        key = name.startswith(DRAFT_PREFIX), _view(own, gathered.shape)
        if key in seen and own.numel():
            continue
        seen.add(key)
        yield name, gathered


def _view(own: "torch.Tensor", shape: tuple[int, ...]) -> tuple[object, ...]:
    """Return what is equal for two tensors of one memory and one order of elements."""
    return own.data_ptr(), own.dtype, own.stride(), shape


def named_buffers(state_dict: "Mapping[str, torch.Tensor]") -> list[NamedBuffer]:
    """Return the bytes of a state dict on the host; copies only what is not there already."""
    return [_buffer(name, tensor) for name, tensor in distinct_tensors(state_dict)]


def named_tensors(state_dict: "Mapping[str, torch.Tensor]") -> list[NamedTensor]:
    """Return the tensors of a state dict on the device where they are, each once."""
    return [NamedTensor(*named) for named in distinct_tensors(state_dict)]


def own_parts(
    state_dict: "Mapping[str, torch.Tensor | LocalShard]", *, rank: int
) -> list[TensorPart]:
    """Return this rank's parts of a sharded state dict, on the host; gathers nothing.

    Of a part that several ranks hold, the first of them sends it: of a DTensor the rank with
    coordinate 0 in the replicated dimensions of its device mesh, of any other tensor rank 0.

    Raises:
        WeightsRefused: a DTensor holds sums that its ranks have not added up.
    """
    parts: list[TensorPart] = []
    seen: set[object] = set()
    for name, tensor in state_dict.items():
        shard = tensor if isinstance(tensor, LocalShard) else _own_shard(tensor, rank)
        if shard is None:
            continue
        own = shard.tensor.detach()
        key = *_view(own, shard.shape), shard.start
        if key in seen and own.numel():
            continue
        seen.add(key)
        parts.append(TensorPart(_buffer(name, own), tuple(shard.shape), tuple(shard.start)))
    return parts


def _own_shard(tensor: "torch.Tensor", rank: int) -> LocalShard | None:
    """Return the shard of a DTensor or tensor that this rank sends; None if it sends none."""
    own, shape = own_part(tensor.detach()), tuple(tensor.shape)
    # The method by which torch.distributed.checkpoint reads shards, of DTensors and others.
    chunks = getattr(tensor, "__create_chunk_list__", None)
    if chunks is None:
        return LocalShard(own, shape, (0,) * tensor.ndim) if rank == 0 else None
    try:
        (chunk,) = chunks()
    except (RuntimeError, ValueError) as error:
        raise WeightsRefused(
            f"a DTensor of shape {list(shape)} has no single shard on this rank ({error}); "
            "redistribute() it to Shard or Replicate placements"
        ) from None
    is_mine = own.numel() > 0 and _is_first_holder(tensor)
    return LocalShard(own, shape, tuple(chunk.offsets)) if is_mine else None


def _is_first_holder(tensor: "torch.Tensor") -> bool:
    """Whether this rank is the first of those with the same shard of a DTensor."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    coordinate = None if mesh is None else mesh.get_coordinate()
    return coordinate is not None and not any(
        at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )


def _buffer(name: str, tensor: "torch.Tensor") -> NamedBuffer:
    import torch

    host = tensor.to("cpu").contiguous()
    return NamedBuffer(
        name=name,
        dtype=str(host.dtype).removeprefix("torch."),
        shape=tuple(host.shape),
        data=host.view(-1).view(torch.uint8).numpy().data,
    )


def tensors_of(buffers: Iterable[NamedBuffer]) -> "dict[str, torch.Tensor]":
    """Return the tensors, which share their buffers' memory, by name.

    Raises:
        WeightsRefused: a dtype is unknown.
    """
    return {buffer.name: _tensor(buffer) for buffer in buffers}


def _tensor(buffer: NamedBuffer) -> "torch.Tensor":
    import torch

    dtype = getattr(torch, buffer.dtype) if buffer.dtype in ITEM_BYTES else None
    if dtype is None:
        raise WeightsRefused(
            f"tensor {buffer.name!r} has dtype {buffer.dtype!r}; publish one of "
            f"{', '.join(ITEM_BYTES)}"
        )
    if not math.prod(buffer.shape):
        return torch.empty(buffer.shape, dtype=dtype)
    return torch.frombuffer(buffer.data, dtype=dtype).view(buffer.shape)
