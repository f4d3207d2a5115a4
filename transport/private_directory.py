"""Private temporary directories of a run, removed even if their process is killed.

A directory lies below the system's temporary directory, only this user can enter it, and its
creator holds an ``flock`` on it for the lifetime of the process. A directory whose lock is free is
therefore abandoned, and is removed by the next process that creates one, or by an engine that
outlives its run. :func:`make_private_file` is for a run's records.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "tidegate-"

UNFINISHED_PREFIX = "tidegate."
"""Prefix of a directory that is not locked yet, so that no process takes it for abandoned."""

NAME_CHARACTERS_MAX = 24
"""Maximum length of the readable part, because a socket path has at most 107 bytes."""

LOCK_FILE = ".lock"


class PrivateDirectory:
    """One private directory, and the lock that marks it as in use."""

    def __init__(self, name: str) -> None:
        """Create a directory; ``name`` is a readable part of its path.

        Raises:
            OSError: the temporary directory cannot be written.
        """
        remove_abandoned()
        readable = "".join(c for c in name if c.isascii() and (c.isalnum() or c in "-_"))
        unfinished = Path(
            tempfile.mkdtemp(prefix=f"{UNFINISHED_PREFIX}{readable[:NAME_CHARACTERS_MAX]}-")
        )
        self._lock = os.open(unfinished / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unfinished.with_name(PREFIX + unfinished.name.removeprefix(UNFINISHED_PREFIX))
        unfinished.rename(self.path)
        self._is_removed = False

    def remove(self) -> None:
        """Remove the directory and its contents. Idempotent."""
        if not self._is_removed:
            self._is_removed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def make_private_directory(path: Path) -> None:
    """Create a directory that only this user can enter, and its parents with default permissions.

    An existing directory keeps its permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Create a file with mode 0600; an existing file keeps its content.

    A run's files hold prompts, answers and rewards, and a temporary or shared directory may be
    readable by all.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # another user's file, or a file system without modes
        with contextlib.suppress(PermissionError):
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def remove_abandoned() -> None:
    """Remove the directories that killed processes of this user have left."""
    with contextlib.suppress(OSError):  # best effort: nothing depends on it
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # not ours, or being removed concurrently
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
