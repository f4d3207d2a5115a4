"""What do a pool and its worker processes say to each other? Frames of MessagePack on a socket.

They know nothing of processes. One call is answered by one reply with its number; nothing is ever
unpickled, so that what an environment sends can be wrong, but never code.
"""

from typing import Any

import msgspec

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Beyond the longest observation, and what a task may bring along."""

LENGTH_BYTES = 4
"""Before each frame, big-endian."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all; ``call_id`` pairs a reply with its call."""

    call_id: int


class Begin(Message, frozen=True, kw_only=True, tag="begin"):
    """Make an environment and reset it; it is known by ``environment_id`` from then on."""

    environment_id: int
    factory: str
    """``module:name``, called with ``arguments``."""
    arguments: dict[str, Any]
    seed: int
    task: Any
    timeout_s: float
    """Ends what awaits. What computes or blocks is ended by the pool, with the process."""


class Step(Message, frozen=True, kw_only=True, tag="step"):
    """Give an environment an action."""

    environment_id: int
    action: str
    timeout_s: float


class Close(Message, frozen=True, kw_only=True, tag="close"):
    """Close an environment and forget it, whatever it is doing."""

    environment_id: int
    timeout_s: float


class UseTool(Message, frozen=True, kw_only=True, tag="use_tool"):
    """Call a function."""

    tool: str
    """``module:name``."""
    arguments: dict[str, Any]
    timeout_s: float


class DescribeTool(Message, frozen=True, kw_only=True, tag="describe_tool"):
    """Say what a function is for, and which arguments it takes."""

    tool: str


Call = Begin | Step | Close | UseTool | DescribeTool


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The process takes calls; said once, by the number 0."""


class Awaiting(Message, frozen=True, kw_only=True, tag="awaiting"):
    """The call awaits something: the process can take another one meanwhile."""


class Observed(Message, frozen=True, kw_only=True, tag="observed"):
    """What an environment answered, by its own account; see ``Observation``."""

    text: str
    reward: float
    done: bool
    truncated: bool
    messages: tuple[dict[str, Any], ...]


class Answered(Message, frozen=True, kw_only=True, tag="answered"):
    """A tool's answer; empty after a ``Close``."""

    text: str = ""


class Described(Message, frozen=True, kw_only=True, tag="described"):
    """A tool's description."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The call raised, and its process goes on."""

    error: str
    """Type and message."""
    story: str = ""
    """The traceback."""
    is_timeout: bool = False
    is_out_of_memory: bool = False
    """What the process holds may be at fault for that; it is not to be used any more."""
    is_bad_arguments: bool = False
    """A tool was not called, for these are no arguments of it."""


Reply = Ready | Awaiting | Observed | Answered | Described | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Message) -> bytes:
    """One message as it goes over the socket.

    Raises:
        TypeError: it holds what isn't plain data.
        ValueError: it is too long.
    """
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a message of {len(body)} bytes; at most {FRAME_BYTES_MAX} are sent")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(head: bytes | bytearray) -> int:
    """How long the frame is that begins so.

    Raises:
        ValueError: nobody sends such a frame.
    """
    length = int.from_bytes(head, "big")
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes is announced; at most {FRAME_BYTES_MAX} are")
    return length
