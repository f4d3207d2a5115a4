"""ZeroMQ DEALER of an engine: connects to the orchestrator's ROUTER, and reconnects by itself.

Engine processes use it from one thread. It encodes and decodes messages and reports why a handshake
failed. Outgoing queues are unlimited, because the stream's credits bound what is unacknowledged.
"""

import contextlib
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import BadFrame, ConfigError
from tidegate.transport.addresses import check_connector
from tidegate.transport.limits import cut
from tidegate.transport.messages import (
    FromOrchestrator,
    Message,
    MessageRejected,
    decode_from_orchestrator,
)
from tidegate.transport.rate_limiter import RateLimiter
from tidegate.transport.security import EngineKeys, secure_connector
from tidegate.transport.zeromq import (
    QUEUED_MESSAGES_MAX,
    REJECTIONS_PER_S_MAX,
    SocketStatistics,
    encode_frame,
    new_socket,
    skip_frames,
)

IDENTITY_BYTES_MAX = 255
"""ZeroMQ's limit on the length of a routing id, in bytes."""

FAILED_HANDSHAKES_MAX = 20
"""Consecutive handshake failures after which the cause counts as permanent: 2 s of retries."""

_FINAL_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Handshake events after which libzmq does not retry."""


class DealerSocket:
    """An engine's DEALER socket, which reconnects by itself after a lost connection.

    Synchronous; all calls must come from one thread. Messages sent while disconnected are queued
    for the next connection.
    """

    def __init__(self, address: str, identity: bytes, *, keys: EngineKeys | None = None) -> None:
        """Connect to ``address``, which need not be bound yet; ``identity`` is unique in the run.

        Raises:
            ConfigError: a malformed address, one on another host without keys, or a bad identity.
        """
        check_connector(address, has_keys=keys is not None)
        if not 0 < len(identity) <= IDENTITY_BYTES_MAX or identity[0] == 0:
            raise ConfigError(
                f"identity {identity!r} must have 1 to {IDENTITY_BYTES_MAX} bytes, the first not 0"
            )
        self._address = address
        self._keys = keys
        self._socket = new_socket(zmq.DEALER, address)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            secure_connector(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | _FINAL_REFUSALS
        )
        self._connections = 0
        self._is_connected = False
        self._failed_handshakes = 0
        """Number of failed handshakes since the last successful one."""
        self._is_unknown = False
        """Whether the orchestrator has rejected this engine's public key."""
        self._frames = self._bytes = self._malformed = 0
        self._rate_limiter = RateLimiter(replies_max=REJECTIONS_PER_S_MAX, interval_s=1.0)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"can't connect to {address!r}: {error.strerror}; check the address"
            ) from error

    def send(self, message: Message) -> bytes:
        """Queue one message without blocking; return its frame, for a ``SendWindow`` to keep.

        Raises:
            BadFrame: the message exceeds the size limit of its kind.
        """
        frame = encode_frame(message)
        self.send_again(frame)
        return frame

    def send_again(self, frame: bytes) -> None:
        """Queue a frame again that was sent before."""
        # A connection that the orchestrator refused accepts no more; the frame is lost, as on a
        # broken connection.
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def receive(self, timeout_s: float) -> list[FromOrchestrator]:
        """Return all arrived messages, in order; block up to ``timeout_s`` if there are none.

        Unreadable messages are counted, answered with a ``MessageRejected``, and omitted.
        """
        messages, is_empty = self._read()
        if is_empty and timeout_s > 0 and self._socket.poll(max(1, round(timeout_s * 1000))):
            messages, _ = self._read()
        return messages

    def fileno(self) -> int:
        """Return a file descriptor for an event loop. It is edge-triggered: readable means that
        something *may* have changed, so call :meth:`receive` then, and after every send."""
        fd = self._socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def connection(self) -> int | None:
        """Return the number of the current connection, counted from 1; None while disconnected.

        Each connection begins with a hello. Messages that were queued while there was no connection
        are sent before that hello.
        """
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_monitor_event(recv_monitor_message(self._monitor)["event"])
        return self._connections if self._is_connected else None

    def _on_monitor_event(self, event: int) -> None:
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_connected:
            self._connections += 1
            self._failed_handshakes = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failed_handshakes += 1
        elif event & _FINAL_REFUSALS:
            self._failed_handshakes = FAILED_HANDSHAKES_MAX
            self._is_unknown = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def refusal(self) -> str | None:
        """Return why the orchestrator refuses this engine, or None if it may still accept it.

        State as of the last :meth:`connection` call. Some causes cannot be distinguished: a peer
        that cannot decrypt a handshake just closes the connection.
        """
        if self._failed_handshakes < FAILED_HANDSHAKES_MAX:
            return None
        if self._is_unknown and self._keys is not None:
            return (
                f"{self._address} does not know this engine's key, {self._keys.public.decode()}; "
                f"put its .key file into `engines` of the orchestrator's directory of keys"
            )
        if self._keys is not None:
            return (
                f"{self._address} rejects this engine's keys: it has others, or none; copy the "
                "directory that `tidegate keys` made for engines there again"
            )
        return (
            f"{self._address} closes the connection: most likely it needs keys; pass "
            "--curve-key-directory DIRECTORY, one that `tidegate keys` made for engines there"
        )

    def close(self) -> None:
        """Disconnect; queued messages are still sent for up to a second. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def statistics(self) -> SocketStatistics:
        """Return the counters of received frames."""
        return SocketStatistics(self._frames, self._bytes, self._malformed)

    def _read(self) -> tuple[list[FromOrchestrator], bool]:
        """Read the pending messages; return them, and whether the socket was empty."""
        messages: list[FromOrchestrator] = []
        # In half the time of a receive that raises zmq.Again, before nearly every step.
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return messages, True
        is_empty = True
        # bounded, so that a flood cannot keep the engine from its steps
        for _ in range(QUEUED_MESSAGES_MAX):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False, track=False)
            except zmq.Again:
                break
            is_empty = False
            try:
                messages.append(self._decode(frame))
            except BadFrame as error:
                self._malformed += 1
                if self._rate_limiter.has(b"", time.monotonic()):
                    self.send(MessageRejected(message=cut(str(error))))
        return messages, is_empty

    def _decode(self, frame: zmq.Frame) -> FromOrchestrator:
        if frame.more:
            count = 1 + skip_frames(self._socket)
            raise BadFrame(f"a message is one frame, but yours had {count}")
        body = frame.bytes
        message = decode_from_orchestrator(body)
        self._frames += 1
        self._bytes += len(body)
        return message
