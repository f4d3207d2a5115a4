"""Sending process of the message benchmark: a ZeroMQ DEALER, or the cheapest possible sender.

``python -m benchmarks.transport.message_sender dealer ADDRESS COUNT BYTES [KEYS]`` sends with
pyzmq, with or without CURVE keys. ``… flood PATH COUNT BYTES`` writes ZMTP 3.0
(https://rfc.zeromq.org/spec/23/) to a Unix socket, a thousand messages per system call, so that
only the receiver is measured.
"""

import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import zmq

from tidegate.transport.security import read_engine_keys, secure_connector

MESSAGES_PER_WRITE = 1000
GREETING_BYTES = 64


def dealer(address: str, count: int, size: int, *keys: str) -> None:
    """Send all messages, and return once they are sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sending:
        sending.setsockopt(zmq.IDENTITY, b"engine")
        # bounded for large messages, so that their memory is reused
        sending.sndhwm = 64 if size > 4096 else 0
        if keys:
            secure_connector(sending, read_engine_keys(Path(keys[0])))
        sending.connect(address)
        payload = bytes(size)
        for _ in range(count):
            sending.send(payload)


def flood(path: str, count: int, size: int) -> None:
    """Connect, send, and wait until the receiver has hung up."""
    writes, rest = divmod(count, MESSAGES_PER_WRITE)
    if rest or not 0 < size < 256:
        raise SystemExit(f"thousands of messages of 1 to 255 bytes, not {count} of {size}")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + _property("Socket-Type", "DEALER") + _property("Identity", "engine")
        peer.sendall(bytes([4, len(ready)]) + ready)
        size_of_answer = _read(peer, GREETING_BYTES + 2)[-1]
        _read(peer, size_of_answer)  # earlier messages would be taken for part of the handshake
        messages = (bytes([0, size]) + bytes(size)) * MESSAGES_PER_WRITE
        for _ in range(writes):
            peer.sendall(messages)
        while peer.recv(1024):
            pass


def _read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += peer.recv(count - len(data)) or sys.exit("the receiver has hung up")
    return data


def _property(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value.encode()


SENDERS: dict[str, Callable[..., None]] = {"dealer": dealer, "flood": flood}

if __name__ == "__main__":
    SENDERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
