"""Which two ends does the wire have? A ROUTER for the run, and a DEALER per engine.

They know message kinds only as far as encoding and decoding goes; what a message means is for
others.
"""

from tidegate.transport.dealer import DealerSocket
from tidegate.transport.router import FRAMES_PER_DRAIN, RouterSocket
from tidegate.transport.zeromq import SocketStatistics

__all__ = ["FRAMES_PER_DRAIN", "DealerSocket", "RouterSocket", "SocketStatistics"]
