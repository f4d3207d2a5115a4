"""Opens a model directory for a GPU, and refuses models and settings that have no GPU support yet.

Refuses before anything is loaded.
"""

import os
from pathlib import Path

import torch
from typing_extensions import override

from tidegate.engine.device.runner import DeviceRunner
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.execution.runner import Runner
from tidegate.engine.execution.served_model import SMALLER_MODEL, DtypeChoice, OwnModel
from tidegate.engine.memory.out_of_memory import blame_memory
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import fill_from_directory
from tidegate.errors import ConfigError, ModelNotComputed
from tidegate.kernels.native import Native
from tidegate.kernels.residual_norm import WIDTH_MAX

GRAPHS_VARIABLE = "TIDEGATE_CUDA_GRAPHS"
"""Environment variable that is 0 to run every step without CUDA graphs."""


def open_on_device(path: Path, dtype: DtypeChoice, device: torch.device) -> "DeviceModel":
    """Open the model in ``path`` for ``device``.

    Raises:
        ModelError: no implementation can compute it.
        ConfigError: only an engine on the CPU can.
    """
    try:
        config = ModelConfig.from_directory(path)
    except ModelNotComputed as error:
        raise ConfigError(
            f"device={device}: {error}, and transformers models run on the CPU only; "
            f"serve another model, or set device to cpu"
        ) from error
    if config.experts is not None:
        raise ConfigError(
            f"device={device}: {config.architecture} is a mixture of experts, which is not "
            f"supported on devices yet; serve a dense model, or set device to cpu"
        )
    if config.hidden_size > WIDTH_MAX:
        raise ConfigError(
            f"device={device}: {config.architecture} has hidden_size {config.hidden_size}, and the "
            f"kernels' norms are {WIDTH_MAX} wide at most; set device to cpu"
        )
    return DeviceModel(path, config, dtype, device)


def refuse_on_device(
    device: torch.device,
    *,
    is_deterministic: bool,
    quantization: str | None,
    tensor_parallel_size: int,
    speculative_method: str | None,
) -> None:
    """Refuse settings that have no GPU support yet.

    Raises:
        ConfigError: a setting has no GPU support.
    """
    draft_model = (
        speculative_method
        if speculative_method and speculative_method.startswith("draft:")
        else None
    )
    settings = {
        "deterministic": is_deterministic or None,
        "quantization": quantization,
        "tensor_parallel_size": tensor_parallel_size if tensor_parallel_size > 1 else None,
        "speculative_method": draft_model,
    }
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is not supported yet on device={device}; leave {name} out, or "
                "set device to cpu"
            )


class DeviceModel(OwnModel):
    """A model with Tidegate's own implementation, on a GPU."""

    def __init__(
        self, path: Path, config: ModelConfig, dtype: DtypeChoice, device: torch.device
    ) -> None:
        super().__init__(path, config, dtype)
        self._device = device

    @override
    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        with blame_memory(doing=f"for the weights of {self._path}", remedy=SMALLER_MODEL):
            weights = self.allocate()
            fill_from_directory(weights, self._path)
        return DeviceRunner(
            self._config,
            weights,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            has_graphs=os.environ.get(GRAPHS_VARIABLE) != "0",
        )

    @override
    def allocate(self) -> DeviceWeights:
        return DeviceWeights.on_device(self._config, self._dtype, self._device)

    def _find_native(self) -> Native | None:
        return None
