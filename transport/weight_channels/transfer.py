"""Progress of a chunked transfer of weights: which chunks have arrived, and what to request next.

The ``zmq`` receiver and the relay node use it; it does not know who sends the chunks.
"""

import numpy as np
import zmq

from tidegate.errors import BadFrame, WeightsRefused
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_AHEAD,
    CHUNKS_PER_REQUEST_MAX,
    ChunkHeader,
    FetchRequest,
    decode_chunk_header,
)
from tidegate.transport.zeromq import Socket, skip_frames


class Transfer:
    """Tracks which chunks of one buffer have arrived, are requested, or are still to be
    requested."""

    def __init__(self, location: str, buffer: memoryview, *, start: int = 0) -> None:
        """Bytes before ``start``, a chunk boundary, are valid already."""
        self._location = location
        self._buffer = buffer
        self._next_start = start
        """Offset from which nothing has been requested yet."""
        self._requested: dict[int, memoryview] = {}
        """Requested chunks that have not arrived, by start in ascending order, with their buffer
        slices."""

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that have not arrived."""
        requested_bytes = sum(target.nbytes for target in self._requested.values())
        return self._buffer.nbytes - self._next_start + requested_bytes

    def has(self, end: int) -> bool:
        """Return whether all bytes before ``end`` have arrived."""
        return self.complete_bytes >= end

    @property
    def complete_bytes(self) -> int:
        """Number of leading bytes that have arrived without a gap."""
        return min(self._requested, default=self._next_start)

    def has_chunk(self, start: int) -> bool:
        """Return whether the chunk at ``start`` has arrived."""
        return start < self._next_start and start not in self._requested

    def next_requests(self) -> list[FetchRequest]:
        """Return the requests to send now; each asks for several chunks, once that many fit the
        window."""
        requests = []
        while (
            self._next_start < self._buffer.nbytes
            and len(self._requested) + CHUNKS_PER_REQUEST_MAX <= CHUNKS_AHEAD
        ):
            start = self._next_start
            end = min(start + CHUNKS_PER_REQUEST_MAX * CHUNK_BYTES, self._buffer.nbytes)
            for chunk_start in range(start, end, CHUNK_BYTES):
                self._requested[chunk_start] = self._buffer[
                    chunk_start : min(chunk_start + CHUNK_BYTES, end)
                ]
            requests.append(FetchRequest(self._location, start, end))
            self._next_start = end
        return requests

    def outstanding(self) -> list[FetchRequest]:
        """Return requests for all chunks that were requested and have not arrived."""
        return [
            FetchRequest(self._location, start, start + target.nbytes)
            for start, target in self._requested.items()
        ]

    def buffer_for(self, chunk: ChunkHeader) -> memoryview | None:
        """Return the buffer slice for a chunk; None for a duplicate or another transfer.

        Raises:
            WeightsRefused: the sender does not have it.
        """
        if chunk.refusal and chunk.location in ("", self._location):
            raise WeightsRefused(f"weights can't be fetched: {chunk.refusal}")
        return self._requested.get(chunk.start) if chunk.location == self._location else None

    def mark_arrived(self, chunk: ChunkHeader) -> None:
        """Mark a chunk as arrived."""
        del self._requested[chunk.start]


def keep_freed_chunks() -> None:
    """Make glibc's malloc keep the memory of freed chunks, if it has its default settings.

    By default glibc returns several freed blocks of this size to the system, and a page's first
    touch costs ten times a copy. Freeing a larger block raises its dynamic mmap threshold: this
    block, which is never touched, is as large as all chunks that can be in flight.
    """
    np.empty(CHUNKS_AHEAD * CHUNK_BYTES, np.uint8)


def receive_chunk(
    socket: Socket, transfer: Transfer, address: str, *, flags: int = zmq.NOBLOCK
) -> int | None:
    """Read one answer; return the chunk's start, or None if this transfer does not wait for it.

    With ``flags=0`` it blocks up to the socket's receive timeout, otherwise not at all.

    Raises:
        zmq.Again: nothing has arrived.
        WeightsRefused: the sender at ``address`` does not have the chunk, or sent something else.
    """
    header = socket.recv(flags, copy=False)
    try:
        chunk = decode_chunk_header(header.bytes)
        target = transfer.buffer_for(chunk)
        if target is None or not header.more:
            if header.more:
                skip_frames(socket)
            return None
        received = socket.recv_into(target, flags=zmq.NOBLOCK)
    except BadFrame as error:
        raise WeightsRefused(str(error)) from error
    if received != target.nbytes or socket.getsockopt(zmq.RCVMORE):
        raise WeightsRefused(
            f"{address} sent {received} bytes of weights where {target.nbytes} were asked for"
        )
    transfer.mark_arrived(chunk)
    return chunk.start
