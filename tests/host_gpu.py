"""Stand-in for a GPU with CUDA IPC, backed by host memory, for machines without one.

Its handles are as long as torch's and give other processes access to the same bytes. The channel,
the wire and the engine around it are real.
"""

import mmap
import os
import weakref

import torch

from tidegate.errors import WeightsRefused
from tidegate.transport.messages import CudaIpcHandle
from tidegate.transport.weight_channels.cuda_memory import Gpu

UUID = "5f0c7d3a-0000-4000-8000-000000000001"

TOTAL_BYTES = 2**30


class HostGpu(Gpu):
    """One process's view of the simulated GPU."""

    def __init__(self, uuid: str = UUID, *, free_bytes: int = TOTAL_BYTES) -> None:
        self.uuid = uuid
        self.total_bytes = TOTAL_BYTES
        self.shared: list[CudaIpcHandle] = []
        """Handles that have not been released yet."""
        self.opened: list[CudaIpcHandle] = []
        """All handles that this process ever opened."""
        self._rooms: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._fds: dict[int, int] = {}
        self._free_bytes = free_bytes

    @property
    def rooms_bytes(self) -> int:
        """Size of the memory that was allocated here and is still referenced."""
        return sum(len(allocation) for allocation in self._rooms)

    @property
    def mapped(self) -> int:
        """Number of other processes' memories that are open here."""
        return len(self._mapped)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.rooms_bytes + nbytes > self._free_bytes:
            raise WeightsRefused(f"no room for another {nbytes} bytes")
        fd = os.memfd_create("tidegate-host-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        made = mmap.mmap(fd, nbytes)
        self._rooms.add(made)
        weakref.finalize(made, os.close, fd)
        allocation = torch.frombuffer(made, dtype=torch.uint8)
        self._fds[allocation.data_ptr()] = fd
        return allocation

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def settle(self) -> None:
        pass

    def share(self, allocation: torch.Tensor) -> CudaIpcHandle:
        path = f"/proc/{os.getpid()}/fd/{self._fds[allocation.data_ptr()]}"
        handle = b"\x02c" + path.encode().ljust(64, b"\0")
        counter = f"/torch_{os.getpid()}_7_0".encode()
        memory = CudaIpcHandle(self.uuid, handle, allocation.nbytes, 0, counter, len(self.shared))
        self.shared.append(memory)
        return memory

    def unshare(self, memory: CudaIpcHandle) -> None:
        self.shared.remove(memory)

    def open(self, memory: CudaIpcHandle) -> torch.Tensor:
        try:
            fd = os.open(memory.handle[2:].rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise WeightsRefused(f"the memory can't be opened: {error}") from error
        found = mmap.mmap(fd, memory.nbytes)
        os.close(fd)
        self._mapped.add(found)
        self.opened.append(memory)
        return torch.frombuffer(found, dtype=torch.uint8)
