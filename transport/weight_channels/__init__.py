"""Weight channels: how the trainer's weights reach the engines.

The orchestrator publishes weights through a :func:`sender`, engines read them through a
:func:`receiver`. A run uses one channel. A new channel is one module with a ``CHANNEL`` (see
:class:`WeightChannel`), and its name in :data:`WeightChannelName`.
"""

from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.weight_channels.base import (
    NamedBuffer,
    WeightChannel,
    WeightReceiver,
    WeightReceiverConfig,
    WeightSender,
    WeightSenderConfig,
)

__all__ = [
    "CHANNELS",
    "DEFAULT",
    "DEFAULT_ACROSS_HOSTS",
    "LOCAL_CONFIG",
    "NamedBuffer",
    "WeightChannel",
    "WeightChannelName",
    "WeightReceiver",
    "WeightReceiverConfig",
    "WeightSender",
    "readable_channels",
    "receiver",
    "sender",
    "weight_channel",
]

WeightChannelName = Literal["shm", "cuda_ipc", "zmq", "relay", "collective", "disk"]
"""Names of the weight channels, the fastest first; each is a module of this folder."""

CHANNELS: tuple[WeightChannelName, ...] = get_args(WeightChannelName)

DEFAULT: WeightChannelName = "shm"

DEFAULT_ACROSS_HOSTS: WeightChannelName = "relay"

LOCAL_CONFIG = WeightReceiverConfig()
"""Configuration of an engine that needs no network to fetch weights, because the buffer is on its
host."""


def weight_channel(name: str) -> WeightChannel:
    """Return a channel; only its own module is imported.

    Raises:
        ConfigError: there is no such channel.
    """
    if name not in CHANNELS:
        raise ConfigError(f"no weight channel {name!r}; there are {', '.join(CHANNELS)}")
    channel: WeightChannel = import_module(f"{__name__}.{name}").CHANNEL
    return channel


def readable_channels(*, has_gpu: bool, ranks: int = 1) -> list[WeightChannelName]:
    """Return the channels that an engine of so many ranks can read, on a GPU or on the CPU."""
    channels = ((name, weight_channel(name)) for name in CHANNELS)
    return [
        name
        for name, channel in channels
        if (has_gpu or not channel.needs_gpu) and (ranks == 1 or not channel.one_reader)
    ]


def sender(
    channel: str,
    directory: Path | None = None,
    *,
    address: str | None = None,
    keys: OrchestratorKeys | None = None,
    device: str = "cpu",
) -> WeightSender:
    """Create the orchestrator's end of a channel; arguments as in :class:`WeightSenderConfig`.

    Raises:
        ConfigError: the channel is unknown, its files or sockets cannot be created, or there is no
            such GPU.
    """
    config = WeightSenderConfig(directory, address, keys, device)
    return weight_channel(channel).open_sender(config)


def receiver(init: InitWeights, config: WeightReceiverConfig = LOCAL_CONFIG) -> WeightReceiver:
    """Create an engine's end; ``config`` is how it reaches its orchestrator.

    Raises:
        WeightsRefused: the channel is unknown here, or the sender's buffer is unreachable.
    """
    if init.channel not in CHANNELS:
        raise WeightsRefused(
            f"this engine has no weight channel {init.channel!r}; it has {', '.join(CHANNELS)}"
        )
    return weight_channel(init.channel).open_receiver(init, config)
