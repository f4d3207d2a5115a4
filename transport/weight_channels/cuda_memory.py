"""CUDA IPC: shares GPU memory between processes through torch's ``_share_cuda_`` handles.

The fields of a handle are those of ``_share_cuda_`` without its event: the sender synchronises
before it sends a handle, and an event opened by the receiver would never be closed.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import CudaIpcHandle

if TYPE_CHECKING:
    import torch

    TensorView = memoryview | torch.Tensor
    """A tensor as a receiver yields it: its bytes on the host, or a tensor on a device."""

HANDLE_BYTES = 66
"""Length of torch's IPC handle: its version, ``c`` for cudaMalloc memory, and CUDA's own 64
bytes."""

EVENT_BYTES = 64
"""Length of a CUDA event handle; torch reads this many bytes whatever it is given."""

COUNTERS = 10_000
"""Number of reference counters in one of torch's files. torch does not check the index against
it."""

_MALLOC = ord("c")
"""Handles of other memory contain file descriptors, which torch would fetch from the process that
they name."""

_COUNTER_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""Pattern of torch's names for the shared memory of reference counters. torch opens and writes to
whatever is named, so other memory of this user must not be named."""

_NO_EVENT = bytes(EVENT_BYTES)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One device tensor to send."""

    name: str
    data: "torch.Tensor"

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype, without ``torch.``."""
        return str(self.data.dtype).removeprefix("torch.")


def host_bytes(tensor: "torch.Tensor") -> memoryview:
    """Return a copy of the tensor's bytes on the host, row-major."""
    import torch

    host = tensor.detach().to("cpu").contiguous()
    return host.view(-1).view(torch.uint8).numpy().data


class Gpu:
    """A CUDA device, through torch. Tests override every method, with host memory."""

    def __init__(self, device: "torch.device") -> None:
        """``device`` must have an index."""
        import torch

        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self.uuid = str(properties.uuid)
        """UUID that identifies the device across processes."""
        self.total_bytes = int(properties.total_memory)
        """Total memory of the device, in bytes."""

    def allocate(self, nbytes: int) -> "torch.Tensor":
        """Allocate [nbytes] uint8, in an allocation of its own as far as torch allows.

        Raises:
            WeightsRefused: there is not enough memory.
        """
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightsRefused(
                f"no memory on {self._device} for another {nbytes / 2**20:.0f} MiB of weights "
                "beside the engines'; lower num_kv_blocks, put engines to sleep while you "
                f"publish, or set weight_channel to 'shm': {error}"
            ) from error

    def has(self, tensor: "torch.Tensor") -> bool:
        """Return whether the tensor is on this device."""
        return tensor.device == self._device

    def settle(self) -> None:
        """Block until all work that this process has launched on the device is done."""
        import torch

        torch.cuda.synchronize(self._device)

    def share(self, allocation: "torch.Tensor") -> CudaIpcHandle:
        """Return an IPC handle of the memory; release it with :meth:`unshare`.

        Raises:
            WeightsRefused: the memory cannot be shared.
        """
        try:
            shared = allocation.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise WeightsRefused(
                f"memory on {self._device} can't be shared with another process: {error}. Set "
                "weight_channel to 'shm'"
            ) from error
        _, handle, nbytes, offset, counter, counter_offset, _, _ = shared
        memory = CudaIpcHandle(
            self.uuid, bytes(handle), nbytes, offset, bytes(counter), counter_offset
        )
        if len(memory.handle) != HANDLE_BYTES or memory.handle[1] != _MALLOC:
            self.unshare(memory)
            raise WeightsRefused(
                f"torch shares this memory by {len(memory.handle)} bytes, {memory.handle[:2]!r}…, "
                f"as it does with expandable segments; leave expandable_segments out of "
                f"PYTORCH_CUDA_ALLOC_CONF, or set weight_channel to 'shm'"
            )
        return memory

    def unshare(self, memory: CudaIpcHandle) -> None:
        """Release a handle: the memory is freed once this process drops it, even if others opened
        it.

        torch expects exactly one reader to decrement each share's counter, and would keep the
        memory forever if none came. There may be any number of readers, and the run tracks them
        itself.
        """
        import torch

        torch.UntypedStorage._release_ipc_counter_cuda(
            memory.ref_counter_handle, memory.ref_counter_offset
        )

    def open(self, memory: CudaIpcHandle) -> "torch.Tensor":
        """Open another process's memory as [nbytes] uint8, until its last tensor is dropped.

        Raises:
            WeightsRefused: there is no such memory.
        """
        import torch

        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index,
                memory.handle,
                memory.nbytes,
                memory.offset,
                memory.ref_counter_handle,
                memory.ref_counter_offset,
                _NO_EVENT,
                False,
            )
        except RuntimeError as error:
            raise WeightsRefused(
                f"the trainer's memory on {self._device} can't be opened: {error}; is the trainer "
                f"alive, on this host, and in this container?"
            ) from error
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, 0, (memory.nbytes,), (1,))  # as torch's own IPC reader does


def ref_counter_problem(name: bytes, offset: int) -> str | None:
    """Return why a reference counter is invalid, or None. torch would write to arbitrary memory."""
    if not _COUNTER_NAME.fullmatch(name):
        return f"{name[:80]!r} is not a name of torch's reference counters"
    if not 0 <= offset < COUNTERS:
        return f"reference counter {offset} does not exist: a file has {COUNTERS}"
    return None


def check_memory(memory: CudaIpcHandle, gpu: Gpu) -> None:
    """Check a handle from a peer before it is opened.

    Raises:
        WeightsRefused: the handle is malformed, or names another device or out-of-range memory.
    """
    if memory.gpu != gpu.uuid:
        raise WeightsRefused(
            f"the weights are on GPU {memory.gpu!r}, but this engine computes on {gpu.uuid!r}; "
            "have trainer and engines share a GPU, or set weight_channel to 'shm'"
        )
    if len(memory.handle) != HANDLE_BYTES or memory.handle[1] != _MALLOC:
        raise WeightsRefused(
            f"a handle of {len(memory.handle)} bytes, {memory.handle[:2]!r}…, is no GPU memory "
            f"handle of this torch: it needs {HANDLE_BYTES} bytes, the second 'c'; do trainer "
            "and engine have the same torch?"
        )
    if problem := ref_counter_problem(memory.ref_counter_handle, memory.ref_counter_offset):
        raise WeightsRefused(f"memory on a GPU is not opened: {problem}")
    end = memory.offset + memory.nbytes
    if memory.nbytes < 1 or memory.offset < 0 or end > gpu.total_bytes:
        raise WeightsRefused(
            f"memory at bytes [{memory.offset}, {end}) can't be on a GPU of {gpu.total_bytes}"
        )


def host_name() -> str:
    """Return the boot id: equal for all processes of this host until reboot, across containers.

    Empty if the system does not provide one.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def find_gpu(name: str) -> Gpu:
    """Return the device that this process calls ``cuda`` or ``cuda:N``.

    Raises:
        WeightsRefused: there is no such device.
    """
    import torch

    if not torch.cuda.is_available():
        raise WeightsRefused(
            "weight_channel='cuda_ipc' needs a GPU that trainer and engines share, but torch "
            f"{torch.__version__} finds no CUDA device here; set weight_channel to 'shm'"
        )
    device = torch.device(name if ":" in name else f"{name}:0")
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        raise WeightsRefused(
            f"weight_channel='cuda_ipc' was set to {name!r}, but this process sees "
            f"{torch.cuda.device_count()} CUDA devices, numbered from 0; set device to one of "
            "them, or weight_channel to 'shm'"
        )
    return Gpu(device)
