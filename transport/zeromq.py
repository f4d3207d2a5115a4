"""What do both ends of the wire share? The limits of their sockets, and how frames get in and out.

It knows sockets and frames; neither whose they are, nor what a message means.
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
"""How long a closed socket may go on sending what was queued, e.g. the last word to a peer."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""It takes milliseconds; strangers who only connect are thrown out after so long."""

QUEUED_MESSAGES_MAX = 16_384
"""Unread messages per peer, beyond which it is held back. Not ZeroMQ's usual 1000: a peer that is
held back on ipc and then ends loses what it had sent, for libzmq gives up a connection that hung up
while it wasn't reading from it. Credits keep honest engines far below."""

CONNECT_TIMEOUT_MS = 5_000
"""For a try to connect over TCP; then the next begins. The gaps between the system's own double:
over a link that was gone for a minute one would come through half a minute after its mending."""

ASKED_AFTER_S = 5
"""Of silence on a TCP connection: until the system asks the other one, and between two times."""

UNANSWERED_MAX_S = 15
"""For what was sent over TCP, such a question too; then the connection is given up, at either end.
The system's own is a quarter of an hour, and eternity where nothing is sent: so long one that a
broken link left half-open would be trusted, and what is said over it would be lost."""

COMPLAINTS_PER_S_MAX = 32
"""To one peer. Its other malformed messages are only counted."""


@dataclass(frozen=True, slots=True)
class SocketStatistics:
    """What a socket has taken in so far."""

    frames: int
    """Messages handed over."""
    bytes: int
    """Their size."""
    malformed: int
    """Messages refused: more than one frame, or not readable."""
    refused_connections: int = 0
    """Strangers that a listener with keys did not let in."""


def new_socket(
    kind: int,
    address: str,
    *,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    context: Context | None = None,
) -> Socket:
    """A socket with the limits that both ends share."""
    socket = (context or shared_context(os.getpid())).socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    outlive_links(socket)
    return socket


def outlive_links(socket: Socket) -> None:
    """Have a link that breaks without a word noticed in some 20 s, and one that is mended in 5.

    By TCP itself, which counts what arrived, not messages: so a large one may take its time on a
    slow link, as it may not where ZeroMQ's heartbeats must come between. A process that computes
    for minutes is no such link, for ZeroMQ's own thread reads on; one that is stopped (SIGSTOP) is,
    once its host has no room for what is sent. Set it before connecting or binding; it means
    nothing to ipc.
    """
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, ASKED_AFTER_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, ASKED_AFTER_S)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * UNANSWERED_MAX_S)


def expect_life(socket: Socket, silent_s: float) -> None:
    """Have a connection given up, and made anew, once its other end is silent for so long.

    For one on which little is said, and that again if it is not answered: what was under way is
    lost. Set it before connecting. It is more than :func:`outlive_links`, for it asks the process
    at the other end, not its system.
    """
    interval_ms = round(1000 * silent_s / 4)
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * interval_ms)


@cache
def shared_context(pid: int) -> Context:
    """ZeroMQ's I/O thread, one per process, which is also what makes inproc addresses meet.

    A process that ends takes that thread along, and with it what closed sockets still had to send,
    so the last thing a process does is wait for it, as long as sockets may linger.
    """
    context: Context = zmq.Context()
    atexit.register(context.destroy, LINGER_MS)
    return context


def sendable(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        BadFrame: it is larger than its receiver would take.
    """
    frame = encode(message)
    try:
        check_frame_size(frame)
    except BadFrame as error:
        what = type(message).__name__
        raise BadFrame(f"a {what} would be refused by its receiver: {error}") from error
    return frame


def skip_frames(socket: Socket) -> int:
    """Read the frames that are left of the current message; how many they were."""
    count = 0
    more = True
    while more:
        more = socket.recv(zmq.NOBLOCK, copy=False, track=False).more
        count += 1
    return count
