"""Engines inside the orchestrator's event loop, to measure rollouts without a wire.

``subject.py`` uses it for ``--in-process``. It replaces the socket only: messages are still encoded
and decoded.
"""

import argparse
import asyncio
from collections.abc import Callable
from functools import partial

from benchmarks.orchestrator.fake_engine import FakeEngine
from tidegate.transport.messages import FromOrchestrator, Message

OnFrames = Callable[[list[tuple[bytes, bytes]]], None]


class InProcessEngines:
    """Implements :class:`~tidegate.orchestrator.fleet.wire.Wire` with simulated engines behind
    it."""

    def __init__(self, work: argparse.Namespace) -> None:
        self.address = "in-process"
        self._work = work
        self._engines: dict[bytes, FakeEngine] = {}
        self._frames: list[tuple[bytes, bytes]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: OnFrames = lambda frames: None
        self._is_due = False

    def send(self, peer: bytes, message: Message) -> bool:
        """Deliver a message to an engine now; it steps before the loop's next turn."""
        assert self._loop is not None
        engine = self._engines[peer]
        assert isinstance(message, FromOrchestrator)
        engine.receive(message, self._loop.time())
        self._schedule()
        return True

    def attach(self, loop: asyncio.AbstractEventLoop, on_frames: OnFrames) -> None:
        """Start the engines, which send their hellos."""
        self._loop, self._on_frames = loop, on_frames
        for number in range(self._work.engines):
            peer = f"engine-{number}".encode()
            engine = FakeEngine(number, self._work, partial(self._say, peer))
            self._engines[peer] = engine
            engine.start()
        self._schedule()

    def _say(self, peer: bytes, frame: bytes) -> None:
        self._frames.append((peer, frame))

    def detach(self) -> None:
        """Stop delivering frames."""
        self._on_frames = lambda frames: None

    def close(self) -> None:
        """No-op."""

    def _schedule(self) -> None:
        assert self._loop is not None
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        assert self._loop is not None
        self._is_due = False
        now_s = self._loop.time()
        for engine in self._engines.values():
            if (due_s := engine.due_s) is not None and due_s <= now_s:
                engine.step(now_s)
                self._schedule()
        frames, self._frames = self._frames, []
        if frames:
            self._on_frames(frames)
