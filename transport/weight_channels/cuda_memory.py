"""How does one process see another's memory of a GPU? By what torch tells of it, as plain fields.

It is all that this channel asks of CUDA, so that what has none can stand in for it; it knows no
weights. The fields are those of torch's ``_share_cuda_``, less its event: whoever tells has waited
until what is to be read is there, and an event that is opened here is never closed again.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import SharedMemory

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 66
"""As torch spells it: its version, ``c`` for memory of cudaMalloc, and CUDA's own 64 bytes."""

EVENT_BYTES = 64
"""CUDA's handle of an event. torch reads so many whatever it is given."""

COUNTERS = 10_000
"""That torch has in one file. It counts wherever it is told to, outside of the file too."""

_MALLOC = ord("c")
"""Other memory is passed by numbers of files, which torch would take from the process named."""

_COUNTER_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""How torch names the memory with its reference counters. It opens what it is told and counts in
it, so no other memory of this user must be named."""

_NO_EVENT = bytes(EVENT_BYTES)


class Gpu(Protocol):
    """One device, of one process."""

    @property
    def uuid(self) -> str:
        """By which two processes know that they mean the same device."""
        ...

    @property
    def total_bytes(self) -> int:
        """There is no more memory than that."""
        ...

    def room(self, nbytes: int) -> "torch.Tensor":
        """[nbytes] uint8, of its own allocation as far as torch has such.

        Raises:
            WeightsRefused: there is not enough.
        """
        ...

    def has(self, tensor: "torch.Tensor") -> bool:
        """Whether it lies on this device."""
        ...

    def settle(self) -> None:
        """Return once all is done that this process has launched there."""
        ...

    def share(self, room: "torch.Tensor") -> SharedMemory:
        """What another process opens it by. To be taken back with :meth:`unshare`.

        Raises:
            WeightsRefused: it can't be shared.
        """
        ...

    def unshare(self, memory: SharedMemory) -> None:
        """It is free once nothing here refers to it, whoever opened it or didn't."""
        ...

    def open(self, memory: SharedMemory) -> "torch.Tensor":
        """[nbytes] uint8, another process's. Closed when the last tensor of it is gone.

        Raises:
            WeightsRefused: there is no such memory.
        """
        ...


def flaw_of_counter(name: bytes, offset: int) -> str | None:
    """Why torch must not be told of this reference counter, if so: it would write elsewhere."""
    if not _COUNTER_NAME.fullmatch(name):
        return f"{name[:80]!r} is no name that torch gives its reference counters"
    if not 0 <= offset < COUNTERS:
        return f"there are {COUNTERS} reference counters in a file, and {offset} is none of them"
    return None


def check_memory(memory: SharedMemory, gpu: Gpu) -> None:
    """Hold what a peer says against what can be, before any of it is opened.

    Raises:
        WeightsRefused: it is no handle, or leads elsewhere.
    """
    if memory.gpu != gpu.uuid:
        raise WeightsRefused(
            f"weights lie on GPU {memory.gpu!r}, and this engine computes on {gpu.uuid!r}; have "
            f"trainer and engines share one, or set weight_channel to 'shm'"
        )
    if len(memory.handle) != HANDLE_BYTES or memory.handle[1] != _MALLOC:
        raise WeightsRefused(
            f"a handle of {len(memory.handle)} bytes, {memory.handle[:2]!r}…, is none of memory on "
            f"a GPU as this torch spells it: {HANDLE_BYTES} bytes, the second 'c'; do trainer and "
            f"engine have the same torch?"
        )
    if flaw := flaw_of_counter(memory.counter, memory.counter_offset):
        raise WeightsRefused(f"memory on a GPU is not opened: {flaw}")
    end = memory.offset + memory.nbytes
    if memory.nbytes < 1 or memory.offset < 0 or end > gpu.total_bytes:
        raise WeightsRefused(
            f"memory at bytes [{memory.offset}, {end}) can't be on a GPU of {gpu.total_bytes}"
        )


