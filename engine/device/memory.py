"""GPU memory for sleep: releases the bytes of storages, and reallocates them for the same tensors.

Implements ``sleep.SleepableMemory`` with torch's caching allocator, for ``SleepController``. A
storage resized to 0 keeps its identity, so tensors and views of the storage stay valid. Its address
may change, which is safe because no kernel keeps an address between steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tidegate.engine.device.devices import CPU
from tidegate.engine.memory import host_memory as host
from tidegate.engine.memory.out_of_memory import blame_memory

FREE_FIRST = "free memory that other processes took, then wake it again"

SLEEP_DEEPER = "sleep at level 2, which keeps no copy, or leave the machine more memory"


@dataclass(frozen=True, slots=True)
class DeviceRegion:
    """One storage on the device."""

    storage: torch.UntypedStorage
    nbytes: int
    """Size of the storage while it is awake."""

    def wake(self) -> bool:
        """Allocate the storage if it is released, uninitialised; return whether it was released."""
        was_released = self.storage.nbytes() != self.nbytes
        if was_released:
            with blame_memory(doing="to wake memory of a device", remedy=FREE_FIRST):
                self.storage.resize_(self.nbytes)
        return was_released

    def contents(self) -> torch.Tensor:
        """Return the storage's bytes as a uint8 tensor."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage)


class DeviceMemory:
    """Memory of one device, for :class:`~tidegate.engine.execution.sleep.SleepController`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}
        """Awake size of each storage in bytes, by the storage's identity; storages live as
        long as the engine."""

    def regions_of(self, tensors: Iterable[torch.Tensor]) -> list[DeviceRegion]:
        """Return the regions behind these tensors, each once, also while they are released."""
        adapters: dict[int, DeviceRegion] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = self._sizes.setdefault(storage._cdata, storage.nbytes())
            adapters[storage._cdata] = DeviceRegion(storage, size)
        return list(adapters.values())

    def release(self, regions: Iterable[DeviceRegion]) -> None:
        """Release the regions, and return the allocator's cached memory to the device."""
        for region in regions:
            region.storage.resize_(0)
        if self._device.type != CPU:
            torch.cuda.empty_cache()

    def reallocate(self, regions: Iterable[DeviceRegion], heartbeat: Callable[[], None]) -> None:
        """Allocate released regions again, filled with zeros."""
        for region in regions:
            if region.wake():
                region.contents().zero_()
            heartbeat()

    def offload(
        self, regions: Sequence[DeviceRegion], heartbeat: Callable[[], None]
    ) -> "OffloadedStorages":
        """Copy the regions' contents to the host."""
        return OffloadedStorages(regions, heartbeat)

    def trim(self) -> None:
        """Do nothing: :meth:`release` already empties the allocator's cache."""

    def used_bytes(self) -> int:
        """Return the device memory that torch's allocator has reserved in this process."""
        if self._device.type == CPU:
            return host.anonymous_bytes()
        return torch.cuda.memory_reserved(self._device)

    def available_bytes(self) -> int:
        """Return the bytes that this process can still allocate on the device.

        That is the device's free memory, which counts all processes, plus memory that torch's
        caching allocator has reserved for this process and not allocated to tensors.
        """
        if self._device.type == CPU:
            return host.available_bytes()
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free_bytes(self._device) + unused


def free_bytes(device: torch.device) -> int:
    """Return a device's free memory, which counts all processes."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


class OffloadedStorages:
    """Contents of some regions, copied to host memory."""

    def __init__(self, regions: Sequence[DeviceRegion], heartbeat: Callable[[], None]) -> None:
        """Copy the regions, calling ``heartbeat`` after each.

        Raises:
            OutOfMemory: the host lacks memory for the copies; the regions are unchanged.
        """
        self._copies: list[tuple[DeviceRegion, torch.Tensor]] = []
        for region in regions:
            with blame_memory(doing="to keep a device's weights on the host", remedy=SLEEP_DEEPER):
                self._copies.append((region, region.contents().to("cpu", copy=True)))
            heartbeat()

    def restore(self, heartbeat: Callable[[], None]) -> None:
        """Copy everything back, and discard the copy."""
        for region, copy in self._copies:
            region.wake()
            region.contents().copy_(copy)
            heartbeat()
        self.close()

    def close(self) -> None:
        """Discard the copy. Harmless if repeated."""
        self._copies.clear()
