"""Interface of the orchestrator's socket; the ZeroMQ ROUTER and the simulated wire implement it.

``trainer/run.py`` passes a :class:`Wire` to the scheduler, whose engine side sends and receives
through it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tidegate.transport.messages import Message


class Wire(Protocol):
    """The orchestrator's end of the wire, connected with any number of engines."""

    address: str

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue one message without waiting; False if the peer isn't connected any more."""

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[tuple[bytes, bytes]]], None],
    ) -> None:
        """Have ``loop`` call ``on_frames`` with the (peer, frame) pairs that have arrived."""

    def detach(self) -> None:
        """Stop calling back."""

    def close(self) -> None:
        """Release the address."""
