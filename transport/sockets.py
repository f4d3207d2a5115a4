"""How do messages get from one process to another? A ROUTER for the run, a DEALER per engine.

They know message kinds only as far as encoding and decoding goes; what a message means is for
others. Only addresses on this host are served: ipc, inproc, and tcp on a loopback interface.

Nothing here blocks on a slow peer, and nothing is dropped. Outgoing queues have no length limit of
their own, and need none: what an engine may leave unacknowledged is bounded by its credits, and
what the orchestrator sends is bounded by the turns it has given out. Incoming queues are limited
per peer, far above what credits allow, so only a peer that ignores them is ever held back.
"""

import asyncio
import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import AddressInUse, BadFrame, ConfigError
from tidegate.transport.addresses import check_address, refuse_living_listener
from tidegate.transport.messages import (
    FRAME_BYTES_MAX,
    Complaint,
    FromOrchestrator,
    Message,
    decode_from_orchestrator,
    encode,
)

FRAMES_PER_DRAIN = 1024
"""Messages read before other callbacks get a turn: about 1 ms of reading."""

LINGER_MS = 1000
"""How long a closed socket may go on sending what was queued, e.g. the last word to a peer."""

UNBIND_TIMEOUT_MS = 1000
"""It takes microseconds; after a second without news, there will be none."""

IDENTITY_BYTES_MAX = 255
"""ZeroMQ's own limit."""

QUEUED_MESSAGES_MAX = 65_536
"""Unread messages per peer, beyond which it is held back. Not ZeroMQ's usual 1000: a peer that is
held back on ipc and then ends loses what it had sent, for libzmq gives up a connection that hung up
while it wasn't reading from it."""

OnFrames = Callable[[list[tuple[bytes, bytes]]], None]
"""Takes a batch of (peer, frame) in order of arrival."""


@dataclass(frozen=True, slots=True)
class SocketStatistics:
    """What a socket has taken in so far."""

    frames: int
    """Messages handed over."""
    bytes: int
    """Their size."""
    malformed: int
    """Messages refused: more than one frame, or not readable."""


class RouterSocket:
    """The orchestrator's end: binds one address, talks to any number of engines.

    All methods belong to one thread, the event loop's once attached.
    """

    def __init__(self, address: str | None, *, name: str) -> None:
        """Bind ``address``, or a private ipc path under a fresh directory if it is None.

        Raises:
            AddressInUse: someone listens there.
            ConfigError: the address is malformed, not on this host, or can't be bound.
        """
        self._directory = _private_directory(name) if address is None else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: OnFrames = _no_frames
        self._budget_frames = FRAMES_PER_DRAIN
        self._scheduled: asyncio.Handle | None = None
        self._frames = self._bytes = self._malformed = 0
        try:
            if address is None:
                address = f"ipc://{self._directory}/orchestrator"
            self._socket = _bound_router(address)
        except BaseException:
            self._remove_directory()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where engines connect: the bound address, with ``*`` replaced by the port given."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue one message without waiting; False if the peer isn't connected any more.

        Raises:
            BadFrame: the message is larger than any peer would read.
        """
        frame = _sendable(message)
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            # A send reads the socket's internal mailbox too, and may so swallow the signal that
            # messages have arrived. One look per turn of the loop makes up for all its sends.
            self._schedule_drain()
        return True

    def complain(self, peer: bytes, why: str) -> None:
        """Count a message of ``peer`` as malformed and tell it why."""
        self._malformed += 1
        self.send(peer, Complaint(message=why))

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: OnFrames,
        *,
        budget: int = FRAMES_PER_DRAIN,
    ) -> None:
        """Have ``loop`` call ``on_frames`` with all that has arrived, at most ``budget`` at once.

        What ``on_frames`` raises goes to the loop's exception handler; reading goes on.
        """
        if self._loop is not None:
            raise RuntimeError("this socket is already attached to an event loop; detach it first")
        if budget < 1:
            raise ValueError(f"budget counts messages per drain and must be >= 1, got {budget}")
        self._loop, self._on_frames, self._budget_frames = loop, on_frames, budget
        loop.add_reader(self._socket.FD, self._drain)
        self._schedule_drain()  # for what came before anyone watched

    def detach(self) -> None:
        """Stop calling back; what arrives waits in the socket. Harmless if not attached."""
        if self._loop is None:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._loop.remove_reader(self._socket.FD)
        self._loop = None
        self._on_frames = _no_frames

    def close(self) -> None:
        """Free the address; what is queued is still sent for a while. Harmless if repeated."""
        if self._socket.closed:
            return
        self.detach()
        _stop_listening(self._socket, self.address)
        self._socket.close()
        self._remove_directory()

    def statistics(self) -> SocketStatistics:
        """What came in so far."""
        return SocketStatistics(self._frames, self._bytes, self._malformed)

    def _drain(self) -> None:
        """Read all that is there, or the budget of it, and hand it over as one batch.

        ZeroMQ's descriptor signals changes, not state. Reading until there is nothing re-arms it;
        stopping early doesn't, so then the rest is scheduled, before the callback, which may raise.
        """
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        batch, is_empty = self._read()
        if not is_empty:
            self._schedule_drain()
        if batch:
            self._on_frames(batch)

    def _read(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """At most the budget of messages, and whether the socket is empty now.

        ``recv`` per frame, for ``recv_multipart`` costs three times as much; the body as a
        ``Frame``, for it knows whether more frames follow, which asking the socket makes slow.
        """
        batch: list[tuple[bytes, bytes]] = []
        receive, append = self._socket.recv, batch.append
        size = 0
        is_empty = False
        try:
            for _ in range(self._budget_frames):
                peer = receive(zmq.NOBLOCK)
                frame = receive(zmq.NOBLOCK, copy=False, track=False)
                if frame.more:
                    self._refuse_frames(peer)
                    continue
                body = frame.bytes
                size += len(body)
                append((peer, body))
        except zmq.Again:
            is_empty = True
        self._frames += len(batch)
        self._bytes += size
        return batch, is_empty

    def _refuse_frames(self, peer: bytes) -> None:
        """Read the rest of a message of too many frames, and say so."""
        count = 1 + _skip_frames(self._socket)
        self.complain(peer, f"a message is one frame, but yours had {count}")

    def _schedule_drain(self) -> None:
        if self._loop is not None and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class DealerSocket:
    """An engine's end: connects to the orchestrator, and again whenever the connection breaks.

    Synchronous, and one thread's. What is sent while there is no connection waits for the next.
    """

    def __init__(self, address: str, identity: bytes) -> None:
        """Connect to ``address``, which need not be bound yet, under a name unique in the run.

        Raises:
            ConfigError: a malformed address, one that is not on this host, or a bad identity.
        """
        check_address(address)
        if not 0 < len(identity) <= IDENTITY_BYTES_MAX or identity[0] == 0:
            raise ConfigError(
                f"identity {identity!r} must have 1 to {IDENTITY_BYTES_MAX} bytes, the first not 0"
            )
        self._socket = _new_socket(zmq.DEALER, address)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        self._frames = self._bytes = self._malformed = 0
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't connect to {address!r}: {error.strerror}") from error

    def send(self, message: Message) -> bytes:
        """Queue one message without waiting; return its frame, for a ``SendWindow`` to keep.

        Raises:
            BadFrame: the message is larger than any peer would read.
        """
        frame = _sendable(message)
        self._socket.send(frame)
        return frame

    def send_again(self, frame: bytes) -> None:
        """Queue a frame that was sent before, as it is."""
        self._socket.send(frame)

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """All that has arrived, in order; if nothing has, wait up to ``timeout_s`` for it.

        What can't be read is counted, answered with a complaint, and left out.
        """
        messages, is_quiet = self._read()
        if is_quiet and timeout_s > 0 and self._socket.poll(max(1, round(timeout_s * 1000))):
            messages, _ = self._read()
        return messages

    def has_reconnected(self) -> bool:
        """Whether the connection was made anew since the last call; the first one doesn't count.

        Then the hello is due again, and a replay of what is not acknowledged.
        """
        before = self._connections
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._connections += 1
        return self._connections > max(1, before)

    def close(self) -> None:
        """Disconnect; what is queued is still sent for up to a second. Harmless if repeated."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def statistics(self) -> SocketStatistics:
        """What came in so far."""
        return SocketStatistics(self._frames, self._bytes, self._malformed)

    def _read(self) -> tuple[list[FromOrchestrator], bool]:
        """What is there and readable, and whether nothing at all was there."""
        messages: list[FromOrchestrator] = []
        is_quiet = True
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False, track=False)
            except zmq.Again:
                return messages, is_quiet
            is_quiet = False
            try:
                messages.append(self._decode(frame))
            except BadFrame as error:
                self._malformed += 1
                self.send(Complaint(message=str(error)))

    def _decode(self, frame: zmq.Frame) -> FromOrchestrator:
        if frame.more:
            count = 1 + _skip_frames(self._socket)
            raise BadFrame(f"a message is one frame, but yours had {count}")
        body = frame.bytes
        message = decode_from_orchestrator(body)
        self._frames += 1
        self._bytes += len(body)
        return message


