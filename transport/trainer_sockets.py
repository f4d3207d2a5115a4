"""How do a run and trainers in other processes exchange messages of several frames?

One end listens, the others connect and connect again. Frames are carried as they are; what they
say, and whose they are, is for others. Every call is non-blocking; each socket is one thread's.
"""

import contextlib
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.errors import BadFrame
from tidegate.transport.addresses import check_connector
from tidegate.transport.limits import FRAME_BYTES_MAX
from tidegate.transport.router import bound_router, close_socket, stop_listening
from tidegate.transport.security import EngineKeys, OrchestratorKeys, secure_connector
from tidegate.transport.zeromq import new_socket

Frames = Sequence[bytes]

FRAMES_PER_REQUEST_MAX = 2
"""A header, and a piece of weights; only answers have more."""

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class TrainerRouter:
    """The run's end."""

    def __init__(self, address: str, keys: OrchestratorKeys | None = None) -> None:
        """Bind.

        Raises:
            AddressInUse: someone listens there.
            ConfigError: the address is malformed, needs keys, or can't be bound.
        """
        self._socket, self._doorkeeper = bound_router(
            address, keys, frame_bytes_max=FRAME_BYTES_MAX
        )
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        """Readable when something has changed: then :meth:`receive` until there is nothing, and
        after each send too, for that may take the signal away."""
        self.malformed = 0

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be asked of it any more."""
        return bool(self._socket.closed)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message and who sent it; None if there is none. Oversized ones are dropped."""
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if 1 <= len(frames) <= FRAMES_PER_REQUEST_MAX:
                return peer, frames
            self.malformed += 1

    def send(self, peer: bytes, frames: Frames) -> bool:
        """Queue a message; False if that peer isn't there, or reads nothing any more."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        """Free the address; what is queued is still sent for a while. Harmless if repeated."""
        if not self._socket.closed:
            stop_listening(self._socket, self.address)
            close_socket(self._socket, is_context_own=self._doorkeeper is not None)


class TrainerDealer:
    """A trainer's end."""

    def __init__(self, address: str, *, identity: bytes, keys: EngineKeys | None = None) -> None:
        """Connect; the other end need not be there yet.

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
        """Why the run won't let this trainer in; None if it may."""
        if not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        recv_monitor_message(self._monitor)
        what = "does not know these keys, or has others" if self._has_keys else "wants keys"
        return (
            f"{self._address} {what}: `tidegate keys DIRECTORY --engine trainer` makes some where "
            f"the run is; copy DIRECTORY/trainer here, and give it as keys="
        )

    def wait(self, descriptor: int, timeout_s: float) -> None:
        """Return when something has come, the descriptor is readable, or the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(descriptor, zmq.POLLIN)
        poller.poll(max(1, round(timeout_s * 1000)))

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None if there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frames: Frames) -> None:
        """Queue a message. One that a broken connection swallows is for the caller to repeat."""
        if any(len(frame) > FRAME_BYTES_MAX for frame in frames):
            raise BadFrame(
                f"a message with a frame of {max(map(len, frames))} bytes; {FRAME_BYTES_MAX} is "
                f"the most: send fewer tasks or sequences at once"
            )
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Disconnect; what is queued is still sent for up to a second. Harmless if repeated."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
