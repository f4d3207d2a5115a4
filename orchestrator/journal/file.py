"""The journal's file: an SQLite database in WAL mode with ``synchronous=FULL``.

:class:`Journal` writes it from its thread; one caller at a time. A commit is on the disk when it
returns, so it survives a crash of the process and of the machine, if the disk honours ``fsync``.
Records are opaque bytes here.
"""

import fcntl
import os
import socket
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tidegate.errors import (
    JournalCorrupt,
    JournalExists,
    JournalFailed,
    JournalLocked,
    JournalMissing,
)
from tidegate.orchestrator.journal.reading import (
    SQLITE_PROBLEMS,
    JournalSnapshot,
    as_journal_errors,
    check,
    is_unused,
    pragma,
    read_header,
    read_last_lsn,
    read_records,
    read_snapshot,
)
from tidegate.orchestrator.journal.schema import (
    PAGE_BYTES,
    checksum,
    create_schema,
    migrate,
    pack,
)
from tidegate.transport.private_directory import make_private_directory, make_private_file

WAL_BYTES_MAX = 64 * 1024 * 1024
"""WAL size at which it is merged into the database. With the largest commit, this bounds the WAL's
disk space and the time in which a reopening reads it: some 0.1 s. 16 MiB cost a tenth more time."""

BUSY_TIMEOUT_S = 10.0
"""Longest wait for SQLite's own lock, which other tools may hold for a moment. Other runs are
refused at once, by the lock file."""


