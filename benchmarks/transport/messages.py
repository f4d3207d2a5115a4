"""Receive rate of messages, against zmq.asyncio, and the cost of CURVE encryption.

``python -m benchmarks.transport messages`` calls :func:`rows`. Receives with the run's own
``RouterSocket``; ``message_sender.py`` sends.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from benchmarks.table import Figures, Row, by_turns, spread_row
from tidegate.transport.router import RouterSocket
from tidegate.transport.security import ENGINE_DEFAULT, make_keys, read_orchestrator_keys

SMALL_BYTES = 200
SMALL_MESSAGES = 400_000
PEER_MESSAGES = 40_000
"""Number of the peer's messages; it is an order of magnitude slower."""
CURVE_MESSAGES = 100_000
CHUNK_BYTES = 1024 * 1024
CHUNKS = 400
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


def sender(kind: str, address: str, count: int, size: int, keys: Path | None = None) -> list[str]:
    """Return the command of a sending process."""
    command = [sys.executable, "-m", "benchmarks.transport.message_sender", kind]
    return [*command, address, str(count), str(size), *([str(keys)] if keys else [])]


async def receive_ours(
    count: int, size: int = SMALL_BYTES, *, by: str = "dealer", keys: Path | None = None
) -> Figures:
    """Receive with a run's own socket."""
    own_keys = read_orchestrator_keys(keys) if keys else None
    router = RouterSocket(None, name="benchmark", keys=own_keys)
    meter = Meter(count)
    router.attach(asyncio.get_running_loop(), lambda batch: meter.add(len(batch)))
    address = router.address if by == "dealer" else router.address.removeprefix("ipc://")
    command = sender(by, address, count, size, keys and keys / ENGINE_DEFAULT)
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
        command = sender("flood", f"{directory}/s", count, SMALL_BYTES)
        with subprocess.Popen(command):  # noqa: ASYNC220
            for _ in range(count):
                await router.recv_multipart()
                meter.add(1)
            figures = await meter.done
            router.close(linger=0)
    return figures


def rows() -> Iterator[Row]:
    """Compare 200-byte messages over ipc, both on uvloop; then the cost of encryption."""
    figures = by_turns(
        {
            "ours": lambda: uvloop.run(receive_ours(SMALL_MESSAGES, by="flood")),
            "zmq.asyncio": lambda: uvloop.run(receive_with_zmq_asyncio(PEER_MESSAGES)),
        }
    )
    ours, peer = figures["ours"], figures["zmq.asyncio"]
    yield spread_row("recv_msgs_per_s", "messages/s", ours["per_s"], peer["per_s"], "zmq.asyncio")
    yield spread_row(
        "recv_msgs_per_cpu_s",
        "messages/s per core",
        ours["per_cpu_s"],
        peer["per_cpu_s"],
        "zmq.asyncio",
    )
    with tempfile.TemporaryDirectory() as directory:
        make_keys(Path(directory) / "keys")
        yield from _curve(Path(directory) / "keys")


def _curve(keys: Path) -> Iterator[Row]:
    """Compare ours with and without keys."""
    figures = by_turns(
        {
            f"{what} {'with' if used else 'without'}": partial(_received, count, size, used)
            for what, count, size in (
                ("messages", CURVE_MESSAGES, SMALL_BYTES),
                ("chunks", CHUNKS, CHUNK_BYTES),
            )
            for used in (keys, None)
        }
    )
    for what, name, unit, unit_size in (
        ("messages", "curve_recv_msgs_per_cpu_s", "messages/s per core", 1.0),
        ("chunks", "curve_recv_gb_per_cpu_s", "GB/s per core, in MiB", CHUNK_BYTES / 1e9),
    ):
        ours, plain = (
            [unit_size * figure for figure in figures[f"{what} {which}"]["per_cpu_s"]]
            for which in ("with", "without")
        )
        yield spread_row(name, unit, ours, plain, "without keys")


def _received(count: int, size: int, keys: Path | None) -> Figures:
    return uvloop.run(receive_ours(count, size, keys=keys))