def _no_frames(batch: list[tuple[bytes, bytes]]) -> None:
    """Nobody listens."""


def _private_directory(name: str) -> Path:
    """A fresh directory that only this user can enter; the name is for people who look there."""
    readable = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "-_"))
    return Path(tempfile.mkdtemp(prefix=f"tidegate-{readable[:24]}-"))  # a socket's path: <= 107 B


def _new_socket(kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket with the limits that both ends share."""
    socket = _context(os.getpid()).socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)  # see the module's docstring
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)
    return socket


@cache
def _context(pid: int) -> "zmq.Context[zmq.Socket[bytes]]":
    """ZeroMQ's I/O thread, one per process, which is also what makes inproc addresses meet.

    A process that ends takes that thread along, and with it what closed sockets still had to send,
    so the last thing a process does is wait for it, as long as sockets may linger.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    atexit.register(context.destroy, LINGER_MS)
    return context


def _bound_router(address: str) -> "zmq.Socket[bytes]":
    check_address(address, may_be_wildcard=True)
    refuse_living_listener(address)
    socket = _new_socket(zmq.ROUTER, address)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a vanished peer fails, not vanishes
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its identity
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(address) from error
        raise ConfigError(f"can't listen on {address!r}: {error.strerror}") from error
    return socket


def _stop_listening(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Free the address for the next listener: libzmq closes it later, and leaves an ipc path."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc" and not path.startswith("@"):
        Path(path).unlink(missing_ok=True)  # while it is still certain to be ours
    if scheme == "inproc":
        return
    monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
    socket.unbind(address)
    monitor.poll(UNBIND_TIMEOUT_MS)
    socket.disable_monitor()
    monitor.close()


def _sendable(message: Message) -> bytes:
    frame = encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise BadFrame(
            f"a {type(message).__name__} of {len(frame)} bytes would be refused unread by its "
            f"receiver, which takes {FRAME_BYTES_MAX} at most"
        )
    return frame


def _skip_frames(socket: "zmq.Socket[bytes]") -> int:
    """Read the frames that are left of the current message; how many they were."""
    count = 0
    more = True
    while more:
        more = socket.recv(zmq.NOBLOCK, copy=False, track=False).more
        count += 1
    return count
