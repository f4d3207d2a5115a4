"""Receive rate of messages, against zmq.asyncio.

``python -m benchmarks.transport messages`` calls :func:`rows`. Receives with the run's own
``RouterSocket``; ``message_sender.py`` sends.
"""

import asyncio
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
    command = [sys.executable, "-m", "benchmarks.transport.message_sender"]
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
