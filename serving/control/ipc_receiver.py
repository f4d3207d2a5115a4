"""Receiver of weights from a trainer on the same GPU: opens CUDA IPC handles of its memory.

vLLM's and SkyRL's trainers send the handles pickled, and vLLM unpickles any class if so configured.
:mod:`safe_unpickler` reads them instead, and each is checked before memory is opened.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.serving.control.receivers import (
    AnnouncedTensor,
    UpdateReceiver,
    announced_tensors,
    unpacked,
)
from tidegate.serving.control.safe_unpickler import UnsafePickle, read_plain_pickle
from tidegate.serving.http.errors import ApiError, UpdateError
from tidegate.transport.weight_channels.cuda_memory import EVENT_BYTES, ref_counter_problem

if TYPE_CHECKING:
    import torch


class Handle(NamedTuple):
    """Fields of a GPU tensor's IPC handle, in the order of torch's ``reduce_tensor``."""

    tensor_kind: object
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_kind: object
    dtype: Any
    device: int
    memory: bytes
    storage_bytes: int
    storage_offset_bytes: int
    requires_grad: bool
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool


_KINDS: tuple[type[Any] | tuple[type[Any], ...], ...] = (
    object,
    tuple,
    tuple,
    int,
    object,
    object,
    int,
    bytes,
    int,
    int,
    bool,
    bytes,
    int,
    bytes,
    bool,
)


class IpcUpdateReceiver(UpdateReceiver):
    """Copies tensors from GPU memory that a trainer shares through handles.

    ``init_info`` says whether each tensor has a handle, or all are packed into one buffer.
    """

    def __init__(self) -> None:
        self._is_packed = False
        self._open: tuple[Handle, torch.Tensor] | None = None

    def connect(self, info: Mapping[str, Any]) -> None:
        """Check that there is a GPU to open memory on; there is no connection to make."""
        if strange := [name for name in info if name != "packed"]:
            raise UpdateError(f"Invalid init_info for ipc: unknown {strange[0]!r}")
        _device_uuid()
        self.close()
        self._is_packed = bool(info.get("packed", False))

    def receive(self, info: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return copies of the tensors in the host's memory."""
        announced = announced_tensors(info)
        handles = read_handles(info.get("ipc_handles_pickled"))
        uuid = _device_uuid()
        if "sizes" in info:
            return _skyrls_tensors(info["sizes"], announced, handles, uuid)
        if not self._is_packed:
            if not isinstance(handles, list) or len(handles) != len(announced):
                raise UpdateError(f"ipc_handles must be a list of {len(announced)}, one per tensor")
            return {
                tensor.name: self._opened(_own(each, uuid), tensor).cpu()
                for tensor, each in zip(announced, handles, strict=True)
            }
        sizes = info.get("tensor_sizes")
        if sizes != [tensor.num_bytes for tensor in announced] or not isinstance(handles, dict):
            raise UpdateError(
                "packed tensors must have one handle per GPU and tensor_sizes that equal their "
                f"byte counts {[tensor.num_bytes for tensor in announced]}, got {sizes!r:.200}"
            )
        handle = _own(handles, uuid)
        total = sum(sizes)
        if handle.dtype != _bytes_dtype() or len(handle.size) != 1 or handle.size[0] < total:
            raise UpdateError(
                f"the packed buffer must be uint8 [{total}] or longer, got {handle.dtype} "
                f"{list(handle.size)}"
            )
        return unpacked(self._buffer(handle), announced)

    def finished(self) -> None:
        """Close the trainer's buffer."""
        self._open = None

    close = finished

    def _buffer(self, handle: Handle) -> "torch.Tensor":
        """Open a buffer once for all pieces of an update: torch counts one close per export."""
        if self._open is None or self._open[0] != handle:
            self._open = (handle, _rebuilt(handle))
        return self._open[1]

    def _opened(self, handle: Handle, tensor: AnnouncedTensor) -> "torch.Tensor":
        if handle.size != tensor.shape or handle.dtype != tensor.dtype:
            raise UpdateError(
                f"{tensor.name} was announced as {tensor.dtype} {tensor.shape}, and its handle "
                f"is of {handle.dtype} {handle.size}"
            )
        return _rebuilt(handle)


def _skyrls_tensors(
    sizes: object, announced: "list[AnnouncedTensor]", handles: object, uuid: str
) -> "dict[str, torch.Tensor]":
    """Copy the tensors of one of SkyRL's chunks: a buffer of one dtype, with sizes in elements.

    The buffer is closed here: SkyRL's trainer frees it after this chunk.
    """
    if sizes != [tensor.num_elements for tensor in announced] or not isinstance(handles, dict):
        raise UpdateError(
            "SkyRL's chunks must have one handle per GPU and sizes that equal their tensors' "
            f"element counts {[tensor.num_elements for tensor in announced]}, got {sizes!r:.200}"
        )
    handle, total = _own(handles, uuid), sum(tensor.num_elements for tensor in announced)
    if any(tensor.dtype != handle.dtype for tensor in announced):
        raise UpdateError(
            f"the packed buffer is {handle.dtype}, and tensors of it were announced with other "
            "dtypes; send one chunk per dtype"
        )
    if handle.size[1:] or handle.stride != (1,) or handle.size[0] < total:
        raise UpdateError(
            f"the packed buffer must be [{total}] or longer and contiguous, got "
            f"{list(handle.size)} with strides {list(handle.stride)}"
        )
    return unpacked(_rebuilt(handle).view(_bytes_dtype()), announced)


