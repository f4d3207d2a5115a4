"""What do the two ends of the ZeroMQ channel say to each other? They ask for bytes, and get them.

The channel is for engines on other hosts. It has sockets of its own, so that weights never stand
before other messages. An engine asks for the chunks it wants, a few ahead: so it gets no more than
it has room for, a slow one slows nobody else, and after a lost connection it asks for the rest.
"""

from collections.abc import Sequence

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count

NAME = "zmq"

CHUNK_BYTES = 2 * 1024 * 1024
"""Where the price per byte is lowest: in smaller ones each chunk costs, larger ones leave the
processor's cache before they are copied to their place."""

CHUNKS_PER_REQUEST_MAX = 4
"""A request costs two wakeups at either end."""

CHUNKS_AHEAD = 8
"""Asked for and not there yet: enough to keep a fast network busy while more are asked for."""

SEND_BUFFER_BYTES = 512 * 1024
"""Of the system, per TCP connection. It takes twice as many before they are read: a megabyte per
round trip, and no more than a core's own cache holds. With twice that, or by the system's choice,
both ends of one host took half as much time again."""


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Engine -> sender: give me the bytes ``[start, end)`` of what is at ``location``.

    They come in chunks of :data:`CHUNK_BYTES`, of which the last may be shorter.
    """

    location: str
    start: Count
    end: Count


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Sender -> engine: the bytes from ``start`` on are in the frame behind this one."""

    location: str
    start: Count
    refusal: str = ""
    """Or they are not, for this reason, and no frame follows."""


_encoder = msgspec.msgpack.Encoder()
_fetch = msgspec.msgpack.Decoder(Fetch)
_chunk = msgspec.msgpack.Decoder(Chunk)


def encode(message: Fetch | Chunk) -> bytes:
    """Turn a message into one frame."""
    return _encoder.encode(message)


def decode_fetch(frames: Sequence[bytes]) -> Fetch:
    """Read what an engine sent.

    Raises:
        BadFrame: it is no request.
    """
    if len(frames) != 1:
        raise BadFrame(f"a request for weights is one frame, but yours had {len(frames)}")
    try:
        return _fetch.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable request for weights: {error}") from error


def decode_chunk(frame: bytes) -> Chunk:
    """Read the first frame of what a sender sent.

    Raises:
        BadFrame: it announces no chunk.
    """
    try:
        return _chunk.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable answer from where weights come from: {error}") from error
