"""Sending process of the message benchmark: the cheapest possible sender.

``python -m benchmarks.transport.message_sender PATH COUNT BYTES`` writes ZMTP 3.0
(https://rfc.zeromq.org/spec/23/) to a Unix socket, a thousand messages per system call, so that
only the receiver is measured.
"""

import socket
import struct
import sys

MESSAGES_PER_WRITE = 1000
GREETING_BYTES = 64


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


if __name__ == "__main__":
    flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
