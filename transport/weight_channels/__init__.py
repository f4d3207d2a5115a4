"""Weight channels: shared memory, ZeroMQ, relay chain, torch.distributed broadcast, and files.

The orchestrator publishes weights through a :func:`sender`, engines read them through a
:func:`receiver`. A run uses one channel; only that channel's module is imported. Built on
``base.py`` (the interfaces) and one module per channel.
"""

from pathlib import Path

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.weight_channels.base import (
    NamedBuffer,
    WeightReceiver,
    WeightReceiverConfig,
    WeightSender,
)

__all__ = [
    "CHANNELS",
    "LOCAL_CONFIG",
    "NamedBuffer",
    "WeightReceiver",
    "WeightReceiverConfig",
    "WeightSender",
    "receiver",
    "sender",
]

CHANNELS = ("shm", "zmq", "relay", "collective", "disk")
"""Names of the available channels, the fastest first."""

LOCAL_CONFIG = WeightReceiverConfig()
"""Configuration of an engine that needs no network to fetch weights, because the buffer is on its
host."""


def sender(
    channel: str,
    directory: Path | None = None,
    *,
    address: str | None = None,
    keys: OrchestratorKeys | None = None,
) -> WeightSender:
    """Create the orchestrator's end of a channel.

    ``disk`` writes into ``directory``, or a private one if None. ``zmq``, ``relay`` and
    ``collective`` listen on the interface of the orchestrator's ``address``, and admit the same
    ``keys``.

    Raises:
        ConfigError: the channel is unknown, or its files or sockets cannot be created.
    """
    match channel:
        case "shm":
            from tidegate.transport.weight_channels.shm import ShmSender

            return ShmSender()
        case "zmq":
            from tidegate.transport.weight_channels.zmq import ZmqSender

            return ZmqSender(address, keys=keys)
        case "relay":
            from tidegate.transport.weight_channels.relay import RelaySender

            return RelaySender(address, keys=keys)
        case "collective":
            from tidegate.transport.weight_channels.collective_sender import CollectiveSender

            return CollectiveSender(address, keys=keys)
        case "disk":
            from tidegate.transport.weight_channels.disk import DiskSender

            return DiskSender(directory)
    raise ConfigError(f"no weight channel {channel!r}; there are {', '.join(CHANNELS)}")


def receiver(init: InitWeights, config: WeightReceiverConfig = LOCAL_CONFIG) -> WeightReceiver:
    """Create an engine's end; ``config`` is how it reaches its orchestrator.

    Raises:
        WeightsRefused: the channel is unknown here, or the sender's buffer is unreachable.
    """
    match init.channel:
        case "shm":
            from tidegate.transport.weight_channels.shm import ShmReceiver

            return ShmReceiver(init)
        case "zmq":
            from tidegate.transport.weight_channels.zmq import ZmqReceiver

            return ZmqReceiver(init, config)
        case "relay":
            from tidegate.transport.weight_channels.relay_receiver import RelayReceiver

            return RelayReceiver(init, config)
        case "collective":
            from tidegate.transport.weight_channels.collective_receiver import CollectiveReceiver

            return CollectiveReceiver(init, config)
        case "disk":
            from tidegate.transport.weight_channels.disk import DiskReceiver

            return DiskReceiver(init)
    raise WeightsRefused(
        f"this engine has no weight channel {init.channel!r}; it has {', '.join(CHANNELS)}"
    )
