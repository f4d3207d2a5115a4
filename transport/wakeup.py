"""Thread-safe wakeup of a thread that polls sockets: an eventfd.

All access goes through one lock, because writing to a descriptor by number after the other thread
has closed it would hit whatever file has the number since.
"""

import contextlib
import os
import threading


class Wakeup:
    """An eventfd that is closed exactly once, whichever of the two threads ends first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll, for the waiting thread, which also closes it.

        Raises:
            ValueError: the wakeup is closed.
        """
        if self._descriptor is None:
            raise ValueError("this wakeup is closed")
        return self._descriptor

    def wake(self) -> None:
        """Wake the waiting thread; from any thread. A no-op if it has ended."""
        # the counter is at its maximum: the thread is awake
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Reset the counter, so that the next poll waits for a new wakeup."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor is not None:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)
