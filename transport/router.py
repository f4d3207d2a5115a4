"""How does the orchestrator hear any number of engines? A ROUTER that an event loop drains.

It binds one address and knows peers by name. A message's kind and meaning are for others; so is
whether a peer has said hello. Nothing here blocks on a slow peer.

Incoming queues are limited per peer, far above what credits allow, so only a peer that ignores them
is ever held back. What waits for a peer is bounded by the turns it was given; to one that reads
nothing at all, messages are dropped once :data:`UNREAD_MESSAGES_MAX` wait for it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from tidegate.errors import AddressInUse, ConfigError
from tidegate.transport.addresses import check_listener, refuse_living_listener
from tidegate.transport.doorkeeper import Doorkeeper
from tidegate.transport.drain_budget import DrainBudget
from tidegate.transport.limits import ENGINE_FRAME_BYTES_MAX, cut
from tidegate.transport.looks import LOOK_INTERVAL_S, Looks
from tidegate.transport.messages import Ack, Complaint, Message
from tidegate.transport.more_frames import more_frames
from tidegate.transport.patience import Patience
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.security import OrchestratorKeys, secure_listener
from tidegate.transport.zeromq import (
    COMPLAINTS_PER_S_MAX,
    Context,
    Socket,
    SocketStatistics,
    new_socket,
    sendable,
    skip_frames,
)

NO_WAIT, MORE_FOLLOWS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: adding pyzmq's flags up takes as long as a send does."""

send = zmq.backend.Socket.send
"""Without what pyzmq's own looks for first, for sockets of other kinds: half of its time."""

FRAMES_PER_DRAIN = 1024
"""Messages read before other callbacks get a turn, at most: about 1 ms of reading."""

BYTES_PER_DRAIN = 16 * 1024 * 1024
"""The same for large messages: some milliseconds of copying, and the most that a batch may take."""

UNREAD_MESSAGES_MAX = 1024 * 1024
"""Waiting for one peer. No run gives an engine so many turns at once."""

UNBIND_TIMEOUT_MS = 1000
"""It takes microseconds; after a second without news, there will be none."""

OnFrames = Callable[[list[tuple[bytes, bytes]]], None]
"""Takes a batch of (peer, frame) in order of arrival."""


