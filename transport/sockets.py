"""The two ends of the wire: the orchestrator's ZeroMQ ROUTER, and one DEALER per engine."""

from tidegate.transport.dealer import DealerSocket
from tidegate.transport.router import FRAMES_PER_DRAIN, RouterSocket
from tidegate.transport.zeromq import SocketStatistics

__all__ = ["FRAMES_PER_DRAIN", "DealerSocket", "RouterSocket", "SocketStatistics"]
