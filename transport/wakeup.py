"""How does one thread wake another that waits on sockets? By an eventfd that both may touch.

It knows nothing of what either does. Writing to a descriptor by its number after the other thread
has closed it would hit whatever file has that number since: so both go through one lock, and who
comes late does nothing.
"""

import contextlib
import os
import threading


class Wakeup:
    """An eventfd that is closed once, whoever of the two threads ends first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """What the waiting thread polls; for that thread only, which is the one that closes it.

        Raises:
            ValueError: it is closed.
        """
        if self._descriptor is None:
            raise ValueError("this wakeup is closed")
        return self._descriptor

    def wake(self) -> None:
        """Have the other thread look; from any thread. Harmless if it has ended."""
        with self._lock, contextlib.suppress(BlockingIOError):  # counted up to its end: it is awake
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def quiet(self) -> None:
        """Forget the calls so far, so that the next poll waits for another."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor is not None:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Let go of the descriptor. Harmless if repeated."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)
