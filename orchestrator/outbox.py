"""What is about to be sent to engines? Collects messages until the loop's next turn.

Each message sent by itself wakes ZeroMQ's thread, which costs more than all else about it.
"""

import asyncio
from collections.abc import Callable, Sequence

from tidegate.transport.messages import Message


class Outbox:
    """Messages in the order in which engines get them."""

    def __init__(
        self, send: Callable[[str, Message], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """``on_error`` hears of a message that was posted and can't be sent: a defect of ours."""
        self._send = send
        self._on_error = on_error
        self._posted: list[tuple[str, Message]] = []

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages now, after all that was posted before."""
        posted, self._posted = self._posted, []
        for engine, message in (*posted, *outgoing):
            self._send(engine, message)

    def post(self, engine: str, message: Message) -> None:
        """Send a message soon, together with others."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._posted.append((engine, message))

    def _send_posted(self) -> None:
        try:
            self.send(())
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it, and wait for ever
            self._on_error(error)
