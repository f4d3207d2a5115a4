"""Sender of a run's weight channel (shared memory, ZeroMQ, files, …), by the setting
``weight_channel``.

``trainer/run.py`` opens the channel, and the publish path writes each version to it. Uses torch;
the senders are in ``transport/weight_channels/``.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.orchestrator.fleet.launcher import EngineLauncher
from tidegate.orchestrator.settings.config import WeightSettings
from tidegate.orchestrator.weight_sync.state_dict import distinct_tensors
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels import WeightSender, cuda_ipc, sender
from tidegate.transport.weight_channels.checksums import with_checksums
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcSender, NamedTensor, crc32_of
from tidegate.transport.weight_channels.cuda_memory import find_gpu

if TYPE_CHECKING:
    import torch


def open_channel(
    settings: WeightSettings, launcher: EngineLauncher, *, device: str, run_directory: Path | None
) -> WeightSender | CudaIpcSender:
    """Open the run's end of its weight channel.

    Raises:
        ConfigError: the channel can't write or bind there, or there is no such GPU.
    """
    if settings.weight_channel == cuda_ipc.NAME:
        try:
            return CudaIpcSender(find_gpu(device))
        except WeightsRefused as error:
            raise ConfigError(f"weight_channel='cuda_ipc': {error}") from error
    return sender(
        settings.weight_channel, run_directory, address=launcher.address, keys=launcher.keys
    )


def write_on_gpu(
    channel: CudaIpcSender,
    version: int,
    state_dict: "Mapping[str, torch.Tensor]",
    *,
    keep: Collection[int],
    has_checksums: bool,
) -> list[UpdateWeights]:
    """Write a state dict where engines on its GPU can read it. Blocks.

    Raises:
        WeightsRefused: a tensor is not on that GPU, or its memory does not suffice.
    """
    tensors = [NamedTensor(*named) for named in distinct_tensors(state_dict)]
    # Computed over the source tensors, so that copy errors are detected too.
    checksums = {tensor.name: crc32_of(tensor.data) for tensor in tensors} if has_checksums else {}
    chunks = channel.write(version, tensors, keep=keep)
    return with_checksums(chunks, checksums) if checksums else chunks
