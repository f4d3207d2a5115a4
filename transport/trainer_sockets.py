"""ZeroMQ sockets between a run (ROUTER) and remote trainers (DEALERs), for multi-frame messages.

Frames are passed through undecoded. Every call but :meth:`TrainerDealer.wait` is non-blocking; each
socket belongs to one thread.
"""

import contextlib
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import BadFrame
from tidegate.transport.addresses import check_connector
from tidegate.transport.limits import FRAME_BYTES_MAX
from tidegate.transport.router import bind_router, close_socket, stop_listening
from tidegate.transport.security import EngineKeys, OrchestratorKeys, secure_connector
from tidegate.transport.zeromq import new_socket

Frames = Sequence[bytes]

FRAMES_PER_REQUEST_MAX = 2
"""Maximum frames of a request: a header and a chunk of weights. Only answers have more."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class TrainerRouter:
    """The run's ROUTER socket."""

    def __init__(self, address: str, keys: OrchestratorKeys | None = None) -> None:
        """Bind the address.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address is malformed, needs keys, or cannot be bound.
        """
        self._socket, self._authenticator = bind_router(
            address, keys, frame_bytes_max=FRAME_BYTES_MAX
        )
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        """Edge-triggered file descriptor: when it is readable, and after each send, call
        :meth:`receive` until it returns None."""
        self.malformed = 0

    @property
    def is_closed(self) -> bool:
        """Whether the socket is closed."""
        return bool(self._socket.closed)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return the next message's peer and frames; None if there is none. Oversized messages are
        dropped."""
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if 1 <= len(frames) <= FRAMES_PER_REQUEST_MAX:
                return peer, frames
            self.malformed += 1

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Queue a message; False if the peer is gone or has stopped reading."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        """Release the address; queued messages are still sent for a while. Idempotent."""
        if not self._socket.closed:
            stop_listening(self._socket, self.address)
            close_socket(self._socket, is_context_own=self._authenticator is not None)


class TrainerDealer:
    """A trainer's DEALER socket."""

    def __init__(self, address: str, *, identity: bytes, keys: EngineKeys | None = None) -> None:
        """Connect; the other end need not be bound yet.

        Raises:
            ConfigError: a malformed address, or one on another host without keys.
        """
        check_connector(address, has_keys=keys is not None)
        self._address = address
        self._has_keys = keys is not None
        self._socket = new_socket(zmq.DEALER, address)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            secure_connector(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(_REFUSALS)
        self._socket.connect(address)

    @property
    def refusal(self) -> str | None:
        """Why the run refuses this trainer; None if it may still accept it."""
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        recv_monitor_message(self._monitor)
        problem = "does not accept these keys" if self._has_keys else "requires keys"
        return (
            f"{self._address} {problem}: `tidegate keys DIRECTORY --engine trainer` makes a pair "
            f"where the run is; copy DIRECTORY/trainer here, and give it as curve_key_directory="
        )

    def wait(self, descriptor: int, timeout_s: float) -> None:
        """Block until a message arrives, the descriptor is readable, or the timeout expires."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(descriptor, zmq.POLLIN)
        poller.poll(max(1, round(timeout_s * 1000)))

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message; None if there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frames: Frames) -> None:
        """Queue a message. The caller repeats messages that a broken connection loses."""
        if any(len(frame) > FRAME_BYTES_MAX for frame in frames):
            raise BadFrame(
                f"a message with a frame of {max(map(len, frames))} bytes; {FRAME_BYTES_MAX} is "
                f"the most: send fewer tasks or sequences at once"
            )
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Disconnect; queued messages are still sent for up to a second. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
