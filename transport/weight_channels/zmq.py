"""Messages of the ``zmq`` weight channel, in which engines on other hosts pull chunks of a buffer.

The channel has sockets of its own, so weights never delay other messages. An engine requests the
chunks it wants, a few ahead: so it gets no more than it has room for, a slow engine slows no other,
and after a lost connection it requests the rest.
"""

from collections.abc import Sequence

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count

NAME = "zmq"

CHUNK_BYTES = 2 * 1024 * 1024
"""Chunk size with the lowest cost per byte: smaller chunks cost per-chunk overhead, larger ones
leave the CPU cache before they are copied."""

CHUNKS_PER_REQUEST_MAX = 4
"""Chunks per request, because a request costs two wakeups at either end."""

CHUNKS_AHEAD = 8
"""Maximum number of requested chunks in flight: enough to keep a fast network busy."""

SEND_BUFFER_BYTES = 512 * 1024
"""TCP send buffer. The system holds twice as many bytes before they are read: a megabyte per round
trip, and no more than a core's own cache. Twice that, or the system's default, took half as much
time again between two processes of one host."""


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Engine -> sender: requests the bytes ``[start, end)`` of ``location``.

    They arrive in chunks of :data:`CHUNK_BYTES`, of which the last may be shorter.
    """

    location: str
    start: Count
    end: Count


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Sender -> engine: header of the chunk at ``start``, whose bytes are in the next frame."""

    location: str
    start: Count
    refusal: str = ""
    """Reason why the chunk cannot be sent; no frame follows then. Empty: it is sent."""


_encoder = msgspec.msgpack.Encoder()
_fetch = msgspec.msgpack.Decoder(FetchRequest)
_chunk = msgspec.msgpack.Decoder(ChunkHeader)


def encode(message: FetchRequest | ChunkHeader) -> bytes:
    """Encode a message as one frame."""
    return _encoder.encode(message)


def decode_fetch_request(frames: Sequence[bytes]) -> FetchRequest:
    """Decode an engine's request.

    Raises:
        BadFrame: the frames are not a request.
    """
    if len(frames) != 1:
        raise BadFrame(f"a request for weights is one frame, but yours had {len(frames)}")
    try:
        return _fetch.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable request for weights: {error}") from error


def decode_chunk_header(frame: bytes) -> ChunkHeader:
    """Decode the first frame of a sender's answer.

    Raises:
        BadFrame: the frame is not a chunk header.
    """
    try:
        return _chunk.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable answer from where weights come from: {error}") from error