def read_handles(pickled: object) -> "list[dict[str, Handle]] | dict[str, Handle]":
    """Read handles from base64 of a pickle: of each tensor by its GPU's UUID, or of one buffer.

    Raises:
        ApiError: the pickle holds something else.
    """
    if not isinstance(pickled, str):
        raise ApiError(400, "update_info must have ipc_handles_pickled, as vLLM's client sends")
    try:
        found = read_plain_pickle(base64.b64decode(pickled, validate=True), _named)
        if isinstance(found, list):
            return [_handles(each) for each in found]
        return _handles(found)
    except (UnsafePickle, binascii.Error, ValueError) as error:
        raise ApiError(
            400,
            f"ipc_handles_pickled is read for CUDA handles and nothing else, and refused: {error}",
            param="update_info",
        ) from None


def _handles(found: object) -> dict[str, Handle]:
    if not isinstance(found, dict):
        raise UnsafePickle(f"handles must be a dict by GPU UUID, got {type(found).__name__}")
    return {str(uuid): _handle(fields) for uuid, fields in found.items()}


def _handle(fields: object) -> Handle:
    match fields:
        case (function, arguments) if function is _REBUILD:  # SkyRL's trainer pickles both
            fields = arguments
    if not isinstance(fields, tuple) or len(fields) != len(_KINDS):
        raise UnsafePickle(
            f"a handle must be a tuple of {len(_KINDS)} fields, got {type(fields).__name__}"
        )
    for field, kind, name in zip(fields, _KINDS, Handle._fields, strict=True):
        if not isinstance(field, kind):
            raise UnsafePickle(
                f"a handle's {name} must be {getattr(kind, '__name__', kind)}, got "
                f"{type(field).__name__}"
            )
    handle = Handle(*fields)
    _check_extent(handle)
    return handle


def _check_extent(handle: Handle) -> None:
    """Check that the tensor lies within the memory that its handle opens."""
    import torch

    numbers = (*handle.size, *handle.stride, handle.offset, handle.storage_offset_bytes)
    if not all(isinstance(n, int) and n >= 0 for n in (*numbers, handle.counter_offset)):
        raise UnsafePickle(
            f"a handle's sizes, strides and offsets must be integers >= 0, got {numbers!r:.200}"
        )
    if not isinstance(handle.dtype, torch.dtype) or len(handle.size) != len(handle.stride):
        raise UnsafePickle(
            "a handle must have a torch dtype and as many strides as sizes, got "
            f"{handle.dtype!r:.50}, sizes {list(handle.size)} and strides {list(handle.stride)}"
        )
    last = sum((n - 1) * step for n, step in zip(handle.size, handle.stride, strict=True))
    end = (handle.offset + last + 1) * handle.dtype.itemsize
    if min(handle.size, default=1) > 0 and end > handle.storage_bytes:
        raise UnsafePickle(
            f"a handle's tensor ends at byte {end} of a storage of {handle.storage_bytes} bytes"
        )
    if len(handle.event) != EVENT_BYTES:
        raise UnsafePickle(f"a handle of an event has {EVENT_BYTES} bytes, got {len(handle.event)}")
    if flaw := ref_counter_problem(handle.counter, handle.counter_offset):
        raise UnsafePickle(flaw)


_TENSOR, _STORAGE, _REBUILD = object(), object(), object()
"""Stand-ins for torch's classes, and its function that opens a handle, which no pickle may call."""


def _size(dimensions: object) -> tuple[object, ...]:
    if not isinstance(dimensions, tuple | list):
        raise UnsafePickle(
            f"a pickled torch.Size must hold a tuple, got {type(dimensions).__name__}"
        )
    return tuple(dimensions)


def _named(module: str, name: str) -> Any:
    import torch

    if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
        return _TENSOR
    if module in ("torch", "torch.storage") and name in ("TypedStorage", "UntypedStorage"):
        return _STORAGE
    if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
        return _REBUILD
    if (module, name) == ("torch", "Size"):
        return _size
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def _own(handles: dict[str, Handle], uuid: str) -> Handle:
    if uuid not in handles:
        raise UpdateError(
            f"IPC handle not found for GPU UUID {uuid}. Available UUIDs: {list(handles)}: trainer "
            "and server must share the GPU"
        )
    return handles[uuid]


def _rebuilt(handle: Handle) -> "torch.Tensor":
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    fields = handle._replace(
        tensor_kind=torch.Tensor,
        storage_kind=torch.storage.TypedStorage,
        device=torch.cuda.current_device(),
        requires_grad=False,
    )
    try:
        tensor: torch.Tensor = rebuild_cuda_tensor(*fields)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UpdateError(f"the trainer's memory can't be opened: {error}") from None
    return tensor


def _bytes_dtype() -> "torch.dtype":
    import torch

    return torch.uint8


def _device_uuid() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ApiError(
            400,
            "weights by ipc are read from the memory of a GPU that trainer and server share, and "
            "torch sees no CUDA device here: start the server with --weight-transfer gloo or disk",
        )
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
