"""Messages of the ``relay`` weight channel: hosts forward weights in a chain, once per host.

It extends the ``zmq`` channel with one fetcher per host: the first engine that asks becomes its
host's relay (:mod:`relay_node`), which fetches into memory that the host's other engines map, and
forwards chunks to the next host as they arrive. The orchestrator sends each version once. The
sender assigns parents anew for each version, in the order in which relays ask: so no relay is sent
to a dead host, and a late one is sent to a relay that has everything.

Why a chain and not a tree: with S bytes, chunks of c, a link of B bytes/s and n hosts, a chain
takes S/B + (n - 1)·c/B, and a tree with fan-out f takes f·S/B. For 125 hosts and 2 MiB chunks the
second term equals the time of 0.25 GB: a tree is faster for models smaller than that.
"""

from typing import Annotated, TypeVar

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count
from tidegate.transport.weight_channels.zmq import Chunk

NAME = "relay"

SILENT_S = 3.0
"""A parent silent for this long counts as dead."""

SIGN_OF_LIFE_S = 1.0
"""Interval of keep-alive messages from a relay that is itself waiting."""

STALL_TIMEOUT_S = 30.0
"""Timeout without a single chunk, from any parent."""

Text = Annotated[str, msgspec.Meta(max_length=256)]


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """Relay -> sender: asks which node to fetch ``location`` from."""

    location: Text
    here: Text
    """Address at which this relay serves other relays."""
    avoid: Text = ""
    """Address of the parent assigned before, if it is silent."""


class Parent(msgspec.Struct, frozen=True, array_like=True, tag="parent"):
    """Sender -> relay: assigns the node to fetch from."""

    location: str
    address: str = ""
    """Address of the parent; empty: the sender itself."""
    nbytes: Count = 0
    """Total size of the location, in bytes."""
    kept: list[str] = []
    """Locations that may still be requested; the relay may drop all others."""
    refusal: str = ""


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Engine -> its host's relay: asks for ``location`` and for progress reports."""

    location: Text


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Relay -> engine: number of leading bytes available. The first one carries the memory's
    descriptor."""

    location: str
    nbytes: Count = 0
    refusal: str = ""


Word = TypeVar("Word", Parent, Want, Ready)

_encoder = msgspec.msgpack.Encoder()
_where = msgspec.msgpack.Decoder(Where)
_parent = msgspec.msgpack.Decoder(Parent)
_want = msgspec.msgpack.Decoder(Want)
_ready = msgspec.msgpack.Decoder(Ready)


def encode(message: Where | Parent | Want | Ready) -> bytes:
    """Encode a message as one frame."""
    return _encoder.encode(message)


def decode_where(frame: bytes) -> Where | None:
    """Decode a parent request; None if the frame is something else."""
    try:
        return _where.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def decode_parent(frame: bytes) -> Parent:
    """Decode the sender's assignment.

    Raises:
        BadFrame: the frame is not a ``Parent``.
    """
    return _read(_parent, frame)


def decode_want(frame: bytes) -> Want:
    """Decode a request of an engine of this host.

    Raises:
        BadFrame: the frame is not a ``Want``.
    """
    return _read(_want, frame)


def decode_ready(frame: bytes) -> Ready:
    """Decode a message of this host's relay.

    Raises:
        BadFrame: the frame is not a ``Ready``.
    """
    return _read(_ready, frame)


def sign_of_life(location: str) -> Chunk:
    """Return a keep-alive: a chunk header without a chunk."""
    return Chunk(location, 0)


def _read(decoder: "msgspec.msgpack.Decoder[Word]", frame: bytes) -> "Word":
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable word between relays of weights: {error}") from error
