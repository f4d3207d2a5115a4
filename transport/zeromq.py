"""Shared ZeroMQ settings: socket limits, TCP keep-alive, the process's context, and frame encoding.

All sockets of the run, its engines, trainers and weight channels are made with these functions.
"""

import atexit
import os
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import zmq

from tidegate.errors import BadFrame
from tidegate.transport.limits import FRAME_BYTES_MAX, check_frame_size
from tidegate.transport.messages import Message, encode

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

LINGER_MS = 1000
"""Linger: how long a closed socket keeps sending queued messages, e.g. a last ``Goodbye``."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""Handshake timeout. A handshake takes milliseconds; peers that only connect are disconnected."""

QUEUED_MESSAGES_MAX = 16_384
"""Receive high-water mark per peer, in messages. Not ZeroMQ's default of 1000: a peer that is held
back on ipc and then exits loses what it had sent, because libzmq drops a connection that hung up
while it was not reading from it. Credits keep legitimate engines far below."""

CONNECT_TIMEOUT_MS = 5_000
"""Timeout of one TCP connection attempt, after which the next begins. The system's own retry gaps
double: after an outage of a minute, a connection would come back only half a minute after the
repair."""

KEEPALIVE_INTERVAL_S = 5
"""TCP keep-alive idle time and interval, in seconds."""

TCP_USER_TIMEOUT_S = 15
"""TCP user timeout, in seconds: a connection with data or a keep-alive probe unacknowledged for
this long is closed. The system's defaults are a quarter of an hour, and unlimited for idle
connections: a half-open connection would seem alive for that long, and messages sent on it would be
lost."""

REJECTIONS_PER_S_MAX = 32
"""Maximum ``Complaint`` replies per second to one peer; further malformed messages are only
counted."""


@dataclass(frozen=True, slots=True)
class SocketStatistics:
    """Counters of what a socket has received so far."""

    frames: int
    """Number of messages that the socket has delivered."""
    bytes: int
    """Total size of the delivered messages."""
    malformed: int
    """Number of messages refused: more than one frame, or unreadable."""
    refused_connections: int = 0
    """Number of connections that the ZAP authenticator rejected."""


def new_socket(
    kind: int,
    address: str,
    *,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    context: Context | None = None,
) -> Socket:
    """Create a socket with the shared limits."""
    socket = (context or shared_context(os.getpid())).socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    enable_keepalive(socket)
    return socket


def enable_keepalive(socket: Socket) -> None:
    """Detect a silently broken TCP link within some 20 s, and a repaired one within 5 s.

    TCP's own timers count bytes that arrive, not messages, so a large message may take its time on
    a slow link, where ZeroMQ's heartbeats would time out. A process that computes for minutes is
    not affected, because ZeroMQ's I/O thread keeps reading; a stopped process (SIGSTOP) is, once
    its host's buffers are full. Call it before connecting or binding; it has no effect on ipc.
    """
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * TCP_USER_TIMEOUT_S)


def enable_heartbeats(socket: Socket, silent_s: float) -> None:
    """Renew a connection whose peer is silent for this long, by ZMTP heartbeats.

    For connections with few messages that are repeated if unanswered, because messages in flight
    are lost. Call it before connecting. It goes beyond :func:`enable_keepalive`: it tests the peer
    process, not only its operating system.
    """
    interval_ms = round(1000 * silent_s / 4)
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * interval_ms)


@cache
def shared_context(pid: int) -> Context:
    """Return the process's shared ZeroMQ context, which also makes inproc addresses meet.

    Its I/O thread ends with the process, and with it what closed sockets still had to send. So an
    exit handler waits for it, up to the linger time.
    """
    context: Context = zmq.Context()
    atexit.register(context.destroy, LINGER_MS)
    return context


def encode_frame(message: Message) -> bytes:
    """Encode a message as a frame.

    Raises:
        BadFrame: the frame is larger than its receiver accepts.
    """
    frame = encode(message)
    try:
        check_frame_size(frame)
    except BadFrame as error:
        what = type(message).__name__
        raise BadFrame(f"a {what} would be refused by its receiver: {error}") from error
    return frame


def skip_frames(socket: Socket) -> int:
    """Read the remaining frames of the current message; return their number."""
    count = 0
    more = True
    while more:
        more = socket.recv(zmq.NOBLOCK, copy=False, track=False).more
        count += 1
    return count
