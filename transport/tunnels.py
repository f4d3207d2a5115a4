"""How does a process on another host have a socket here? Its bytes are carried, in order.

Nothing here knows what the bytes say. Pieces are numbered: where a connection breaks and one is
lost, the tunnel ends, and with it whatever was at its far end (:mod:`tunnel_exit`).
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
from tidegate.transport.router import bound_router, close_socket, stop_listening
from tidegate.transport.security import OrchestratorKeys
from tidegate.transport.wakeup import Wakeup

PIECE_BYTES = 1024 * 1024
"""Read of a socket at once. What is longer travels as several pieces."""

FRAME_BYTES_MAX = PIECE_BYTES + 64

RETRY_MS = 20
"""After a far end took no more: until it is offered the same piece again."""

What = Literal["said", "printed", "ended", "kill"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes, or that there will be no more."""

    number: int
    what: What
    body: bytes = b""
    """Of ``ended`` from the far end: how the process there did."""


encode_piece = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Piece)


def decoded_piece(frame: bytes, number: int) -> Piece:
    """The piece of that number.

    Raises:
        BadFrame: it is another one, or none.
    """
    try:
        piece = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadFrame(f"what came through a tunnel is no piece: {error}") from error
    if piece.number != number:
        raise BadFrame(f"pieces {number} to {piece.number - 1} were lost on the way")
    return piece


@dataclass(eq=False, slots=True)
class Tunnel:
    """The near end of one. Its sockets belong to who opened it."""

    name: str
    connection: socket.socket
    """Speaks with the process at the far end."""
    output: IO[bytes]
    """What that prints."""
    how_it_ended: str | None = None
    """As the far end tells; None as long as it doesn't."""
    was_lost: bool = False
    """Whether it ended by no doing of the process there."""


@dataclass(eq=False, slots=True)
class _Inside:
    """What the thread has of a tunnel."""

    tunnel: Tunnel
    connection: socket.socket
    output: int
    received: int = 0
    sent: int = 0
    unsent: bytes | None = None
    """A frame that the far end took no more of."""
    is_over: bool = False


class TunnelEntrance:
    """Where processes of other hosts connect, and a thread that carries for all of them."""

    def __init__(self, address: str, keys: OrchestratorKeys | None) -> None:
        """Listen.

        Raises:
            AddressInUse: someone listens there.
            ConfigError: the address is malformed, needs keys, or can't be bound.
        """
        self._socket, self._doorkeeper = bound_router(
            address, keys, frame_bytes_max=FRAME_BYTES_MAX
        )
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inside: dict[bytes, _Inside] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="tunnels", daemon=True)
        self._thread.start()

    def open(self, name: str) -> Tunnel:
        """One that the far end of that name will be at. From any thread."""
        ours, inner = socket.socketpair()
        read, write = os.pipe2(os.O_CLOEXEC)
        tunnel = Tunnel(name, ours, os.fdopen(read, "rb", buffering=0))
        inside = _Inside(tunnel, inner, write)

        def begin() -> None:
            self._inside[name.encode()] = inside
            self._poller.register(inner.fileno(), zmq.POLLIN)

        self._ask(begin)
        return tunnel

    def kill(self, tunnel: Tunnel, how: str = "killed") -> None:
        """Have the far end kill its process, if it is there. From any thread."""
        self._ask(lambda: self._end(tunnel.name.encode(), how, tell="kill"))

    def lose(self, tunnel: Tunnel, how: str) -> None:
        """The far end is gone, or is to be. From any thread; harmless if it has told of its end."""
        self._ask(lambda: self._lose(tunnel.name.encode(), how))

    def close(self) -> None:
        """Stop; what was still to be sent has a moment to be. Harmless if repeated."""
        self._is_closing = True
        self._wakeup.wake()
        self._thread.join()

    def _ask(self, work: Callable[[], None]) -> None:
        self._asked.append(work)
        self._wakeup.wake()  # if the thread has ended, there is nothing to end

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._do_what_was_asked()
        finally:
            for name in list(self._inside):
                self._end(name, "the tunnel's near end was closed", tell="kill")
            stop_listening(self._socket, self.address)
            close_socket(self._socket, is_context_own=self._doorkeeper is not None)
            self._wakeup.close()

    def _turn(self) -> None:
        blocked = [name for name, inside in self._inside.items() if inside.unsent is not None]
        ready = dict(self._poller.poll(RETRY_MS if blocked else None))
        self._wakeup.quiet()
        self._do_what_was_asked()
        self._take_all()
        for name in blocked:
            self._send_again(name)
        for name, inside in list(self._inside.items()):
            if inside.unsent is None and inside.connection.fileno() in ready:
                self._read(name, inside)

    def _do_what_was_asked(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _take_all(self) -> None:
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            inside = self._inside.get(name)
            if inside is None:  # it was ended here, and may have come too late to be told
                with suppress(zmq.ZMQError):
                    self._socket.send_multipart([name, encode_piece(Piece(0, "kill"))], zmq.NOBLOCK)
                continue
            try:
                self._take(name, inside, decoded_piece(frames[0], inside.received))
            except BadFrame as error:
                self._lose(name, f"lost: {error}")

    def _take(self, name: bytes, inside: _Inside, piece: Piece) -> None:
        inside.received += 1
        with suppress(OSError):  # who opened it listens no more
            if piece.what == "said":
                inside.connection.sendall(piece.body)
            elif piece.what == "printed":
                _write(inside.output, piece.body)
        if piece.what == "ended":
            self._end(name, piece.body.decode(errors="replace"))

    def _read(self, name: bytes, inside: _Inside) -> None:
        try:
            body = inside.connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # another had the number of this descriptor when it was polled
        except OSError:
            body = b""
        if not body:
            self._poller.unregister(inside.connection.fileno())
        self._send(name, inside, "said" if body else "ended", body)

    def _send(self, name: bytes, inside: _Inside, what: What, body: bytes = b"") -> None:
        inside.unsent = encode_piece(Piece(inside.sent, what, body))
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
        inside.unsent = None  # sent; or nobody is there, and whoever comes will miss it

    def _lose(self, name: bytes, how: str) -> None:
        if name in self._inside:
            self._inside[name].tunnel.was_lost = True
        self._end(name, how, tell="kill")

    def _end(self, name: bytes, how: str, *, tell: What | None = None) -> None:
        inside = self._inside.get(name)
        if inside is None:
            return
        inside.tunnel.how_it_ended = how  # first: who sees that the far end is gone may ask
        if tell is not None:
            self._send(name, inside, tell)
        del self._inside[name]
        with suppress(KeyError):
            self._poller.unregister(inside.connection.fileno())
        inside.connection.close()
        os.close(inside.output)


def _write(descriptor: int, body: bytes) -> None:
    view = memoryview(body)
    while view:
        view = view[os.write(descriptor, view) :]
