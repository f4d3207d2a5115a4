"""One weight version on a GPU, filled by a staging thread while steps continue.

Allocated by ``DeviceModel``, and filled by ``engine/weights/staging.py``. Copies use a CUDA stream
of their own, so no step waits for them; ``load`` returns once the copy is complete.
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
        return made

    _stream: torch.cuda.Stream | None = None
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
        with self._copying():
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
