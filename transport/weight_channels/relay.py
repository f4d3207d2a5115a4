"""How do weights reach many hosts, each over the network once? From host to host, in a chain.

The channel is ``zmq``'s, with one fetcher per host: the first engine there to ask becomes the
host's relay (:mod:`relay_node`), which fetches into memory that the host's other engines map, and
hands chunks on to the next host as they come. The orchestrator sends each version once. Who fetches
from whom is settled for each version anew, by the order in which relays ask the sender: so a host
that is gone is asked by nobody, and one that comes late is told of whoever has it all.

Why a chain and not a tree: with S bytes, chunks of c, a link of B bytes/s and n hosts, a chain
takes S/B + (n - 1)·c/B, whatever fans out by f takes f·S/B. For 125 hosts and 2 MiB chunks the
second term is 0.25 GB of time: a tree wins for models that are smaller than that.
"""

from typing import Annotated, TypeVar

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count
from tidegate.transport.weight_channels.zmq import Chunk

NAME = "relay"

SILENT_S = 3.0
"""Whom one fetches from is taken for dead after so long without a word."""

SIGN_OF_LIFE_S = 1.0
"""How often a relay says to those who wait that it waits itself."""

STALL_TIMEOUT_S = 30.0
"""Without a single chunk, whoever is asked."""

Text = Annotated[str, msgspec.Meta(max_length=256)]


class Where(msgspec.Struct, frozen=True, array_like=True, tag="where"):
    """Relay -> sender: from whom do I fetch what is at ``location``?"""

    location: Text
    here: Text
    """Where this relay hands it on to others."""
    avoid: Text = ""
    """Whom it was told of before, and who is silent."""


class Parent(msgspec.Struct, frozen=True, array_like=True, tag="parent"):
    """Sender -> relay: from there."""

    location: str
    address: str = ""
    """Empty: from the sender itself."""
    nbytes: Count = 0
    """Of all that is there."""
    kept: list[str] = []
    """Locations that may be asked for still; of all others nothing need be kept."""
    refusal: str = ""


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Engine -> its host's relay: tell me how much of ``location`` there is."""

    location: Text


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Relay -> engine: so many bytes from the beginning on. The first comes with the memory."""

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
    """Turn a message into one frame."""
    return _encoder.encode(message)


def decode_where(frame: bytes) -> Where | None:
    """Read a question; None if it is something else."""
    try:
        return _where.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def decode_parent(frame: bytes) -> Parent:
    """Read the answer.

    Raises:
        BadFrame: it is none.
    """
    return _read(_parent, frame)


def decode_want(frame: bytes) -> Want:
    """Read what an engine of this host wants.

    Raises:
        BadFrame: it is no such thing.
    """
    return _read(_want, frame)


def decode_ready(frame: bytes) -> Ready:
    """Read what this host's relay says.

    Raises:
        BadFrame: it is no such thing.
    """
    return _read(_ready, frame)


def sign_of_life(location: str) -> Chunk:
    """A chunk's header without a chunk: it is not here yet, but it will come."""
    return Chunk(location, 0)


def _read(decoder: "msgspec.msgpack.Decoder[Word]", frame: bytes) -> "Word":
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"unreadable word between relays of weights: {error}") from error
