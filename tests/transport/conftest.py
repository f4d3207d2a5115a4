"""Shared fixtures of the transport tests: routers that are closed, and an inbox to await frames."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import zmq

from tidegate.transport.router import FRAMES_PER_DRAIN, RouterSocket

WAIT_S = 30.0
"""Timeout far longer than anything here takes: reaching it is a failure."""


class Inbox:
    """Collects the frames that an attached router delivers."""

    def __init__(self, router: RouterSocket, *, budget: int = FRAMES_PER_DRAIN) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.batch_sizes: list[int] = []
        self.on_frame: Callable[[bytes, bytes], object] = lambda peer, frame: None
        self.arrived = asyncio.Event()
        router.attach(asyncio.get_running_loop(), self._take, budget=budget)

    def _take(self, batch: list[tuple[bytes, bytes]]) -> None:
        self.frames += batch
        self.batch_sizes.append(len(batch))
        for peer, frame in batch:
            self.on_frame(peer, frame)
        self.arrived.set()

    async def wait_for(self, count: int) -> list[tuple[bytes, bytes]]:
        """Return the first ``count`` frames once they have arrived."""
        async with asyncio.timeout(WAIT_S):
            while len(self.frames) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return self.frames[:count]


@pytest.fixture(params=[None, "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
def router(request: pytest.FixtureRequest) -> Iterator[RouterSocket]:
    socket = RouterSocket(request.param, name="test")
    yield socket
    socket.close()


def stranger_socket(kind: int) -> "zmq.Socket[bytes]":
    """Return a plain ZeroMQ socket, to send what ours would not."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvtimeo = 60_000
    return socket