class RouterSocket:
    """The orchestrator's end: binds one address, talks to any number of engines.

    All methods belong to one thread, the event loop's once attached.
    """

    def __init__(
        self, address: str | None, *, name: str, keys: OrchestratorKeys | None = None
    ) -> None:
        """Bind ``address``, or a private ipc path under a fresh directory if it is None.

        With ``keys``, only engines whose keys are among those allowed can connect, whatever the
        address; without, it must be one that no other host can reach.

        Raises:
            AddressInUse: someone listens there.
            ConfigError: the address is malformed, needs keys, or can't be bound.
        """
        self._directory = PrivateDirectory(name) if address is None else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: OnFrames = _no_frames
        self._budget = DrainBudget(FRAMES_PER_DRAIN)
        self._behind_since_s: float | None = None
        """When the last reading was, if it left messages."""
        self._scheduled: asyncio.Handle | None = None
        self._clock: asyncio.TimerHandle | None = None
        """While messages are looked for by the clock; else the descriptor wakes."""
        self._is_next_look_far = False
        self._looks = Looks()
        self._frames = self._bytes = self._malformed = 0
        self._patience = Patience(answers_max=COMPLAINTS_PER_S_MAX, interval_s=1.0)
        try:
            if self._directory is not None:
                address = f"ipc://{self._directory.path}/orchestrator"
            assert address is not None
            self._socket, self._doorkeeper = bound_router(address, keys)
            self._more = more_frames(self._socket)
        except BaseException:
            self._remove_directory()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where engines connect: the bound address, with ``*`` replaced by the port given."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue one message without waiting; False if the peer isn't there, or has stopped reading.

        Raises:
            BadFrame: the message is larger than its kind may be.
        """
        frame = sendable(message)
        if type(message) is Ack:
            self._looks.acks += 1
        else:
            self._looks.sends += 1
        try:
            send(self._socket, peer, MORE_FOLLOWS)
            send(self._socket, frame, NO_WAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            # A send reads the socket's internal mailbox too, and may so swallow the signal that
            # messages have arrived. One look per turn of the loop makes up for all its sends.
            if self._clock is None:
                self._schedule_drain()
            elif self._is_next_look_far:
                self._clock.cancel()
                self._look_in(LOOK_INTERVAL_S)  # it may be answered
        return True

    def complain(self, peer: bytes, why: str) -> None:
        """Count a message of ``peer`` as malformed, and tell it why unless it was told often."""
        self._malformed += 1
        if self._patience.has(peer, time.monotonic()):
            self.send(peer, Complaint(message=cut(why)))

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
        self._loop, self._on_frames, self._budget = loop, on_frames, DrainBudget(budget)
        self._behind_since_s = None
        loop.add_reader(self._socket.FD, self._on_readable)
        self._schedule_drain()  # for what came before anyone watched

    def detach(self) -> None:
        """Stop calling back; what arrives waits in the socket. Harmless if not attached."""
        if self._loop is None:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._loop.remove_reader(self._socket.FD)
        self._loop = None
        self._on_frames = _no_frames

    def close(self) -> None:
        """Free the address; what is queued is still sent for a while. Harmless if repeated."""
        if self._socket.closed:
            return
        self.detach()
        stop_listening(self._socket, self.address)
        close_socket(self._socket, is_context_own=self._doorkeeper is not None)
        self._remove_directory()

    def statistics(self) -> SocketStatistics:
        """What came in so far."""
        refused = self._doorkeeper.refused if self._doorkeeper else 0
        return SocketStatistics(self._frames, self._bytes, self._malformed, refused)

    def _on_readable(self) -> None:
        """The descriptor wakes; if it does so on and on, the clock takes over."""
        loop = self._loop
        assert loop is not None
        interval_s = self._looks.woken(loop.time())
        if interval_s is not None:
            loop.remove_reader(self._socket.FD)
            self._look_in(interval_s)
        self._drain()

    def _look_in(self, interval_s: float) -> None:
        assert self._loop is not None
        self._is_next_look_far = interval_s > LOOK_INTERVAL_S
        self._clock = self._loop.call_later(interval_s, self._on_clock)

    def _on_clock(self) -> None:
        """Look by the clock, for as long as that pays."""
        before = self._frames + self._malformed
        self._is_next_look_far = False
        try:
            self._drain()
        finally:  # the callback may raise, or detach
            if self._loop is not None:
                interval_s = self._looks.looked(self._frames + self._malformed - before)
                if interval_s is not None:
                    self._look_in(interval_s)
                else:
                    self._clock = None
                    self._loop.add_reader(self._socket.FD, self._on_readable)

    def _drain(self) -> None:
        """Read all that is there, or the budget of it, and hand it over as one batch.

        ZeroMQ's descriptor signals changes, not state. Reading until there is nothing re-arms it;
        stopping early doesn't, so then the rest is scheduled, before the callback, which may raise.
        """
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        assert self._loop is not None
        now_s = self._loop.time()
        if self._behind_since_s is not None:
            self._budget.took(now_s - self._behind_since_s)
        batch, is_empty = self._read()
        self._behind_since_s = None if is_empty else now_s
        if not is_empty:
            self._schedule_drain()
        if batch:
            self._on_frames(batch)

    def _read(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """At most the budget of messages or bytes, and whether the socket is empty now.

        ``recv`` per frame, for ``recv_multipart`` costs three times as much.
        """
        batch: list[tuple[bytes, bytes]] = []
        receive, append, no_wait = self._socket.recv, batch.append, int(zmq.NOBLOCK)
        ask, more = self._more.ask, self._more.answer
        size = 0
        is_empty = False
        try:
            for _ in range(self._budget.frames):
                peer = receive(no_wait)
                body = receive(no_wait)
                ask()
                if more.value:
                    self._refuse_frames(peer)
                    continue
                append((peer, body))
                size += len(body)
                if size >= BYTES_PER_DRAIN:
                    break
        except zmq.Again:
            is_empty = True
        self._frames += len(batch)
        self._bytes += size
        return batch, is_empty

    def _refuse_frames(self, peer: bytes) -> None:
        """Read the rest of a message of too many frames, and say so."""
        count = 1 + skip_frames(self._socket)
        self.complain(peer, f"a message is one frame, but yours had {count}")

    def _schedule_drain(self) -> None:
        if self._loop is not None and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()


def _no_frames(batch: list[tuple[bytes, bytes]]) -> None:
    """Nobody listens."""


def bound_router(
    address: str,
    keys: OrchestratorKeys | None,
    *,
    frame_bytes_max: int = ENGINE_FRAME_BYTES_MAX,
) -> tuple[Socket, Doorkeeper | None]:
    """A ROUTER that listens, with a context and a doorkeeper of its own where there are keys.

    Raises:
        AddressInUse: someone listens there.
        ConfigError: the address is malformed, needs keys, or can't be bound.
    """
    check_listener(address, has_keys=keys is not None)
    refuse_living_listener(address)
    context: Context | None = zmq.Context() if keys else None
    socket = new_socket(zmq.ROUTER, address, frame_bytes_max=frame_bytes_max, context=context)
    socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES_MAX)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a vanished peer fails, not vanishes
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its identity
    doorkeeper = None
    try:
        if keys is not None:
            secure_listener(socket, keys)
            doorkeeper = Doorkeeper(socket, keys)
        socket.bind(address)
    except BaseException as error:
        close_socket(socket, is_context_own=keys is not None)
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(address) from error
        raise ConfigError(f"can't listen on {address!r}: {error.strerror}") from error
    return socket, doorkeeper


def stop_listening(socket: Socket, address: str) -> None:
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


def close_socket(socket: Socket, *, is_context_own: bool) -> None:
    """Close a socket, and the context that nobody else uses once what was queued is sent."""
    context = socket.context
    socket.close()
    if is_context_own:
        # Not here, for it waits as long as the socket may linger. The process waits for it.
        threading.Thread(target=context.term, name="last words", daemon=False).start()
