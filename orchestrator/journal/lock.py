"""Exclusive lock on a journal: ``flock`` on a file beside it.

:class:`JournalFile` holds it while the journal is open, so that a second run is refused. The kernel
releases it when the holder ends, even if killed. The lock file stays, because deleting it would
race with the next holder. ``salvage.py`` takes it too.
"""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from tidegate.errors import JournalLocked


class FileLock:
    """Holds ``path``'s lock until released; never waits for it.

    ``flock``, because a ``lockf`` lock is lost as soon as anything in this process closes the file,
    and does not exclude the process that holds it. Children inherit a ``flock``, so a data loader's
    worker that outlives a killed trainer would hold it; therefore forked children release it.

    Raises:
        JournalLocked: this process or another one holds it.
        OSError: the lock file can't be made or opened.
    """

    def __init__(self, path: Path) -> None:
        lock_path = path.with_name(path.name + "-lock")
        self._descriptor: int | None = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 256, 0).decode(errors="replace").strip()
            self.release()
            raise JournalLocked(path=path, holder=holder or "another process") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        _release_in_children(self)

    def release(self) -> None:
        """Release the lock; in a forked child, close only its copy. Harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _release_in_children(lock: FileLock) -> None:
    reference = weakref.ref(lock)  # hooks can't be removed, and must not keep the lock alive

    def release() -> None:
        if (held := reference()) is not None:
            held.release()

    os.register_at_fork(after_in_child=release)
