"""Weight channel by CUDA IPC: engines on the trainer's own GPU open its buffers and copy from them.

The publish path packs tensors, the engine's staging copies them. The sender packs each version into
buffers of its own, so the trainer may change its tensors as soon as they are written, and a late
engine still finds them. The bytes never leave the device. :mod:`cuda_memory` does the sharing.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import CudaIpcHandle, InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.weight_channels.base import (
    ALIGNMENT_BYTES,
    NamedBuffer,
    WeightChannel,
    WeightSenderConfig,
    check_specs,
    checked_nbytes,
)
from tidegate.transport.weight_channels.cuda_memory import (
    Gpu,
    NamedTensor,
    check_memory,
    find_gpu,
    host_name,
)

if TYPE_CHECKING:
    import torch

NAME = "cuda_ipc"

BUFFER_BYTES = 256 * 2**20
"""Tensors share buffers up to this size; a larger tensor has its own. Each engine opens each buffer
anew, which costs CUDA some 0.1 ms and the engine address space, not memory."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer of a version, and its IPC handle."""

    allocation: "torch.Tensor"
    handle: CudaIpcHandle


class CudaIpcSender:
    """Sender that owns the buffers of the newest version and of kept versions."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers: dict[int, list[_Buffer]] = {}

    def init(self) -> InitWeights:
        """Return the phase-1 message: the device's UUID, because its index differs between
        processes."""
        return InitWeights(channel=NAME, info={"gpu": self._gpu.uuid, "host": host_name()})

    def write(
        self,
        version: int,
        tensors: Sequence[NamedBuffer | NamedTensor],
        *,
        keep: Collection[int] = (),
    ) -> list[UpdateWeights]:
        """Free all versions not in ``keep``, then copy the tensors into new buffers.

        Returns one message per buffer. After it returns, the trainer may change its tensors.

        Raises:
            WeightsRefused: a tensor is not on the device or of an unknown dtype, memory is short,
                or cannot be shared.
        """
        checked = self._checked(tensors)
        for old in [old for old in self._buffers if old not in keep or old == version]:
            self._free(old)
        self._gpu.settle()  # the trainer's kernels that produce them may run on any stream
        self._buffers[version] = []
        try:
            parts = [self._part(version, layout) for layout in _buffer_layouts(checked)]
            self._gpu.settle()
        except BaseException:
            self._free(version)
            raise
        replace = msgspec.structs.replace
        return [replace(part, is_last=part is parts[-1]) for part in parts]

    def close(self) -> None:
        """Free all buffers. Idempotent."""
        for version in list(self._buffers):
            self._free(version)

    def _checked(self, tensors: Sequence[NamedBuffer | NamedTensor]) -> list[NamedTensor]:
        checked: dict[str, NamedTensor] = {}
        for tensor in tensors:
            if isinstance(tensor, NamedBuffer):
                raise self._elsewhere(tensor.name, "the host")
            checked_nbytes(tensor.name, tensor.dtype, tensor.data.shape)
            if not self._gpu.has(tensor.data):
                raise self._elsewhere(tensor.name, str(tensor.data.device))
            if tensor.name in checked:
                raise WeightsRefused(
                    f"tensor {tensor.name!r} appears twice in one version; publish each name once"
                )
            checked[tensor.name] = tensor
        return list(checked.values())

    def _elsewhere(self, name: str, device: str) -> WeightsRefused:
        return WeightsRefused(
            f"tensor {name!r} is on {device}, but weight_channel='cuda_ipc' sends from the "
            f"engines' GPU, {self._gpu.uuid}; move the model there, or set weight_channel to 'shm'"
        )

    def _part(self, version: int, layout: "_BufferLayout") -> UpdateWeights:
        # An empty buffer cannot be shared.
        allocation = self._gpu.allocate(max(layout.nbytes, ALIGNMENT_BYTES))
        for spec, tensor in zip(layout.specs, layout.tensors, strict=True):
            _tensor_at(allocation, spec).copy_(tensor.data.detach())
        handle = self._gpu.share(allocation)
        self._buffers[version].append(_Buffer(allocation, handle))
        return UpdateWeights(version=version, location="", tensors=layout.specs, ipc_handle=handle)

    def _free(self, version: int) -> None:
        for buffer in self._buffers.pop(version):
            self._gpu.unshare(buffer.handle)


class CudaIpcReceiver:
    """Opens the sender's buffers, one at a time."""

    def __init__(self, init: InitWeights, gpu: Gpu | None) -> None:
        """Check that the sender's GPU is this engine's; ``gpu`` is None for a CPU engine.

        Raises:
            WeightsRefused: the weights will be on another GPU or host.
        """
        if gpu is None:
            raise WeightsRefused(
                "weight_channel='cuda_ipc' needs a GPU, but this engine computes on the CPU; "
                "start it with --device cuda, or set weight_channel to 'shm'"
            )
        sender_id, boot_id = str(init.info.get("host", "")), host_name()
        if sender_id != boot_id:
            raise WeightsRefused(
                "weight_channel='cuda_ipc' needs trainer and engine on one host, but their boot "
                f"ids are {sender_id!r} and {boot_id!r}; set weight_channel to 'relay' or 'zmq'"
            )
        if init.info.get("gpu") != gpu.uuid:
            raise WeightsRefused(
                f"the trainer's weights are on GPU {str(init.info.get('gpu'))!r}, but this "
                f"engine computes on {gpu.uuid!r}; have trainer and engines share a GPU, or set "
                "weight_channel to 'shm'"
            )
        self._gpu = gpu

    def tensors(
        self, update: UpdateWeights, is_wanted: Callable[[], bool] = lambda: True
    ) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        """Yield each tensor in the sender's memory; the caller copies it and keeps no reference.

        The memory is closed when the last reference is gone, and may hold another version once
        ``last`` is answered. Everything is checked before any memory is opened.

        Raises:
            WeightsRefused: the message contradicts itself, or the memory cannot be opened.
        """
        memory = update.ipc_handle
        if memory is None:
            raise WeightsRefused("a 'cuda_ipc' update has no IPC handle")
        check_memory(memory, self._gpu)
        check_specs(update.tensors, memory.nbytes)
        for spec in update.tensors:
            if spec.offset % ALIGNMENT_BYTES:
                raise WeightsRefused(
                    f"tensor {spec.name!r} begins at byte {spec.offset}, which is no multiple of "
                    f"{ALIGNMENT_BYTES}"
                )
        return self._opened(update.tensors, memory, is_wanted)

    def close(self) -> None:
        """No-op: memory is closed when its last tensor is dropped."""

    def _opened(
        self, specs: Sequence[TensorSpec], handle: CudaIpcHandle, is_wanted: Callable[[], bool]
    ) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        buffer = self._gpu.open(handle)
        for spec in specs:
            if not is_wanted():
                return
            yield spec, _tensor_at(buffer, spec)


