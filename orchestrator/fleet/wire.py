"""What does the scheduler need of the wire? The surface that real and simulated sockets share."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tidegate.transport.messages import Message


class Wire(Protocol):
    """The orchestrator's end of the wire, with any number of engines at the other."""

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
        """Let go of the address."""
