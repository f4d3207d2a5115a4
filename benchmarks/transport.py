"""How fast are messages received and weights handed over, beside the plain way of doing it?

``python -m benchmarks.transport [--json]`` prints ``name, value, unit, peer, ratio``. Each value is
the median of five runs, ours and the peer's by turns, so that a busy machine slows both.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from tidegate.transport.sockets import RouterSocket
from tidegate.transport.weight_channels import NamedBuffer, receiver, sender

RUNS = 5
MESSAGES = 100_000
PEER_MESSAGES = 20_000
"""The peer needs no more: it is an order of magnitude slower."""
MESSAGE_BYTES = 200
WEIGHT_BYTES = 256 * 1024 * 1024
"""More than any cache of one core."""

FLOOD = """
import sys, zmq
context = zmq.Context()
address, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
socket = context.socket(zmq.DEALER)
socket.sndhwm = 0
socket.connect(address)
payload = bytes(size)
for _ in range(count):
    socket.send(payload)
socket.close()
context.term()
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: float
    """The peer's value, in the same unit and run."""
    ratio: float
    """Ours over the peer's."""


def compare(name: str, unit: str, ours: Callable[[], float], peer: Callable[[], float]) -> Row:
    """Run both by turns and take the medians."""
    pairs = [(ours(), peer()) for _ in range(RUNS)]
    value = statistics.median(pair[0] for pair in pairs)
    peer_value = statistics.median(pair[1] for pair in pairs)
    return Row(name, value, unit, peer_value, value / peer_value)


# ------------------------------------------------------------------------------------- messages


def flood(address: str, count: int) -> "subprocess.Popen[bytes]":
    """Another process that sends as fast as it can."""
    arguments = [address, str(count), str(MESSAGE_BYTES)]
    return subprocess.Popen([sys.executable, "-c", FLOOD, *arguments])


async def receive_ours() -> float:
    """Messages per second from the first batch to the last."""
    router = RouterSocket(None, name="benchmark")
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    received = first = 0
    started_s = 0.0

    def take(batch: list[tuple[bytes, bytes]]) -> None:
        nonlocal received, first, started_s
        if received == 0:
            first, started_s = len(batch), time.perf_counter()
        received += len(batch)
        if received == MESSAGES:
            done.set_result((received - first) / (time.perf_counter() - started_s))

    router.attach(asyncio.get_running_loop(), take)
    with flood(router.address, MESSAGES):
        per_s = await done
    router.close()
    return per_s


async def receive_with_zmq_asyncio() -> float:
    """The same with pyzmq's own asyncio sockets."""
    with tempfile.TemporaryDirectory() as directory, zmq.asyncio.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.rcvhwm = 0
        router.bind(address := f"ipc://{directory}/s")
        with flood(address, PEER_MESSAGES):
            await router.recv_multipart()
            started_s = time.perf_counter()
            for _ in range(PEER_MESSAGES - 1):
                await router.recv_multipart()
            per_s = (PEER_MESSAGES - 1) / (time.perf_counter() - started_s)
        router.close()
    return per_s


def messages() -> list[Row]:
    """Receiving 200-byte messages over ipc, both on uvloop."""
    return [
        compare(
            "recv_msgs_per_s",
            "messages/s",
            lambda: uvloop.run(receive_ours()),
            lambda: uvloop.run(receive_with_zmq_asyncio()),
        )
    ]


# -------------------------------------------------------------------------------------- weights


def gb_per_s(copy: Callable[[], object]) -> float:
    """Speed of something that moves the weights once."""
    started_s = time.perf_counter()
    copy()
    return WEIGHT_BYTES / 1e9 / (time.perf_counter() - started_s)


def weights() -> list[Row]:
    """Writing a version, and copying it out of the receiver's views, into memory used before."""
    trained = np.ones(WEIGHT_BYTES, dtype=np.uint8)
    live = np.ones(WEIGHT_BYTES, dtype=np.uint8)
    tensor = NamedBuffer("w", "bfloat16", (WEIGHT_BYTES // 2,), trained.data)
    out = sender("shm")
    [update] = out.write(0, [tensor])
    end = receiver(out.init())

    def read() -> None:
        for _, view in end.tensors(update):
            np.copyto(live, np.frombuffer(view, dtype=np.uint8))

    def memcpy() -> float:
        return gb_per_s(lambda: np.copyto(live, trained))

    read()
    rows = [
        compare(
            "shm_weights_gb_per_s", "GB/s", lambda: gb_per_s(lambda: out.write(1, [tensor])), memcpy
        ),
        compare("shm_weights_read_gb_per_s", "GB/s", lambda: gb_per_s(read), memcpy),
    ]
    end.close()
    out.close()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    as_json = parser.parse_args().json
    for row in [*messages(), *weights()]:
        if as_json:
            print(json.dumps(asdict(row)))
        else:
            print(f"{row.name}, {row.value:.4g}, {row.unit}, {row.peer:.4g}, {row.ratio:.2f}")


if __name__ == "__main__":
    main()
