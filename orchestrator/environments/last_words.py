"""What did a process print before it ended? The end of it, however much it was."""

from collections import deque
from dataclasses import dataclass, field

OUTPUT_BYTES_KEPT = 4096
"""Of what a process prints: its last words, for the error that reports its death."""

LINES_SHOWN = 20
"""A stack of Python's, with a few lines before it."""


@dataclass(slots=True)
class LastWords:
    """The end of what a process has printed."""

    parts: deque[bytes] = field(default_factory=deque)

    def add(self, data: bytes) -> None:
        """It has printed this."""
        self.parts.append(data[-OUTPUT_BYTES_KEPT:])
        while sum(map(len, self.parts)) - len(self.parts[0]) >= OUTPUT_BYTES_KEPT:
            self.parts.popleft()

    def lines(self) -> list[str]:
        """The last ones."""
        text = b"".join(self.parts)[-OUTPUT_BYTES_KEPT:].decode(errors="replace")
        return text.splitlines()[-LINES_SHOWN:]
