"""Where do published tensors go on a device? The same places, filled beside the steps.

It knows nothing of versions' numbers. Copies have a stream of their own, so that no step waits for
them; the thread that copies waits, so that what it says is staged is there.
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
    """All tensors of one version, as published, on a device."""

    @classmethod
    def on_device(
        cls, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeights":
        """Make room for one version there, to be filled."""
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
        """Where it is."""
        return self.final_norm.device

    def start(self) -> None:
        """Begin a new version in the same memory, and have that again if it was given back."""
        with self._copying():
            for region in self._regions:
                region.wake()
        super().start()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor that Hugging Face calls ``name`` into its place; return once it is there.

        Raises:
            WeightsRefused: as :meth:`WeightStore.load`.
        """
        with self._copying():
            super().load(name, tensor)

    def complete_from(self, other: WeightStore) -> None:
        """Copy what has not come from a whole set of the same model."""
        with self._copying():
            super().complete_from(other)

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> Adapter:
        """Refuse: no kernel adds adapters to a step's products yet."""
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
