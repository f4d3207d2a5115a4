"""Far end of a tunnel: forwards a local process's socket and output to another host over ZeroMQ.

:mod:`tunnels` has the near end. The bytes are not interpreted.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import IO

import zmq

from tidegate.errors import BadFrame
from tidegate.transport.addresses import check_connector
from tidegate.transport.limits import cut
from tidegate.transport.security import EngineKeys, secure_connector
from tidegate.transport.tunnels import (
    FRAME_BYTES_MAX,
    PIECE_BYTES,
    Piece,
    PieceKind,
    decode_piece,
    encode_piece,
)
from tidegate.transport.zeromq import Socket, new_socket

PIECES_UNSENT_MAX = 64
"""While this many pieces wait for the network, nothing more is read from the process."""

FINAL_OUTPUT_S = 1.0
"""Time to read the output of a process that has ended, because its children may keep the pipe
open."""


class TunnelExit:
    """The far end of one tunnel, for one thread."""

    def __init__(self, address: str, name: str, keys: EngineKeys | None) -> None:
        """Connect; the near end need not be bound yet.

        Raises:
            ConfigError: a malformed address, or one on another host without keys.
        """
        check_connector(address, has_keys=keys is not None)
        self._socket: Socket = new_socket(zmq.DEALER, address, frame_bytes_max=FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.SNDHWM, PIECES_UNSENT_MAX)
        if keys is not None:
            secure_connector(self._socket, keys)
        self._socket.connect(address)
        self._received = 0
        self._sent = 0
        self._unread = bytearray()
        """Bytes that the process has not read yet. Unbounded, so that a hanging process can still
        be killed; the bytes are requests to it, so few."""
        self._is_input_ended = False
        """Whether the near end will send no more bytes to the process."""

    def carry(self, connection: socket.socket, output: IO[bytes], end: Callable[[], str]) -> None:
        """Forward until the process at the other end of ``connection`` ends, or is to be killed.

        ``end`` ends the process if it still runs, and returns how it ended.
        """
        connection.setblocking(False)
        poller = zmq.Poller()
        for source in (self._socket, connection.fileno(), output.fileno()):
            poller.register(source, zmq.POLLIN)
        is_output_open = is_connected = True
        end_s: float | None = None
        try:
            while is_connected or is_output_open:
                left_ms = None if end_s is None else round(1000 * (end_s - time.monotonic()))
                if left_ms is not None and left_ms <= 0:
                    break
                ready = dict(poller.poll(left_ms))
                if self._socket in ready and not self._receive_piece():
                    break
                if output.fileno() in ready:
                    is_output_open = self._send_piece(
                        "printed", os.read(output.fileno(), PIECE_BYTES)
                    )
                    if not is_output_open:
                        poller.unregister(output.fileno())
                if not is_connected:
                    continue
                if ready.get(connection.fileno(), 0) & ~zmq.POLLOUT:
                    is_connected = self._send_piece("said", _received(connection))
                if is_connected:
                    poller.register(connection.fileno(), self._feed(connection))
                else:
                    poller.unregister(connection.fileno())
                    end_s = time.monotonic() + FINAL_OUTPUT_S
        finally:
            self._send_piece("ended", cut(end()).encode())
            self._socket.close()

    def _send_piece(self, kind: PieceKind, body: bytes) -> bool:
        if body:
            self._socket.send(encode_piece(Piece(self._sent, kind, body)))
            self._sent += 1
        return bool(body)

    def _receive_piece(self) -> bool:
        """Handle one piece from the near end; return whether to continue."""
        try:
            piece = decode_piece(self._socket.recv(), self._received)
        except BadFrame:
            return False
        self._received += 1
        if piece.kind == "said":
            self._unread += piece.body
        self._is_input_ended |= piece.kind == "ended"
        return piece.kind != "kill"

    def _feed(self, connection: socket.socket) -> int:
        """Write what the process accepts now; return the poll flags of its connection."""
        try:
            while self._unread:
                del self._unread[: connection.send(self._unread)]
            if self._is_input_ended:
                connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return zmq.POLLIN | zmq.POLLOUT
        except OSError:  # the process is ending
            self._unread.clear()
        return zmq.POLLIN


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(PIECE_BYTES)
    except OSError:
        return b""
