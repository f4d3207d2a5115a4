"""Wire protocol between a pool and its worker processes: length-prefixed MessagePack frames.

:mod:`worker_process` sends calls, :mod:`worker` replies. Each call gets one reply with its number.
Nothing is unpickled, so data from an environment can be wrong but is never executed.
"""

from typing import Any

import msgspec

from tidegate.transport.trace_context import trace_headers

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Larger than the longest observation and any reasonable task."""

LENGTH_BYTES = 4
"""Length prefix of each frame, big-endian."""


class WorkerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages; ``call_id`` pairs a reply with its call."""

    call_id: int


class PoolMessage(WorkerMessage, frozen=True, kw_only=True):
    """Base of what a pool sends."""

    trace: dict[str, str] = msgspec.field(default_factory=trace_headers)
    """Headers of the trace that the call is part of; the sender's, where it is made."""


class CreateEnvironment(PoolMessage, frozen=True, kw_only=True, tag="create_environment"):
    """Create an environment, known as ``environment_id`` from then on, and reset it."""

    environment_id: int
    factory: str
    """Dotted name ``module:name`` of the class or function that makes the environment, called with
    ``arguments``."""
    arguments: dict[str, Any]
    seed: int
    task: Any
    timeout_s: float
    """Limit for asynchronous methods; the pool kills the process if a method blocks."""


class StepEnvironment(PoolMessage, frozen=True, kw_only=True, tag="step_environment"):
    """Pass an action to an environment."""

    environment_id: int
    action: str
    timeout_s: float


class CloseEnvironment(PoolMessage, frozen=True, kw_only=True, tag="close_environment"):
    """Close an environment, whatever it is doing, and remove it."""

    environment_id: int
    timeout_s: float


class CallTool(PoolMessage, frozen=True, kw_only=True, tag="call_tool"):
    """Call a tool function."""

    tool: str
    """Dotted name ``module:name`` of the tool's function."""
    arguments: dict[str, Any]
    timeout_s: float


class DescribeTool(PoolMessage, frozen=True, kw_only=True, tag="describe_tool"):
    """Ask for a function's description and arguments."""

    tool: str


WorkerCall = CreateEnvironment | StepEnvironment | CloseEnvironment | CallTool | DescribeTool


class WorkerReady(WorkerMessage, frozen=True, kw_only=True, tag="worker_ready"):
    """The process accepts calls; sent once, with ``call_id`` 0."""


class CallAwaiting(WorkerMessage, frozen=True, kw_only=True, tag="call_awaiting"):
    """The call awaits: the process can compute another one meanwhile."""


class ObservationReply(WorkerMessage, frozen=True, kw_only=True, tag="observation_reply"):
    """An environment's :class:`Observation`."""

    text: str
    reward: float
    done: bool
    truncated: bool
    messages: tuple[dict[str, Any], ...]


class CallResult(WorkerMessage, frozen=True, kw_only=True, tag="call_result"):
    """Result of a tool; empty for a ``CloseEnvironment``."""

    text: str = ""


class ToolDescription(WorkerMessage, frozen=True, kw_only=True, tag="tool_description"):
    """Description of a tool."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of the tool's arguments."""


class CallFailed(WorkerMessage, frozen=True, kw_only=True, tag="call_failed"):
    """The call raised an exception; the process continues."""

    error: str
    """Type and message of the exception that the environment's or tool's code raised."""
    traceback: str = ""
    """Last lines of the exception's traceback."""
    is_timeout: bool = False
    is_out_of_memory: bool = False
    """Whether it was a MemoryError; the pool then kills the process, which may be the cause."""
    is_bad_arguments: bool = False
    """Whether the tool was not called because its arguments did not match its signature."""


WorkerReply = (
    WorkerReady | CallAwaiting | ObservationReply | CallResult | ToolDescription | CallFailed
)

_encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(WorkerCall).decode
decode_reply = msgspec.msgpack.Decoder(WorkerReply).decode


def frame(message: WorkerMessage) -> bytes:
    """Encode one message, with its length prefix.

    Raises:
        TypeError: it holds values that are not plain data.
        ValueError: it is longer than :data:`FRAME_BYTES_MAX`.
    """
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(
            f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {FRAME_BYTES_MAX} "
            "between a run and its environments; pass large data by a file"
        )
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(prefix: bytes | bytearray) -> int:
    """Return the length of the frame with this prefix.

    Raises:
        ValueError: it is longer than :data:`FRAME_BYTES_MAX`.
    """
    length = int.from_bytes(prefix, "big")
    if length > FRAME_BYTES_MAX:
        raise ValueError(
            f"a frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX} between a run and "
            "its environments; pass large data by a file"
        )
    return length
