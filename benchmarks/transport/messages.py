"""Receive rate of messages, against zmq.asyncio.

``python -m benchmarks.transport messages`` calls :func:`rows`. Receives with the run's own
``RouterSocket``; another process, of this module with arguments PATH COUNT BYTES, sends.
"""

import asyncio
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import uvloop
import zmq
import zmq.asyncio

from benchmarks.table import Figures, Row, by_turns, spread_row
from tidegate.transport.router import RouterSocket

SMALL_BYTES = 200
SMALL_MESSAGES = 400_000
PEER_MESSAGES = 40_000
"""Number of the peer's messages; it is an order of magnitude slower."""
TIMEOUT_S = 120.0
MESSAGES_PER_WRITE = 1000
GREETING_BYTES = 64


class Meter:
    """Receive rates from the first batch to the last, by wall clock and by CPU time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._received = self._first = 0
        self._started_s = self._started_cpu_s = 0.0
        self.done: asyncio.Future[Figures] = asyncio.get_running_loop().create_future()

    def add(self, received: int) -> None:
        """Count arrived messages."""
        if self._received == 0:
            self._first = received
            self._started_s, self._started_cpu_s = time.perf_counter(), time.process_time()
        self._received += received
        if self._received == self._count:
            counted = self._count - self._first
            self.done.set_result(
                {
                    "per_s": counted / (time.perf_counter() - self._started_s),
                    "per_cpu_s": counted / (time.process_time() - self._started_cpu_s),
                }
            )


def sender(path: str, count: int) -> list[str]:
    """Return the command of a sending process."""
    command = [sys.executable, "-m", "benchmarks.transport.messages"]
    return [*command, path, str(count), str(SMALL_BYTES)]


async def receive_ours(count: int) -> Figures:
    """Receive with a run's own socket."""
    router = RouterSocket(None, name="benchmark")
    meter = Meter(count)
    router.attach(asyncio.get_running_loop(), lambda batch: meter.add(len(batch)))
    command = sender(router.address.removeprefix("ipc://"), count)
    try:
        with subprocess.Popen(command):  # noqa: ASYNC220
            figures = await asyncio.wait_for(meter.done, TIMEOUT_S)
            router.close()
    finally:
        router.close()
    return figures


async def receive_with_zmq_asyncio(count: int) -> Figures:
    """Receive with pyzmq's own asyncio sockets."""
    with tempfile.TemporaryDirectory() as directory, zmq.asyncio.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.rcvhwm = 16_384  # same as ours
        router.bind(f"ipc://{directory}/s")
        meter = Meter(count)
        command = sender(f"{directory}/s", count)
        with subprocess.Popen(command):  # noqa: ASYNC220
            for _ in range(count):
                await router.recv_multipart()
                meter.add(1)
            figures = await meter.done
            router.close(linger=0)
    return figures


def rows() -> Iterator[Row]:
    """Compare 200-byte messages over ipc, both on uvloop."""
    figures = by_turns(
        {
            "ours": lambda: uvloop.run(receive_ours(SMALL_MESSAGES)),
            "zmq.asyncio": lambda: uvloop.run(receive_with_zmq_asyncio(PEER_MESSAGES)),
        }
    )
    ours, peer = figures["ours"], figures["zmq.asyncio"]
    for name, unit in (("per_s", "messages/s"), ("per_cpu_s", "messages/s per core")):
        yield spread_row(f"recv_msgs_{name}", unit, ours[name], peer[name], "zmq.asyncio")


def flood(path: str, count: int, size: int) -> None:
    """Write ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) to a Unix socket, a thousand messages per
    system call, so that only the receiver is measured; wait until it has hung up."""
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
