"""How does a device's memory sleep? Tensors let go of it, and have some again in the same tensors.

A storage without bytes is still what its views are views of: so nobody who holds one need be told.
That torch has it again elsewhere is no matter, for no kernel keeps an address from step to step.
It knows nothing of what the memory is for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tidegate.engine.device.devices import CPU
from tidegate.engine.memory import returned_memory as host
from tidegate.engine.memory.memory import blame_memory

FREE_FIRST = "free what took its place, then wake it again"

SLEEP_DEEPER = "sleep at level 2, which keeps none, or leave the machine more"


@dataclass(frozen=True, slots=True)
class DeviceRegion:
    """A piece of a device's memory."""

    storage: torch.UntypedStorage
    nbytes: int
    """What it has while it doesn't sleep."""

    def wake(self) -> bool:
        """Have the memory again if it is gone, with whatever is in it; whether it was gone."""
        was_gone = self.storage.nbytes() != self.nbytes
        if was_gone:
            with blame_memory(doing="to wake what slept on a device", remedy=FREE_FIRST):
                self.storage.resize_(self.nbytes)
        return was_gone

    def contents(self) -> torch.Tensor:
        """All of its bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage)


class DeviceMemory:
    """One device's memory, as :class:`~tidegate.engine.execution.sleep.Sleeper` uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}
        """What each storage has awake, by its identity; storages live as long as the engine."""

    def regions_of(self, tensors: Iterable[torch.Tensor]) -> list[DeviceRegion]:
        """The memory behind these tensors, each piece once, also while it is given back."""
        found: dict[int, DeviceRegion] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = self._sizes.setdefault(storage._cdata, storage.nbytes())
            found[storage._cdata] = DeviceRegion(storage, size)
        return list(found.values())

    def give_back(self, regions: Iterable[DeviceRegion]) -> None:
        """Let the device have it."""
        for region in regions:
            region.storage.resize_(0)
        if self._device.type != CPU:
            torch.cuda.empty_cache()

    def take_again(self, regions: Iterable[DeviceRegion], beat: Callable[[], None]) -> None:
        """Have what was given back, as zeros."""
        for region in regions:
            if region.wake():
                region.contents().zero_()
            beat()

    def offload(
        self, regions: Sequence[DeviceRegion], beat: Callable[[], None]
    ) -> "OffloadedStorages":
        """Copy it to the host."""
        return OffloadedStorages(regions, beat)

    def trim(self) -> None:
        """Nothing else is kept: :meth:`give_back` has torch let go of it too."""

    def used_bytes(self) -> int:
        """What this process has of the device."""
        if self._device.type == CPU:
            return host.anonymous_bytes()
        return torch.cuda.memory_reserved(self._device)

    def available_bytes(self) -> int:
        """What the device can still hand out."""
        if self._device.type == CPU:
            return host.available_bytes()
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + unused


class OffloadedStorages:
    """What some regions held, in the host's memory."""

    def __init__(self, regions: Sequence[DeviceRegion], beat: Callable[[], None]) -> None:
        """Copy them. ``beat`` is called now and then meanwhile.

        Raises:
            OutOfMemory: the host has no room for them; they are where they were.
        """
        self._held: list[tuple[DeviceRegion, torch.Tensor]] = []
        for region in regions:
            with blame_memory(doing="to keep a device's weights on the host", remedy=SLEEP_DEEPER):
                self._held.append((region, region.contents().to("cpu", copy=True)))
            beat()

    def restore(self, beat: Callable[[], None]) -> None:
        """Put all of it back where it was, and forget it."""
        for region, held in self._held:
            region.wake()
            region.contents().copy_(held)
            beat()
        self.close()

    def close(self) -> None:
        """Forget it. Harmless if repeated."""
        self._held.clear()
