"""Process that runs many simulated engines over real ZeroMQ sockets.

``subject.py`` starts it. Built on :mod:`benchmarks.orchestrator.fake_engine`,
``transport/messages.py`` and pyzmq: each :class:`FakeEngine` has a plain ZeroMQ DEALER socket of
its own, which is not the engines' ``transport/dealer.py``.
"""

import argparse
import math
import time

import zmq

from benchmarks.orchestrator.fake_engine import FakeEngine, add_work_options
from tidegate.transport.messages import decode_from_orchestrator

HEARTBEAT_S = 5.0

Socket = zmq.Socket[bytes]


def connect(address: str, work: argparse.Namespace) -> dict[Socket, FakeEngine]:
    """Create the engines, each with its own socket."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1024, 2 * work.engines))
    engines = {}
    for number in range(work.engines):
        socket = context.socket(zmq.DEALER)
        engine = FakeEngine(number, work, socket.send)
        socket.setsockopt(zmq.IDENTITY, engine.name.encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        engine.start()
        engines[socket] = engine
    return engines


def serve(engines: dict[Socket, FakeEngine]) -> None:
    """Run all engines until they receive ``Shutdown``."""
    poller = zmq.Poller()
    for socket in engines:
        poller.register(socket, zmq.POLLIN)
    next_heartbeat_s = time.monotonic() + HEARTBEAT_S
    while not all(engine.has_ended for engine in engines.values()):
        due = min(
            (s for e in engines.values() if (s := e.due_s) is not None), default=next_heartbeat_s
        )
        wait_s = min(due, next_heartbeat_s) - time.monotonic()
        for socket, _ in poller.poll(max(0, math.ceil(wait_s * 1000))):
            read(socket, engines[socket])
        now_s = time.monotonic()
        for engine in engines.values():
            if (due_s := engine.due_s) is not None and due_s <= now_s:
                engine.step(now_s)
        if now_s >= next_heartbeat_s:
            next_heartbeat_s = now_s + HEARTBEAT_S
            for engine in engines.values():
                engine.send_heartbeat()


def read(socket: Socket, engine: FakeEngine) -> None:
    """Deliver all arrived messages to an engine."""
    now_s = time.monotonic()
    while True:
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        engine.receive(decode_from_orchestrator(frame), now_s)


def main() -> None:
    """Connect, and run until ``Shutdown``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    add_work_options(parser)
    work = parser.parse_args()
    serve(connect(work.address, work))


if __name__ == "__main__":
    main()
