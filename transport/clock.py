"""Clock of an engine: the machine's clock, or one in virtual time.

The engine loop, the link and staging read the time and pace steps through it. The module ``time``
is the default; ``simulation/engine/computing.py`` passes a clock of modelled times.
"""

from typing import Protocol


class Clock(Protocol):
    """Functions of the module ``time`` that an engine calls."""

    def monotonic(self) -> float:
        """Return the seconds since some point in the past."""

    def monotonic_ns(self) -> int:
        """Return the nanoseconds since the same point."""

    def sleep(self, seconds: float, /) -> None:
        """Let ``seconds`` pass."""
