"""How far has a transfer of weights come, chunk by chunk, and what is to be asked for next?

It knows one buffer and the chunks of it; not who sends them, and of sockets only how to read one.
"""

import numpy as np
import zmq

from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_AHEAD,
    CHUNKS_PER_REQUEST_MAX,
    Chunk,
    Fetch,
    decode_chunk,
)
from tidegate.transport.zeromq import Socket, skip_frames


class Transfer:
    """Which chunks of one buffer are there, on their way, and still to be asked for."""

    def __init__(self, location: str, buffer: memoryview, *, start: int = 0) -> None:
        """Bytes before ``start``, the beginning of a chunk, are there already."""
        self._location = location
        self._buffer = buffer
        self._unasked = start
        """From where on nothing was asked for."""
        self._asked: dict[int, memoryview] = {}
        """Start of each chunk that is on its way, in order -> its place."""

    @property
    def missing_bytes(self) -> int:
        """That have not arrived."""
        on_their_way = sum(place.nbytes for place in self._asked.values())
        return self._buffer.nbytes - self._unasked + on_their_way

    def has(self, end: int) -> bool:
        """Whether all before ``end`` is there."""
        return self.complete_bytes >= end

    @property
    def complete_bytes(self) -> int:
        """How many there are from the beginning on without a gap."""
        return min(self._asked, default=self._unasked)

    def has_chunk(self, start: int) -> bool:
        """Whether the chunk that begins there has come."""
        return start < self._unasked and start not in self._asked

    def next_requests(self) -> list[Fetch]:
        """What to ask for now: several chunks at once, when there is room for them."""
        requests = []
        while (
            self._unasked < self._buffer.nbytes
            and len(self._asked) + CHUNKS_PER_REQUEST_MAX <= CHUNKS_AHEAD
        ):
            start = self._unasked
            end = min(start + CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES, self._buffer.nbytes)
            for at in range(start, end, CHUNK_BYTES):
                self._asked[at] = self._buffer[at : min(at + CHUNK_BYTES, end)]
            requests.append(Fetch(self._location, start, end))
            self._unasked = end
        return requests

    def outstanding(self) -> list[Fetch]:
        """What was asked for and has not come."""
        return [
            Fetch(self._location, start, start + place.nbytes)
            for start, place in self._asked.items()
        ]

    def place_of(self, chunk: Chunk) -> memoryview | None:
        """Where a chunk belongs; None if it is not of this transfer, or there already.

        Raises:
            WeightsRefused: the sender doesn't have it.
        """
        if chunk.refusal and chunk.location in ("", self._location):
            raise WeightsRefused(f"weights can't be fetched: {chunk.refusal}")
        return self._asked.get(chunk.start) if chunk.location == self._location else None

    def got(self, chunk: Chunk) -> None:
        """It is in its place."""
        del self._asked[chunk.start]


def keep_freed_chunks() -> None:
    """Have the C library keep memory that chunks came in, where it is glibc with its own settings.

    By its rules several that are freed at once go back to the system, and a page's first touch
    costs ten times a copy. When a larger block is freed it takes such sizes for usual: this one,
    which is never touched, is as large as all that can be on its way.
    """
    np.empty(CHUNKS_AHEAD * CHUNK_BYTES, np.uint8)


def take_chunk(
    socket: Socket, transfer: Transfer, address: str, *, flags: int = zmq.NOBLOCK
) -> int | None:
    """Read one answer; where the chunk begins, if it was one that this transfer waits for.

    By ``flags`` of 0 it waits as long as the socket may, else not at all.

    Raises:
        zmq.Again: none has come.
        WeightsRefused: the sender at ``address`` hasn't got it, or sent something else.
    """
    header = socket.recv(flags, copy=False)
    try:
        chunk = decode_chunk(header.bytes)
        place = transfer.place_of(chunk)
        if place is None or not header.more:
            if header.more:
                skip_frames(socket)
            return None
        received = socket.recv_into(place, flags=zmq.NOBLOCK)
    except BadFrame as error:
        raise WeightsRefused(str(error)) from error
    if received != place.nbytes or socket.getsockopt(zmq.RCVMORE):
        raise WeightsRefused(
            f"{address} sent {received} bytes of weights where {place.nbytes} were asked for"
        )
    transfer.got(chunk)
    return chunk.start
