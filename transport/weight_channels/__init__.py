"""Which way do weights travel, apart from messages? By shared memory on one host, or by files."""

from pathlib import Path

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights
from tidegate.transport.weight_channels import disk, shm
from tidegate.transport.weight_channels.base import NamedBuffer, WeightReceiver, WeightSender

__all__ = ["CHANNELS", "NamedBuffer", "WeightReceiver", "WeightSender", "receiver", "sender"]

CHANNELS = (shm.NAME, disk.NAME)
"""Those that this version has, the fastest first."""


def sender(channel: str, directory: Path | None = None) -> WeightSender:
    """The orchestrator's end. ``directory`` is where ``disk`` writes; None gives a private one.

    Raises:
        ConfigError: no such channel.
    """
    match channel:
        case shm.NAME:
            return shm.ShmSender()
        case disk.NAME:
            return disk.DiskSender(directory)
    raise ConfigError(f"no weight channel {channel!r}; there are {', '.join(CHANNELS)}")


def receiver(init: InitWeights) -> WeightReceiver:
    """An engine's end, as the sender's ``init`` asks.

    Raises:
        WeightsRefused: no such channel here, or it can't reach the sender's buffer.
    """
    match init.channel:
        case shm.NAME:
            return shm.ShmReceiver(init)
        case disk.NAME:
            return disk.DiskReceiver(init)
    raise WeightsRefused(
        f"this engine has no weight channel {init.channel!r}; it has {', '.join(CHANNELS)}"
    )
