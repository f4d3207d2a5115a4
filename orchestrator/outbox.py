"""What is about to be sent to engines? Collects messages until the loop's next turn.

Each message sent by itself wakes ZeroMQ's thread, which costs more than all else about it.
"""

import asyncio
from collections.abc import Callable, Sequence

from tidegate.transport.messages import Message


class Outbox:
    """Messages in the order in which engines get them."""

    def __init__(self, send: Callable[[str, Message], None]) -> None:
        self._send = send
        self._posted: list[tuple[str, Message]] = []

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages now, after all that was posted before."""
        posted, self._posted = self._posted, []
        for engine, message in (*posted, *outgoing):
            self._send(engine, message)

    def post(self, engine: str, message: Message) -> None:
        """Send a message soon, together with others."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self.send, ())
        self._posted.append((engine, message))
