"""One weight version on a GPU, filled by a staging thread while steps continue.

Copies use a CUDA stream of their own, so no step waits for them; ``load`` returns once the copy is
complete. Host tensors go through pinned memory, from which the device copies without the CPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tidegate.engine.device.devices import CPU
from tidegate.engine.device.memory import DeviceMemory, DeviceRegion
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.weights.lora import Adapter
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import WeightsRefused

PINNED_BYTES = 16 * 1024 * 1024
"""Size of each of two pinned buffers. A PCIe 5 link takes 0.3 ms for it, and a launch 5 us."""


class PinnedTransfer:
    """Copies host tensors to a device by two pinned buffers: one is filled while one is sent."""

    def __init__(self, device: torch.device, buffer_bytes: int = PINNED_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._buffers: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, complete once the current stream gets there.

        The tensor is free to change when this returns.
        """
        is_pinned = self._device.type != CPU
        if not self._buffers:
            for _ in range(2):
                made = torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=is_pinned)
                self._buffers.append(made)
            if is_pinned:
                self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        target = copied.view(-1).view(torch.uint8)
        for number, start in enumerate(range(0, source.numel(), self._buffer_bytes)):
            part = slice(start, start + self._buffer_bytes)
            if self._sent:
                self._sent[number % 2].synchronize()
            buffer = self._buffers[number % 2][: source[part].numel()]
            buffer.copy_(source[part])
            target[part].copy_(buffer, non_blocking=True)
            if self._sent:
                self._sent[number % 2].record()
        return copied


class DeviceWeights(Weights):
    """All tensors of one version in their published layout, on a device."""

    @classmethod
    def on_device(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeights":
        """Allocate memory for one version on ``device``."""
        with device:
            made = cls.allocate(config, dtype, is_packed=False)
        assert isinstance(made, DeviceWeights)
        made._regions = DeviceMemory(device).regions_of(made.tensors())
        made._stream = None if device.type == CPU else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        made._transfer = PinnedTransfer(device)
        return made

    _stream: torch.cuda.Stream | None = None
    _transfer: PinnedTransfer | None = None
    _regions: Sequence[DeviceRegion] = ()

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.final_norm.device

    def start(self) -> None:
        """Begin a new version in the same memory, allocating it again if it sleeps."""
        with self._copying():
            for region in self._regions:
                region.wake()
        super().start()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor that Hugging Face calls ``name`` to its targets; return once the copy is
        complete.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        is_stored = name in self._copy_targets or name in self._joint_targets
        with self._copying():
            if is_stored and self._transfer is not None and tensor.device.type == CPU:
                tensor = self._transfer.send(tensor)
            super().load(name, tensor)

    def complete_from(self, other: WeightStore) -> None:
        """Copy the tensors that have not been loaded from a complete version of the same model."""
        with self._copying():
            super().complete_from(other)

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> Adapter:
        """Refuse: no GPU kernel applies LoRA adapters yet."""
        raise WeightsRefused(
            f"an engine on {self.device} serves no LoRA adapters yet; merge them into the weights, "
            f"and publish those, or set device to cpu"
        )

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
