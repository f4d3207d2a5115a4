"""TCP tunnels: give the orchestrator's host a local socket to a process on another host.

For environment workers on a Ray cluster. Bytes are forwarded in numbered pieces over one ZeroMQ
ROUTER; if a connection breaks and a piece is lost, the tunnel ends, and with it the process at its
far end (:mod:`tunnel_exit`).
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal

import msgspec
import zmq

from tidegate.errors import BadFrame
from tidegate.transport.router import bind_router, close_socket, stop_listening
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.wakeup import Wakeup

PIECE_BYTES = 1024 * 1024
"""Maximum bytes read from a socket at once; longer data travels as several pieces."""

FRAME_BYTES_MAX = PIECE_BYTES + 64

RETRY_MS = 20
"""Delay before a piece is offered again to a far end whose queue was full."""

PieceKind = Literal["said", "printed", "ended", "kill"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Numbered piece of a tunnel's byte stream, or a control piece (``ended``, ``kill``)."""

    number: int
    kind: PieceKind
    body: bytes = b""
    """The bytes; for ``ended`` from the far end, how the process there ended."""


encode_piece = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Piece)


def decode_piece(frame: bytes, number: int) -> Piece:
    """Decode the piece with this number.

    Raises:
        BadFrame: the frame is not a piece, or has another number.
    """
    try:
        piece = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadFrame(f"a tunnel's message can't be decoded: {error}") from error
    if piece.number != number:
        raise BadFrame(
            f"pieces {number} to {piece.number - 1} of a tunnelled connection were lost on the way"
        )
    return piece


@dataclass(eq=False, slots=True)
class Tunnel:
    """Near end of one tunnel. The caller of :meth:`TunnelEntrance.open` must close both of its
    sockets."""

    name: str
    connection: socket.socket
    """Socket connected to the process at the far end."""
    output: IO[bytes]
    """Standard output and error of that process."""
    how_it_ended: str | None = None
    """How the process ended, as reported by the far end; None until then."""
    was_lost: bool = False
    """Whether the tunnel broke, rather than the process ending."""


@dataclass(eq=False, slots=True)
class _Inside:
    """A tunnel's state in the forwarding thread."""

    tunnel: Tunnel
    connection: socket.socket
    output: int
    received: int = 0
    sent: int = 0
    unsent: bytes | None = None
    """Frame that the far end's full queue did not accept yet."""
    is_ended: bool = False


class TunnelEntrance:
    """Listens for far ends on other hosts, with one thread that forwards for all tunnels."""

    def __init__(self, address: str, keys: OrchestratorKeys | None) -> None:
        """Bind the address.

        Raises:
            AddressInUse: another process listens there.
            ConfigError: the address is malformed, needs keys, or cannot be bound.
        """
        self._socket, self._authenticator = bind_router(
            address, keys, frame_bytes_max=FRAME_BYTES_MAX
        )
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inside: dict[bytes, _Inside] = {}
        self._submitted: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="tunnels", daemon=True)
        self._thread.start()

    def open(self, name: str) -> Tunnel:
        """Create a tunnel for the far end of that name. Thread-safe."""
        outer, inner = socket.socketpair()
        read, write = os.pipe2(os.O_CLOEXEC)
        tunnel = Tunnel(name, outer, os.fdopen(read, "rb", buffering=0))
        inside = _Inside(tunnel, inner, write)

        def begin() -> None:
            self._inside[name.encode()] = inside
            self._poller.register(inner.fileno(), zmq.POLLIN)

        self._submit(begin)
        return tunnel

    def kill(self, tunnel: Tunnel, how: str = "killed") -> None:
        """Have the far end kill its process, if it is there. Thread-safe."""
        self._submit(lambda: self._end(tunnel.name.encode(), how, notify="kill"))

    def lose(self, tunnel: Tunnel, how: str) -> None:
        """Declare the far end lost. Thread-safe; a no-op if its end was already reported."""
        self._submit(lambda: self._lose(tunnel.name.encode(), how))

    def close(self) -> None:
        """Stop; queued pieces are still sent for a moment. Idempotent."""
        self._is_closing = True
        self._wakeup.wake()
        self._thread.join()

    def _submit(self, work: Callable[[], None]) -> None:
        self._submitted.append(work)
        self._wakeup.wake()  # if the thread has ended, there is nothing to do

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._run_submitted()
        finally:
            for name in list(self._inside):
                self._end(name, "the tunnel's near end was closed", notify="kill")
            stop_listening(self._socket, self.address)
            close_socket(self._socket, is_context_own=self._authenticator is not None)
            self._wakeup.close()

    def _turn(self) -> None:
        blocked = [name for name, inside in self._inside.items() if inside.unsent is not None]
        ready = dict(self._poller.poll(RETRY_MS if blocked else None))
        self._wakeup.clear()
        self._run_submitted()
        self._receive_pieces()
        for name in blocked:
            self._send_again(name)
        for name, inside in list(self._inside.items()):
            if inside.unsent is None and inside.connection.fileno() in ready:
                self._read(name, inside)

    def _run_submitted(self) -> None:
        while self._submitted:
            self._submitted.popleft()()

    def _receive_pieces(self) -> None:
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            inside = self._inside.get(name)
            if inside is None:  # it was ended here, and may have connected too late to receive that
                with suppress(zmq.ZMQError):
                    self._socket.send_multipart([name, encode_piece(Piece(0, "kill"))], zmq.NOBLOCK)
                continue
            try:
                self._handle_piece(name, inside, decode_piece(frames[0], inside.received))
            except BadFrame as error:
                self._lose(name, f"lost: {error}")

    def _handle_piece(self, name: bytes, inside: _Inside, piece: Piece) -> None:
        inside.received += 1
        with suppress(OSError):  # the owner has closed its end
            if piece.kind == "said":
                inside.connection.sendall(piece.body)
            elif piece.kind == "printed":
                _write(inside.output, piece.body)
        if piece.kind == "ended":
            self._end(name, piece.body.decode(errors="replace"))

    def _read(self, name: bytes, inside: _Inside) -> None:
        try:
            body = inside.connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the descriptor number was another socket's when it was polled
        except OSError:
            body = b""
        if not body:
            self._poller.unregister(inside.connection.fileno())
        self._send(name, inside, "said" if body else "ended", body)

    def _send(self, name: bytes, inside: _Inside, kind: PieceKind, body: bytes = b"") -> None:
        inside.unsent = encode_piece(Piece(inside.sent, kind, body))
        inside.sent += 1
        self._send_again(name)

    def _send_again(self, name: bytes) -> None:
        inside = self._inside.get(name)
        if inside is None or inside.unsent is None:
            return
        try:
            self._socket.send_multipart([name, inside.unsent], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                return
            if error.errno != zmq.EHOSTUNREACH:
                raise
        inside.unsent = None  # sent; or there is no peer, and a later one will detect the gap

    def _lose(self, name: bytes, how: str) -> None:
        if name in self._inside:
            self._inside[name].tunnel.was_lost = True
        self._end(name, how, notify="kill")

    def _end(self, name: bytes, how: str, *, notify: PieceKind | None = None) -> None:
        inside = self._inside.get(name)
        if inside is None:
            return
        # set first, because a caller that sees the far end gone may read it
        inside.tunnel.how_it_ended = how
        if notify is not None:
            self._send(name, inside, notify)
        del self._inside[name]
        with suppress(KeyError):
            self._poller.unregister(inside.connection.fileno())
        inside.connection.close()
        os.close(inside.output)


def _write(descriptor: int, body: bytes) -> None:
    view = memoryview(body)
    while view:
        view = view[os.write(descriptor, view) :]
