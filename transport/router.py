"""ZeroMQ ROUTER of the orchestrator: binds one address, and delivers engines' frames in batches.

Reads the socket at each wakeup or, when a steady stream needs few answers, by timer, because a
wakeup costs as much as taking in a hundred turns' tokens; and reads only so many messages at once
that other callbacks get their turn. Nothing blocks on a slow peer: queues are limited per peer.
"""

import asyncio
import ctypes
import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from tidegate.errors import AddressInUse, ConfigError
from tidegate.transport.addresses import check_listener, refuse_living_listener
from tidegate.transport.doorkeeper import Doorkeeper
from tidegate.transport.limits import ENGINE_FRAME_BYTES_MAX, cut
from tidegate.transport.messages import Ack, Complaint, Message
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

BUSY_WAKEUPS = 16
BUSY_WITHIN_S = 0.032
"""After so many wakeups within such a time, more than 500 a second, the clock takes over."""

WAKEUPS_PER_SEND = 4
"""Unless more is sent than this: somebody may wait for the answers."""

LOOK_INTERVAL_S = 0.004
"""By the clock: well below a decode step of most models, and four messages at a time where there
are a thousand a second."""

QUIET_LOOK_INTERVAL_S = 0.032
"""The longest, while nothing is sent but acknowledgements: what comes then are tokens of turns that
go on. It is come to by doubling, so that one that ends waits no longer than nothing has been sent
for. A look costs 400 us beside what it finds, most of it because others have had the processor."""

MESSAGES_PER_ACK = 16
"""Or more, for it to be quiet: with less credit an engine would wait for the next look. So does one
that uses all of its credit up between two looks: of 256 steps, by 8,000 a second; of 16, by 500."""

VAIN_LOOKS_MAX = 3
"""In a row that find nothing, or what must be answered; then the descriptor wakes again."""


class Looks:
    """Decides when to read one socket: on wakeup, or by timer.

    At 1,000 steps a second 2.1 times the tokens per CPU-second are received as by wakeups alone
    (``benchmarks.transport tokens``, the paced stream, median of 5 pairs). As fast as messages go,
    it makes no difference.
    """

    __slots__ = ("_counted_since_s", "_interval_s", "_vain_looks", "_wakeups", "acks", "sends")

    def __init__(self) -> None:
        self.sends = self.acks = 0
        """Since they were last counted; whoever sends adds to one of them."""
        self._interval_s = LOOK_INTERVAL_S
        self._wakeups = self._vain_looks = 0
        self._counted_since_s = 0.0

    def woken(self, now_s: float) -> float | None:
        """Count a wakeup; if the clock is to take over, in how many seconds the first look is."""
        if now_s - self._counted_since_s > BUSY_WITHIN_S:
            self._wakeups, self.sends, self.acks, self._counted_since_s = 0, 0, 0, now_s
        self._wakeups += 1
        if self._wakeups < max(BUSY_WAKEUPS, WAKEUPS_PER_SEND * (self.sends + self.acks)):
            return None
        self._wakeups = self._vain_looks = 0
        self._interval_s = LOOK_INTERVAL_S
        return LOOK_INTERVAL_S

    def looked(self, messages: int) -> float | None:
        """Count a look by the clock that found so many; in how many seconds the next is.

        None: there is to be none, for nothing comes, or much of it is answered.
        """
        sends, acks = self.sends, self.acks
        self.sends = self.acks = 0
        is_vain = not messages or WAKEUPS_PER_SEND * (sends + acks) > messages
        self._vain_looks = self._vain_looks + 1 if is_vain else 0
        if self._vain_looks >= VAIN_LOOKS_MAX:
            return None
        is_quiet = messages and not sends and MESSAGES_PER_ACK * acks <= messages
        longest_s = QUIET_LOOK_INTERVAL_S if is_quiet else LOOK_INTERVAL_S
        self._interval_s = min(2 * self._interval_s, longest_s)
        return self._interval_s


@dataclass(frozen=True, slots=True)
class MoreFrames:
    """After reading a frame call :attr:`ask`; then ``answer.value`` is true if more follow.

    Asking libzmq itself instead of pyzmq's ``getsockopt`` receives 1.7 times the messages per
    CPU-second (``benchmarks.transport messages``, medians of 5 pairs).
    """

    ask: Callable[[], object]
    """Only while the socket is open: libzmq would look where it was."""
    answer: ctypes.c_int


def more_frames(socket: Socket) -> MoreFrames:
    """The question for one socket, to be asked by the thread that reads from it."""
    answer = ctypes.c_int()
    libzmq = _libzmq()
    if libzmq is None:
        return MoreFrames(partial(_ask_pyzmq, socket, answer), answer)
    ask = libzmq.zmq_getsockopt
    ask.restype = None  # it can't fail: the socket is open, the option exists, the size is right
    size = ctypes.c_size_t(ctypes.sizeof(answer))
    handle = ctypes.c_void_p(socket.underlying)
    option = ctypes.c_int(zmq.RCVMORE)
    call = partial(ask, handle, option, ctypes.byref(answer), ctypes.byref(size))
    return MoreFrames(call, answer)


def _ask_pyzmq(socket: Socket, answer: ctypes.c_int) -> None:
    answer.value = int(socket.getsockopt(zmq.RCVMORE))


def _libzmq() -> Any:
    """The library that pyzmq uses; None where it can't be reached (another build, no CPython)."""
    try:
        # Found by way of the module that is linked with it: its own name differs with each build.
        # It keeps the interpreter's lock, for the call is shorter than letting go of it.
        library = ctypes.PyDLL(str(importlib.import_module("zmq.backend.cython._zmq").__file__))
        return library if hasattr(library, "zmq_getsockopt") else None
    except (ImportError, OSError):
        return None


FRAMES_PER_DRAIN = 64
"""Messages read before other callbacks get a turn, at most. A step that ends 16 turns may take 1 ms
to take in, so this keeps the loop for less than 0.1 s. As many messages a second are received as
with 1,024 (1.04, ``benchmarks.transport messages``, median of 5 pairs)."""

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
        self._budget = FRAMES_PER_DRAIN
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
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
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
        self._loop, self._on_frames, self._budget = loop, on_frames, budget
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
        batch, is_empty = self._read()
        if not is_empty:
            self._schedule_drain()
        if batch:
            self._on_frames(batch)

    def _read(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """At most the budget of messages or bytes, and whether the socket is empty now.

        It calls ``recv`` per frame, which receives 3.1 times the messages per CPU-second that
        ``recv_multipart`` does (``benchmarks.transport messages``, median of 5 pairs).
        """
        batch: list[tuple[bytes, bytes]] = []
        receive, append, no_wait = self._socket.recv, batch.append, int(zmq.NOBLOCK)
        ask, more = self._more.ask, self._more.answer
        size = 0
        is_empty = False
        try:
            for _ in range(self._budget):
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