class FileLock:
    """Exclusive lock on a journal, on a file beside it, so that a second run is refused.

    It never waits. The kernel releases it when the holder ends, even if killed. The file stays,
    because deleting it would race with the next holder.

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


class JournalFile:
    """An open journal file. Make one with :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = b""
        self.snapshot: JournalSnapshot | None = None
        self.last_lsn = 0
        """Lsn of the newest committed record; 0 before the first."""
        self._files = (path, path.with_name(path.name + "-wal"))
        self._inodes: list[int] = []
        self._unmerged_bytes = 0
        self._lock = FileLock(path)
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except BaseException:
            self._lock.release()
            raise
        self._connection.text_factory = bytes  # a damaged body may read as text, not valid UTF-8

    # ------------------------------------------------------------------------- opening, closing

    @classmethod
    def create(cls, path: Path, header: bytes) -> "JournalFile":
        """Create a journal that holds only its header."""
        with as_journal_errors(path):
            make_private_directory(path.parent)
            _refuse_orphaned_wal(path)
            if not path.exists():
                make_private_file(path)  # SQLite gives the WAL the same permissions
            file = cls(path)
            try:
                file._refuse_if_used()
                file._configure()
                create_schema(file._connection, header)
                file._load()
            except BaseException:
                file.close()
                raise
        return file

    @classmethod
    def open(cls, path: Path) -> "JournalFile":
        """Open an existing journal, recover and check it, and migrate it to this schema."""
        with as_journal_errors(path):
            _refuse_orphaned_wal(path)
            if not path.exists() or path.stat().st_size == 0:
                raise JournalMissing(path=path)
            file = cls(path)
            try:
                check(path, file._connection)
                file._configure()
                migrate(file._connection, pragma(file._connection, "user_version"))
                file._load()
            except BaseException:
                file.close()
                raise
        return file

    def _refuse_if_used(self) -> None:
        try:
            if is_unused(self._connection):  # left by a creator that died
                return
        except SQLITE_PROBLEMS:
            pass  # not a database: something else's file
        raise JournalExists(path=self.path)

    def _configure(self) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA page_size = {PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA wal_autocheckpoint = 0")  # merge_wal does it, outside of commits
        execute(f"PRAGMA journal_size_limit = {2 * WAL_BYTES_MAX}")  # after a larger commit
        execute("PRAGMA secure_delete = OFF")  # on in some builds: each deletion would be written
        execute("BEGIN IMMEDIATE")
        # Changes nothing, but fails now if the file can't be written.
        execute(f"PRAGMA user_version = {pragma(self._connection, 'user_version')}")
        execute("ROLLBACK")

    def _load(self) -> None:
        self.header = read_header(self.path, self._connection)
        self.snapshot = read_snapshot(self.path, self._connection)
        self.last_lsn = read_last_lsn(self.path, self._connection, self.snapshot)
        self._inodes = [file.stat().st_ino for file in self._files]

    def close(self) -> None:
        """Merge the WAL and release the file. Harmless when repeated."""
        # If merging fails, the records stay in the WAL, and the next opening merges them.
        with suppress(sqlite3.Error):
            self._connection.close()
        self._lock.release()

    # ------------------------------------------------------------------------- reading

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The records after the snapshot, in order, each with its lsn."""
        return read_records(self.path, self._connection, self.snapshot)

    def payload_bytes(self) -> int:
        """Return the bytes of the records that are kept."""
        query = "SELECT total(length(body) - 4 * records) FROM batches"
        return int(self._connection.execute(query).fetchone()[0])

    def file_bytes(self) -> int:
        """Return the size on disk, the WAL included."""
        total = 0
        for file in self._files:
            with suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    # ------------------------------------------------------------------------- writing

    def commit(self, records: Sequence[bytes], snapshot: JournalSnapshot | None) -> None:
        """Add records and, if there is one, replace all records that a snapshot covers by it.

        On return the records are on the disk. If this raises, all of them may be there or none;
        write no more then, but close the file and open it again.
        """
        with as_journal_errors(self.path):
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                if records:
                    self._add(records)
                if snapshot is not None:
                    self._compact(snapshot)
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
            self._check_not_replaced()
        self.last_lsn += len(records)
        self.snapshot = snapshot or self.snapshot

    def merge_wal(self) -> bool:
        """Merge the WAL into the database if it has grown enough; return whether it had."""
        if self._unmerged_bytes < WAL_BYTES_MAX:
            return False
        with as_journal_errors(self.path):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._unmerged_bytes = 0
        return True

    def _add(self, records: Sequence[bytes]) -> None:
        body = pack(records)
        first_lsn = self.last_lsn + 1
        self._connection.execute(
            "INSERT INTO batches (first_lsn, records, body, crc32) VALUES (?, ?, ?, ?)",
            (first_lsn, len(records), body, checksum(first_lsn, len(records), body)),
        )
        self._unmerged_bytes += len(body) + PAGE_BYTES  # a commit writes whole pages

    def _compact(self, snapshot: JournalSnapshot) -> None:
        """Replace records with a snapshot. A row that the snapshot covers only in part stays;
        reading skips its covered records."""
        execute = self._connection.execute
        execute("DELETE FROM snapshots")
        execute(
            "INSERT INTO snapshots (lsn, body, crc32) VALUES (?, ?, ?)",
            (snapshot.lsn, snapshot.body, checksum(snapshot.lsn, 0, snapshot.body)),
        )
        execute("DELETE FROM batches WHERE first_lsn + records - 1 <= ?", (snapshot.lsn,))
        self._unmerged_bytes += len(snapshot.body) + PAGE_BYTES

    def _check_not_replaced(self) -> None:
        """Fail if a file was deleted or replaced: SQLite would still write to it and commit."""
        for file, inode in zip(self._files, self._inodes, strict=True):
            try:
                is_same_file = file.stat().st_ino == inode
            except OSError:
                is_same_file = False
            if not is_same_file:
                raise JournalFailed(
                    path=self.path, why=f"{file.name} was removed or replaced while it was in use"
                )


def refuse_irregular(path: Path) -> None:
    """Refuse a journal whose files include a FIFO or a device, on which SQLite would block."""
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists() and not file.is_file():
            raise JournalCorrupt(path=path, where=f"{file.name} is not a regular file")


def _refuse_orphaned_wal(path: Path) -> None:
    """Refuse an empty or missing database with a WAL: SQLite would delete the WAL and its commits.

    A creator that died leaves no such state: the database is never empty once there is a WAL.
    """
    refuse_irregular(path)
    wal = path.with_name(path.name + "-wal")
    is_empty = not path.exists() or path.stat().st_size == 0
    if is_empty and wal.exists() and wal.stat().st_size:
        raise JournalCorrupt(path=path, where=f"it is empty or gone, but {wal.name} is not")