@dataclass(slots=True)
class _BufferLayout:
    """Contents of one buffer."""

    specs: list[TensorSpec]
    tensors: list[NamedTensor]
    nbytes: int = 0


def _buffer_layouts(tensors: Sequence[NamedTensor]) -> list[_BufferLayout]:
    """Distribute the tensors over buffers; at least one, because one message is needed."""
    layouts = [_BufferLayout([], [])]
    for tensor in tensors:
        nbytes = tensor.data.nbytes
        offset = -(-layouts[-1].nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if layouts[-1].tensors and offset + nbytes > BUFFER_BYTES:
            layouts.append(_BufferLayout([], []))
            offset = 0
        buffer = layouts[-1]
        shape = list(tensor.data.shape)
        buffer.specs.append(TensorSpec(tensor.name, tensor.dtype, shape, offset, nbytes))
        buffer.tensors.append(tensor)
        buffer.nbytes = offset + nbytes
    return layouts


def _tensor_at(buffer: "torch.Tensor", spec: TensorSpec) -> "torch.Tensor":
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype, device=buffer.device)
    return buffer[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)


def _open_sender(config: WeightSenderConfig) -> CudaIpcSender:
    try:
        return CudaIpcSender(find_gpu(config.device))
    except WeightsRefused as error:
        raise ConfigError(f"weight_channel='cuda_ipc': {error}") from error


CHANNEL = WeightChannel(
    open_sender=_open_sender,
    open_receiver=lambda init, config: CudaIpcReceiver(init, config.gpu),
    needs_gpu=True,
    one_host=True,
    one_reader=True,
    carries_patches=False,
)
