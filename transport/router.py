"""ZeroMQ ROUTER of the orchestrator: binds one address and delivers engines' frames in batches.

The scheduler attaches it to its event loop. It reads the socket at each wakeup or, during a steady
stream that needs few answers, by timer, because a wakeup costs as much as taking in a hundred
turns' tokens. Each read is bounded so that other callbacks get their turn. Queues are limited per
peer, so no slow peer blocks the others.
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
from tidegate.transport.addresses import check_listener, check_not_in_use
from tidegate.transport.limits import ENGINE_FRAME_BYTES_MAX, cut
from tidegate.transport.messages import Ack, Message, MessageRejected
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.rate_limiter import RateLimiter
from tidegate.transport.security import OrchestratorKeys, secure_listener
from tidegate.transport.zap_authenticator import ZapAuthenticator
from tidegate.transport.zeromq import (
    REJECTIONS_PER_S_MAX,
    Context,
    Socket,
    SocketStatistics,
    encode_frame,
    new_socket,
    skip_frames,
)

BUSY_WAKEUPS = 16
BUSY_WITHIN_S = 0.032
"""``BUSY_WAKEUPS`` wakeups within ``BUSY_WITHIN_S`` seconds (500 a second) switch to polling by
timer."""

WAKEUPS_PER_SEND = 4
"""No switch if more than one message per this many wakeups is sent, because peers may wait for the
answers."""

POLL_INTERVAL_S = 0.004
"""Default polling interval in seconds: well below a decode step of most models, and four messages
per poll at a thousand messages a second."""

QUIET_POLL_INTERVAL_S = 0.032
"""Longest polling interval in seconds, used while only acknowledgements are sent, because then only
tokens of running turns arrive. The interval starts at ``POLL_INTERVAL_S`` and doubles up to this
value. One poll takes 400 us of wall time beside its messages, because other threads run first."""

MESSAGES_PER_ACK = 16
"""A stream is quiet if at least this many messages arrive per acknowledgement that is sent. An
engine that gets credit for fewer steps would use it up, and wait for the next poll: between two
polls of 32 ms, 16 steps of credit are used up at 500 steps a second, 256 steps at 8,000."""

UNPRODUCTIVE_POLLS_MAX = 3
"""Number of consecutive polls that find no message, or mainly messages that need answers, after
which the socket is read at wakeups again."""


class PollSchedule:
    """Decides when to read one socket: at each wakeup of its descriptor, or by timer.

    At 1,000 steps a second 2.1 times the tokens per CPU-second are received as by wakeups alone
    (``benchmarks.transport tokens``, the paced stream, median of 5 pairs). An unpaced stream is
    received as fast either way.
    """

    __slots__ = (
        "_counted_since_s",
        "_interval_s",
        "_unproductive_polls",
        "_wakeups",
        "acks",
        "sends",
    )

    def __init__(self) -> None:
        self.sends = self.acks = 0
        """Messages and acknowledgements sent since the last count; the sender increments them."""
        self._interval_s = POLL_INTERVAL_S
        self._wakeups = self._unproductive_polls = 0
        self._counted_since_s = 0.0

    def woken(self, now_s: float) -> float | None:
        """Count a wakeup; return the seconds to the first poll if polling takes over, else None."""
        if now_s - self._counted_since_s > BUSY_WITHIN_S:
            self._wakeups, self.sends, self.acks, self._counted_since_s = 0, 0, 0, now_s
        self._wakeups += 1
        if self._wakeups < max(BUSY_WAKEUPS, WAKEUPS_PER_SEND * (self.sends + self.acks)):
            return None
        self._wakeups = self._unproductive_polls = 0
        self._interval_s = POLL_INTERVAL_S
        return POLL_INTERVAL_S

    def polled(self, messages: int) -> float | None:
        """Count a poll that found ``messages``; return the seconds to the next poll.

        Returns None to switch back to wakeups: nothing arrives, or much of it needs answers.
        """
        sends, acks = self.sends, self.acks
        self.sends = self.acks = 0
        is_unproductive = not messages or WAKEUPS_PER_SEND * (sends + acks) > messages
        self._unproductive_polls = self._unproductive_polls + 1 if is_unproductive else 0
        if self._unproductive_polls >= UNPRODUCTIVE_POLLS_MAX:
            return None
        is_quiet = messages and not sends and MESSAGES_PER_ACK * acks <= messages
        longest_s = QUIET_POLL_INTERVAL_S if is_quiet else POLL_INTERVAL_S
        self._interval_s = min(2 * self._interval_s, longest_s)
        return self._interval_s


@dataclass(frozen=True, slots=True)
class MoreFrames:
    """Fast ``RCVMORE`` query: after :attr:`query` is called, ``result.value`` is true if more
    frames follow the frame just read.

    Asking libzmq itself instead of pyzmq's ``getsockopt`` receives 1.7 times the messages per
    CPU-second (``benchmarks.transport messages``, medians of 5 pairs).
    """

    query: Callable[[], object]
    """Valid only while the socket is open: libzmq would dereference a freed pointer."""
    result: ctypes.c_int


def more_frames(socket: Socket) -> MoreFrames:
    """Return the ``RCVMORE`` query of one socket, for the thread that reads from it."""
    result = ctypes.c_int()
    libzmq = _libzmq()
    if libzmq is None:
        return MoreFrames(partial(_query_pyzmq, socket, result), result)
    query = libzmq.zmq_getsockopt
    query.restype = None  # cannot fail: the socket is open, the option exists, the size is right
    size = ctypes.c_size_t(ctypes.sizeof(result))
    handle = ctypes.c_void_p(socket.underlying)
    option = ctypes.c_int(zmq.RCVMORE)
    call = partial(query, handle, option, ctypes.byref(result), ctypes.byref(size))
    return MoreFrames(call, result)


def _query_pyzmq(socket: Socket, result: ctypes.c_int) -> None:
    result.value = int(socket.getsockopt(zmq.RCVMORE))


def _libzmq() -> Any:
    """Return the libzmq that pyzmq uses; None if unreachable (another build, no CPython)."""
    try:
        # Located through the extension module that links it, because its name differs by build.
        # PyDLL keeps the GIL, because the call is shorter than releasing it.
        library = ctypes.PyDLL(str(importlib.import_module("zmq.backend.cython._zmq").__file__))
        return library if hasattr(library, "zmq_getsockopt") else None
    except (ImportError, OSError):
        return None


FRAMES_PER_DRAIN = 64
"""Largest number of messages read before other callbacks get a turn. A step that ends 16 turns may
take 1 ms to process, so 64 messages occupy the loop for less than 0.1 s. A limit of 1,024 receives
no more messages a second (ratio 1.04, ``benchmarks.transport messages``, median of 5 pairs)."""

BYTES_PER_DRAIN = 16 * 1024 * 1024
"""Maximum bytes per read, for large messages: some milliseconds of copying."""

UNREAD_MESSAGES_MAX = 1024 * 1024
"""Send high-water mark per peer, in messages. No run gives an engine so many turns at once."""

UNBIND_TIMEOUT_MS = 1000
"""Unbinding takes microseconds; after this long no event will come."""

OnFrames = Callable[[list[tuple[bytes, bytes]]], None]
"""Callback that takes a batch of (peer, frame) in order of arrival."""


class RouterSocket:
    """The orchestrator's ROUTER socket: binds one address and talks to any number of engines.

    All methods belong to one thread, which is the event loop's once attached.
    """

    def __init__(
        self, address: str | None, *, name: str, keys: OrchestratorKeys | None = None
    ) -> None:
        """Bind ``address``, or a private ipc path in a new directory if it is None.

        With ``keys``, only engines whose public keys are allowed can connect, at any address;
        without, the address must be unreachable from other hosts.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address is malformed, needs keys, or cannot be bound.
        """
        self._directory = PrivateDirectory(name) if address is None else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: OnFrames = _no_frames
        self._budget = FRAMES_PER_DRAIN
        self._scheduled: asyncio.Handle | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        """Timer of the next poll; None while the descriptor wakes the loop."""
        self._is_polling_slowly = False
        self._poll_schedule = PollSchedule()
        self._frames = self._bytes = self._malformed = 0
        self._rate_limiter = RateLimiter(replies_max=REJECTIONS_PER_S_MAX, interval_s=1.0)
        try:
            if self._directory is not None:
                address = f"ipc://{self._directory.path}/orchestrator"
            assert address is not None
            self._socket, self._authenticator = bind_router(address, keys)
            self._more = more_frames(self._socket)
        except BaseException:
            self._remove_directory()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Address that engines connect to: the bound address with the actual port in place of
        ``*``."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue one message without blocking; False if the peer is gone or has stopped reading.

        Raises:
            BadFrame: the message exceeds the size limit of its kind.
        """
        frame = encode_frame(message)
        if type(message) is Ack:
            self._poll_schedule.acks += 1
        else:
            self._poll_schedule.sends += 1
        try:
            self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            # A send also processes the socket's internal mailbox and may thereby consume the
            # edge-triggered signal that messages have arrived. One read per turn of the loop makes
            # up for all its sends.
            if self._poll_timer is None:
                self._schedule_drain()
            elif self._is_polling_slowly:
                self._poll_timer.cancel()
                self._poll_in(POLL_INTERVAL_S)  # an answer may come
        return True

    def reject(self, peer: bytes, reason: str) -> None:
        """Count a malformed message of ``peer``, and reply with a ``MessageRejected`` within the
        rate limit."""
        self._malformed += 1
        if self._rate_limiter.has(peer, time.monotonic()):
            self.send(peer, MessageRejected(message=cut(reason)))

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: OnFrames,
        *,
        budget: int = FRAMES_PER_DRAIN,
    ) -> None:
        """Have ``loop`` call ``on_frames`` with all arrived frames, at most ``budget`` per call.

        Exceptions of ``on_frames`` go to the loop's exception handler; reading continues.
        """
        if self._loop is not None:
            raise RuntimeError("this socket is already attached to an event loop; detach it first")
        if budget < 1:
            raise ValueError(f"budget counts messages per drain and must be >= 1, got {budget}")
        self._loop, self._on_frames, self._budget = loop, on_frames, budget
        loop.add_reader(self._socket.FD, self._on_readable)
        self._schedule_drain()  # for messages that arrived before attaching

    def detach(self) -> None:
        """Stop the callbacks; arriving messages stay in the socket. A no-op if not attached."""
        if self._loop is None:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._poll_timer is not None:
            self._poll_timer.cancel()
            self._poll_timer = None
        self._loop.remove_reader(self._socket.FD)
        self._loop = None
        self._on_frames = _no_frames

    def close(self) -> None:
        """Release the address; queued messages are still sent for a while. Idempotent."""
        if self._socket.closed:
            return
        self.detach()
        stop_listening(self._socket, self.address)
        close_socket(self._socket, is_context_own=self._authenticator is not None)
        self._remove_directory()

    def statistics(self) -> SocketStatistics:
        """Return the counters of received frames and rejected connections."""
        refused = self._authenticator.refused if self._authenticator else 0
        return SocketStatistics(self._frames, self._bytes, self._malformed, refused)

    def _on_readable(self) -> None:
        """Handle a readable descriptor; switch to polling if wakeups are too frequent."""
        loop = self._loop
        assert loop is not None
        interval_s = self._poll_schedule.woken(loop.time())
        if interval_s is not None:
            loop.remove_reader(self._socket.FD)
            self._poll_in(interval_s)
        self._drain()

    def _poll_in(self, interval_s: float) -> None:
        assert self._loop is not None
        self._is_polling_slowly = interval_s > POLL_INTERVAL_S
        self._poll_timer = self._loop.call_later(interval_s, self._on_poll_timer)

    def _on_poll_timer(self) -> None:
        """Poll by timer, and switch back to wakeups when polling no longer pays."""
        before = self._frames + self._malformed
        self._is_polling_slowly = False
        try:
            self._drain()
        finally:  # the callback may raise, or detach
            if self._loop is not None:
                interval_s = self._poll_schedule.polled(self._frames + self._malformed - before)
                if interval_s is not None:
                    self._poll_in(interval_s)
                else:
                    self._poll_timer = None
                    self._loop.add_reader(self._socket.FD, self._on_readable)

    def _drain(self) -> None:
        """Read up to the budget and hand the frames over as one batch.

        ZeroMQ's descriptor is edge-triggered. Reading until the socket is empty re-arms it;
        stopping early does not, so then the next read is scheduled, before the callback, which may
        raise.
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
        """Read up to the budget; return the frames, and whether the socket is empty.

        Calls ``recv`` per frame, which receives 3.1 times the messages per CPU-second that
        ``recv_multipart`` does (``benchmarks.transport messages``, median of 5 pairs).
        """
        batch: list[tuple[bytes, bytes]] = []
        receive, append, no_wait = self._socket.recv, batch.append, int(zmq.NOBLOCK)
        query, more = self._more.query, self._more.result
        size = 0
        is_empty = False
        try:
            for _ in range(self._budget):
                peer = receive(no_wait)
                body = receive(no_wait)
                query()
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
        """Read the remaining frames of a message with too many frames, and complain."""
        count = 1 + skip_frames(self._socket)
        self.reject(peer, f"a message is one frame, but yours had {count}")

    def _schedule_drain(self) -> None:
        if self._loop is not None and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()


def _no_frames(batch: list[tuple[bytes, bytes]]) -> None:
    """Discard frames while no callback is attached."""


def bind_router(
    address: str,
    keys: OrchestratorKeys | None,
    *,
    frame_bytes_max: int = ENGINE_FRAME_BYTES_MAX,
) -> tuple[Socket, ZapAuthenticator | None]:
    """Create and bind a ROUTER; with keys, it gets a context and a ZAP authenticator of its own.

    Raises:
        AddressInUse: another process listens there.
        ConfigError: the address is malformed, needs keys, or cannot be bound.
    """
    check_listener(address, has_keys=keys is not None)
    check_not_in_use(address)
    context: Context | None = zmq.Context() if keys else None
    socket = new_socket(zmq.ROUTER, address, frame_bytes_max=frame_bytes_max, context=context)
    socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES_MAX)
    # a send to a vanished peer fails instead of being dropped
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its identity
    authenticator = None
    try:
        if keys is not None:
            secure_listener(socket, keys)
            authenticator = ZapAuthenticator(socket, keys)
        socket.bind(address)
    except BaseException as error:
        close_socket(socket, is_context_own=keys is not None)
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUse(address) from error
        raise ConfigError(
            f"can't listen on {address!r}: {error.strerror}; choose an address of this host"
        ) from error
    return socket, authenticator


def stop_listening(socket: Socket, address: str) -> None:
    """Release the address at once: libzmq itself closes it later, and leaves an ipc path behind."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc" and not path.startswith("@"):
        Path(path).unlink(missing_ok=True)  # while the path is still certain to be ours
    if scheme == "inproc":
        return
    monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
    socket.unbind(address)
    monitor.poll(UNBIND_TIMEOUT_MS)
    socket.disable_monitor()
    monitor.close()


def close_socket(socket: Socket, *, is_context_own: bool) -> None:
    """Close a socket, and its own context once the queued messages are sent."""
    context = socket.context
    socket.close()
    if is_context_own:
        # In a thread, because term() blocks for the linger time. The process waits for the thread.
        threading.Thread(target=context.term, name="router-linger", daemon=False).start()
