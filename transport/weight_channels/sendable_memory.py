"""What do weights lie in that ZeroMQ sends without a copy? Memory, and the frames that show it.

It knows neither versions nor sockets. A frame over memory that isn't its own costs a message to a
thread of pyzmq's when the last of its copies was sent, as long as it is made anew for each sending:
so each is made once, and sent as often as it is asked for.
"""

import numpy as np
import zmq

from tidegate.transport.weight_channels.zmq import CHUNK_BYTES


class SendableMemory:
    """Some bytes, for one thread to write and one to send."""

    def __init__(self, nbytes: int) -> None:
        """Not touched yet."""
        self.bytes = np.empty(nbytes, np.uint8)
        self._frames: dict[int, zmq.Frame] = {}
        """By their start: those of whole chunks, at multiples of their size."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.bytes)

    def frame(self, start: int, end: int) -> zmq.Frame:
        """Shows the bytes ``[start, end)``, whatever is written there until they are sent."""
        if start % CHUNK_BYTES or end - start != CHUNK_BYTES:
            return self._made(start, end)
        frame = self._frames.get(start)
        if frame is None:
            frame = self._frames[start] = self._made(start, end)
        return frame

    def _made(self, start: int, end: int) -> zmq.Frame:
        return zmq.Frame(self.bytes.data[start:end], copy=False)
