"""Ways for weights besides messages: shared memory, ZeroMQ, relays, torch.distributed, files.

A run uses one of them; only that one's module is imported.
"""

from pathlib import Path

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.weight_channels.base import Home, NamedBuffer, WeightReceiver, WeightSender

__all__ = [
    "CHANNELS",
    "NOWHERE",
    "Home",
    "NamedBuffer",
    "WeightReceiver",
    "WeightSender",
    "receiver",
    "sender",
]

CHANNELS = ("shm", "zmq", "relay", "collective", "disk")
"""Those that this version has, the fastest first."""

NOWHERE = Home()
"""For engines that need no way to their orchestrator: the buffer is on their host."""


def sender(
    channel: str,
    directory: Path | None = None,
    *,
    address: str | None = None,
    keys: OrchestratorKeys | None = None,
) -> WeightSender:
    """The orchestrator's end.

    ``disk`` writes into ``directory``, None is a private one. ``zmq``, ``relay`` and ``collective``
    listen beside ``address``, where the orchestrator does, and let in whom ``keys`` do.

    Raises:
        ConfigError: no such channel, or nothing can be written or bound there.
    """
    match channel:
        case "shm":
            from tidegate.transport.weight_channels.shm import ShmSender

            return ShmSender()
        case "zmq":
            from tidegate.transport.weight_channels.zmq_sender import ZmqSender

            return ZmqSender(address, keys=keys)
        case "relay":
            from tidegate.transport.weight_channels.relay_sender import RelaySender

            return RelaySender(address, keys=keys)
        case "collective":
            from tidegate.transport.weight_channels.collective_sender import CollectiveSender

            return CollectiveSender(address, keys=keys)
        case "disk":
            from tidegate.transport.weight_channels.disk import DiskSender

            return DiskSender(directory)
    raise ConfigError(f"no weight channel {channel!r}; there are {', '.join(CHANNELS)}")


def receiver(init: InitWeights, home: Home = NOWHERE) -> WeightReceiver:
    """An engine's end, as the sender's ``init`` asks; ``home`` is how it reaches its orchestrator.

    Raises:
        WeightsRefused: no such channel here, or it can't reach the sender's buffer.
    """
    match init.channel:
        case "shm":
            from tidegate.transport.weight_channels.shm import ShmReceiver

            return ShmReceiver(init)
        case "zmq":
            from tidegate.transport.weight_channels.zmq_receiver import ZmqReceiver

            return ZmqReceiver(init, home)
        case "relay":
            from tidegate.transport.weight_channels.relay_receiver import RelayReceiver

            return RelayReceiver(init, home)
        case "collective":
            from tidegate.transport.weight_channels.collective_receiver import CollectiveReceiver

            return CollectiveReceiver(init, home)
        case "disk":
            from tidegate.transport.weight_channels.disk import DiskReceiver

            return DiskReceiver(init)
    raise WeightsRefused(
        f"this engine has no weight channel {init.channel!r}; it has {', '.join(CHANNELS)}"
    )
