"""Where does a run keep what only it needs, so that nothing is left of it when it is killed?

In a directory below the system's temporary one that only this user can enter. Whoever made it holds
a lock on it as long as its process lives, however that ends; so one whose lock is free belongs to
nobody any more, and is removed by the next who makes one, or by an engine that outlives its run.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "tidegate-"

UNFINISHED_PREFIX = "tidegate."
"""Of a directory that isn't locked yet, so that nobody takes it for abandoned."""

NAME_CHARACTERS_MAX = 24
"""A socket's path has at most 107 bytes."""

LOCK_FILE = ".lock"


class PrivateDirectory:
    """One directory, and the lock that says it is in use."""

    def __init__(self, name: str) -> None:
        """Make one; ``name`` is for people who look there.

        Raises:
            OSError: the temporary directory takes none.
        """
        remove_abandoned()
        readable = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "-_"))
        made = Path(
            tempfile.mkdtemp(prefix=f"{UNFINISHED_PREFIX}{readable[:NAME_CHARACTERS_MAX]}-")
        )
        self._lock = os.open(made / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(PREFIX + made.name.removeprefix(UNFINISHED_PREFIX))
        made.rename(self.path)
        self._is_removed = False

    def remove(self) -> None:
        """Remove it with all that is in it. Harmless if repeated."""
        if not self._is_removed:
            self._is_removed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def make_private_directory(path: Path) -> None:
    """Make a directory that only this user can enter, and its parents as usual.

    A directory that is there already keeps its permissions: they are whoever made it's choice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Make a file that only this user can read, for others to open and write; empty if it is new.

    Prompts, answers and rewards are in a run's files, and a temporary or shared directory may be
    open to all.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(PermissionError):  # another user's, or a file system without modes
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def remove_abandoned() -> None:
    """Remove what killed processes of this user have left behind."""
    with contextlib.suppress(OSError):  # nothing depends on it
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # it isn't ours, or is just being removed
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