def host_name() -> str:
    """The same for all processes of this host until it starts anew, whatever container they are in.

    Empty where the system doesn't tell.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class CudaGpu:
    """A device of CUDA's, by torch's calls for it."""

    def __init__(self, device: "torch.device") -> None:
        """``device`` has an index."""
        import torch

        found = torch.cuda.get_device_properties(device)
        self._device = device
        self._uuid = str(found.uuid)
        self._total_bytes = int(found.total_memory)

    @property
    def uuid(self) -> str:
        """As :class:`Gpu` says."""
        return self._uuid

    @property
    def total_bytes(self) -> int:
        """As :class:`Gpu` says."""
        return self._total_bytes

    def room(self, nbytes: int) -> "torch.Tensor":
        """As :class:`Gpu` says."""
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightsRefused(
                f"no room on {self._device} for another {nbytes / 2**20:.0f} MiB of weights, of "
                f"which engines take theirs; lower num_blocks, have engines sleep while weights "
                f"are published, or set weight_channel to 'shm': {error}"
            ) from error

    def has(self, tensor: "torch.Tensor") -> bool:
        """As :class:`Gpu` says."""
        return tensor.device == self._device

    def settle(self) -> None:
        """As :class:`Gpu` says."""
        import torch

        torch.cuda.synchronize(self._device)

    def share(self, room: "torch.Tensor") -> SharedMemory:
        """As :class:`Gpu` says."""
        try:
            told = room.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise WeightsRefused(
                f"memory on {self._device} can't be shared with another process: {error}"
            ) from error
        _, handle, nbytes, offset, counter, counter_offset, _, _ = told
        memory = SharedMemory(
            self._uuid, bytes(handle), nbytes, offset, bytes(counter), counter_offset
        )
        if len(memory.handle) != HANDLE_BYTES or memory.handle[1] != _MALLOC:
            self.unshare(memory)
            raise WeightsRefused(
                f"torch shares this memory by {len(memory.handle)} bytes, {memory.handle[:2]!r}…, "
                f"as it does with expandable segments; leave expandable_segments out of "
                f"PYTORCH_CUDA_ALLOC_CONF, or set weight_channel to 'shm'"
            )
        return memory

    def unshare(self, memory: SharedMemory) -> None:
        """As :class:`Gpu` says.

        torch waits for one reader of each share to count it down, and would wait forever for one
        that never came. There may be any number of them; who still reads is known without it.
        """
        import torch

        torch.UntypedStorage._release_ipc_counter_cuda(memory.counter, memory.counter_offset)

    def open(self, memory: SharedMemory) -> "torch.Tensor":
        """As :class:`Gpu` says."""
        import torch

        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index,
                memory.handle,
                memory.nbytes,
                memory.offset,
                memory.counter,
                memory.counter_offset,
                _NO_EVENT,
                False,
            )
        except RuntimeError as error:
            raise WeightsRefused(
                f"the trainer's memory on {self._device} can't be opened: {error}; is the trainer "
                f"alive, on this host, and in this container?"
            ) from error
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, 0, (memory.nbytes,), (1,))  # as torch's own reader does


def find_gpu(name: str) -> CudaGpu:
    """The device that a process calls ``cuda`` or ``cuda:N``.

    Raises:
        WeightsRefused: it has none such.
    """
    import torch

    if not torch.cuda.is_available():
        raise WeightsRefused(
            f"weights by 'cuda_ipc' lie on a GPU that trainer and engines share, and torch "
            f"{torch.__version__} finds no CUDA device here; set weight_channel to 'shm'"
        )
    device = torch.device(name if ":" in name else f"{name}:0")
    if device.type != "cuda" or device.index >= torch.cuda.device_count():
        raise WeightsRefused(
            f"weights by 'cuda_ipc' are to lie on {name!r}, and this process sees "
            f"{torch.cuda.device_count()} CUDA devices, numbered from 0"
        )
    return CudaGpu(device)
