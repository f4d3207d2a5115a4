"""Which way do weights travel, apart from messages? In shared memory, by ZeroMQ, by relays, by
torch.distributed, or as files."""

from pathlib import Path

from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.weight_channels import collective, disk, relay, shm, zmq
from tidegate.transport.weight_channels.base import Home, NamedBuffer, WeightReceiver, WeightSender
from tidegate.transport.weight_channels.collective_receiver import CollectiveReceiver
from tidegate.transport.weight_channels.collective_sender import CollectiveSender
from tidegate.transport.weight_channels.relay_receiver import RelayReceiver
from tidegate.transport.weight_channels.relay_sender import RelaySender
from tidegate.transport.weight_channels.zmq_receiver import ZmqReceiver
from tidegate.transport.weight_channels.zmq_sender import ZmqSender

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

CHANNELS = (shm.NAME, zmq.NAME, relay.NAME, collective.NAME, disk.NAME)
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
        case shm.NAME:
            return shm.ShmSender()
        case zmq.NAME:
            return ZmqSender(address, keys=keys)
        case relay.NAME:
            return RelaySender(address, keys=keys)
        case collective.NAME:
            return CollectiveSender(address, keys=keys)
        case disk.NAME:
            return disk.DiskSender(directory)
    raise ConfigError(f"no weight channel {channel!r}; there are {', '.join(CHANNELS)}")


def receiver(init: InitWeights, home: Home = NOWHERE) -> WeightReceiver:
    """An engine's end, as the sender's ``init`` asks; ``home`` is how it reaches its orchestrator.

    Raises:
        WeightsRefused: no such channel here, or it can't reach the sender's buffer.
    """
    match init.channel:
        case shm.NAME:
            return shm.ShmReceiver(init)
        case zmq.NAME:
            return ZmqReceiver(init, home)
        case relay.NAME:
            return RelayReceiver(init, home)
        case collective.NAME:
            return CollectiveReceiver(init, home)
        case disk.NAME:
            return disk.DiskReceiver(init)
    raise WeightsRefused(
        f"this engine has no weight channel {init.channel!r}; it has {', '.join(CHANNELS)}"
    )
