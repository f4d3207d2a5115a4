"""Crash-safe journal of byte records, committed by a thread of its own (group commit).

:class:`RunJournal` appends to it. ``append`` returns at once; one thread commits all records
appended since its last commit, and reports the last lsn. So the slower the disk, the more records
share a commit, and the event loop never waits for the disk.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tidegate.errors import JournalBehind, JournalError, JournalFailed, RunClosed
from tidegate.orchestrator.journal.file import JournalFile
from tidegate.orchestrator.journal.reading import JournalSnapshot

COMMIT_BYTES_MAX = 8 * 1024 * 1024
"""Most record bytes in one commit: larger commits are no faster, and delay their first record."""

PENDING_BYTES_MAX = 1024 * 1024 * 1024
"""Most record bytes that wait for the disk: 10 s of 20,000 groups/s. With more, the disk hangs."""

BODY_BYTES_MAX = 512 * 1024 * 1024
"""Largest record or snapshot; SQLite's own limit is 10⁹ bytes, and each is copied twice."""

CLOSE_TIMEOUT_S = 60.0
"""Time limit of committing pending records: a disk that needs longer for 1 GiB has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatistics:
    """Counters of a journal at one instant, since it was opened."""

    appended_lsn: int
    """Lsn of the last record that was appended."""
    snapshot_lsn: int
    """Lsn of the newest stored snapshot; 0 without one."""
    records: int
    """Number of records committed since the journal was opened."""
    payload_bytes: int
    """Bytes of committed records, without the file's overhead."""
    commits: int
    pending_bytes: int
    """Bytes of records not committed yet."""
    file_bytes: int
    """Size on disk, the WAL included."""


@dataclass(slots=True)
class _Work:
    """Records and snapshot of one commit."""

    records: list[bytes]
    payload_bytes: int
    snapshot: JournalSnapshot | None


class Journal:
    """An open journal: read it, then :meth:`start` it, then append.

    A write that fails ends it: nothing more is committed, ``on_error`` is called once, and later
    calls of ``append`` raise. To continue, close it, repair the disk and open it again.
    """

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_committed = threading.Condition(self._lock)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._snapshot: JournalSnapshot | None = None
        """Newest snapshot that is not stored yet; it replaces older ones."""
        self._appended_lsn = self._committed_lsn = file.last_lsn
        self._records_since_open = self._payload_bytes = self._commits = 0
        self._bytes_since_snapshot = file.payload_bytes()
        self._write_error: Exception | None = RuntimeError("start() the journal, then write to it")
        """Error that every write raises; None while records are accepted."""
        self._is_idle = False
        """Whether the writing thread waits for work."""
        self._thread: threading.Thread | None = None

    @classmethod
    def create(cls, path: Path, *, header: bytes) -> Self:
        """Create a journal that holds only ``header``, and open it.

        Raises:
            JournalExists: there is one already, or another file of that name.
            JournalLocked: another run is just creating it.
            JournalFailed: the disk refuses it.
        """
        return cls(JournalFile.create(Path(path), header))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing journal, after a clean close or a crash.

        Raises:
            JournalMissing: there is none, or its creator died before it was complete.
            JournalLocked: another run is using it.
            JournalCorrupt: it is damaged, or not a journal.
            JournalTooNew: a newer Tidegate wrote it.
            JournalFailed: the disk refuses it.
        """
        return cls(JournalFile.open(Path(path)))

    # ------------------------------------------------------------------------- reading

    @property
    def header(self) -> bytes:
        """Bytes that were given to :meth:`create`."""
        return self._file.header

    def snapshot(self) -> JournalSnapshot | None:
        """Return the newest stored snapshot with its lsn; None without one."""
        return self._file.snapshot

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records after the snapshot, in order, each with its lsn. Only before
        :meth:`start`.

        Raises:
            JournalCorrupt: the bytes from here on are damaged.
        """
        if self._thread is not None:
            raise RuntimeError("the journal is being written; read it before start()")
        return self._file.read()

    @property
    def bytes_since_snapshot(self) -> int:
        """Bytes of records appended since the last :meth:`compact`, which a reopening would read.

        After a reopening, records that the snapshot covers but that share a commit with later
        records count too.
        """
        return self._bytes_since_snapshot

    def statistics(self) -> JournalStatistics:
        """Return the counters; safe to call from any thread."""
        file_bytes = self._file.file_bytes()
        with self._lock:
            stored = self._file.snapshot
            return JournalStatistics(
                appended_lsn=self._appended_lsn,
                snapshot_lsn=stored.lsn if stored else 0,
                records=self._records_since_open,
                payload_bytes=self._payload_bytes,
                commits=self._commits,
                pending_bytes=self._pending_bytes,
                file_bytes=file_bytes,
            )

    # ------------------------------------------------------------------------- writing

    def start(
        self,
        on_committed: Callable[[int], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Start the writing thread. Both callbacks are called from it, and must not block or raise.

        ``on_committed(lsn)``: every record up to ``lsn`` is on the disk. ``on_error(error)``:
        writing has failed, and nothing more will be committed.
        """
        if self._thread is not None:
            raise RuntimeError("the journal has been started already")
        self._write_error = None
        self._thread = threading.Thread(
            target=self._write, args=(on_committed, on_error), name="journal", daemon=True
        )
        self._thread.start()

    def append(self, record: bytes) -> int:
        """Queue a record to be committed after all earlier ones; return its lsn.

        Never waits for the disk. Lsns count from 1, over reopenings too.

        Raises:
            JournalFailed: an earlier write has failed.
            JournalBehind: too many bytes wait for the disk.
            RunClosed: the journal is closed.
        """
        _refuse_larger(record)
        with self._lock:
            self._raise_write_error()
            if self._pending_bytes > PENDING_BYTES_MAX:
                raise self._behind_error("no more is kept in memory")
            self._pending.append(record)
            self._pending_bytes += len(record)
            self._bytes_since_snapshot += len(record)
            self._appended_lsn += 1
            if self._is_idle:
                self._has_work.notify()
            return self._appended_lsn

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Queue ``snapshot`` to replace all records up to ``lsn``; never waits for the disk.

        The snapshot is stored and the records deleted in one transaction, once all are committed.
        """
        _refuse_larger(snapshot)
        with self._lock:
            self._raise_write_error()
            newest = self._snapshot or self._file.snapshot
            first = newest.lsn if newest else 0
            if not first <= lsn <= self._appended_lsn:
                raise ValueError(
                    f"lsn must be from the last snapshot's, {first}, to the last appended, "
                    f"{self._appended_lsn}, got {lsn}"
                )
            self._snapshot = JournalSnapshot(lsn, snapshot)
            self._bytes_since_snapshot = 0
            if self._is_idle:
                self._has_work.notify()

    def flush(self, timeout_s: float) -> int:
        """Wait until everything appended so far is committed; return its last lsn.

        Raises:
            JournalFailed: writing has failed, before or meanwhile.
            JournalBehind: committing took longer than ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            lsn, snapshot = self._appended_lsn, self._snapshot
            while self._committed_lsn < lsn or (snapshot and self._snapshot is snapshot):
                self._raise_write_error()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._behind_error(f"not done in {timeout_s:.1f} s")
                self._has_committed.wait(left_s)
        return lsn

    def close(self) -> None:
        """Commit pending records, end the thread and release the file. Harmless when repeated.

        Raises:
            JournalBehind: the disk hangs; pending records are lost.
        """
        with self._lock:
            self._write_error = self._write_error or RunClosed(
                f"the journal {self._file.path} is closed"
            )
            self._has_work.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise self._behind_error(f"not done in {CLOSE_TIMEOUT_S:.0f} s")
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------- the writing thread

    def _write(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        try:
            while (work := self._next_work()) is not None:
                self._commit(work)
                on_committed(self._committed_lsn)
                self._file.merge_wal()
        except Exception as error:  # noqa: BLE001  passed to the owner, who decides
            on_error(self._fail(error))

    def _next_work(self) -> _Work | None:
        """Wait for work; None once the journal is closed and everything is committed."""
        with self._lock:
            while not self._pending and self._snapshot is None:
                if self._write_error is not None:
                    return None
                self._is_idle = True
                self._has_work.wait()
                self._is_idle = False
            records = self._take()
            snapshot = self._snapshot
            if snapshot is not None and snapshot.lsn > self._committed_lsn + len(records):
                snapshot = None  # some records that it covers are not in this commit
            return _Work(records, sum(map(len, records)), snapshot)

    def _take(self) -> list[bytes]:
        """Return as many of the oldest pending records as one commit may hold."""
        if self._pending_bytes <= COMMIT_BYTES_MAX:
            records, self._pending = self._pending, []
            return records
        ends = itertools.accumulate(map(len, self._pending))
        count = max(1, sum(1 for _ in itertools.takewhile(COMMIT_BYTES_MAX.__ge__, ends)))
        records, self._pending = self._pending[:count], self._pending[count:]
        return records

    def _commit(self, work: _Work) -> None:
        self._file.commit(work.records, work.snapshot)
        with self._lock:
            self._committed_lsn = self._file.last_lsn
            self._pending_bytes -= work.payload_bytes
            self._records_since_open += len(work.records)
            self._payload_bytes += work.payload_bytes
            self._commits += 1
            if work.snapshot is not None and self._snapshot is work.snapshot:
                self._snapshot = None
            self._has_committed.notify_all()

    def _fail(self, error: Exception) -> JournalError:
        failure = error if isinstance(error, JournalError) else self._failure(error)
        with self._lock:
            self._write_error = failure
            self._pending.clear()
            self._snapshot = None
            self._has_committed.notify_all()
        return failure

    # ------------------------------------------------------------------------- refusing

    def _raise_write_error(self) -> None:
        if self._write_error is not None:
            # The same error is raised many times, and each raise would add to its traceback.
            raise self._write_error.with_traceback(None)

    def _failure(self, error: Exception) -> JournalFailed:
        failure = JournalFailed(path=self._file.path, why=f"its writer stopped: {error!r}")
        failure.__cause__ = error
        return failure

    def _behind_error(self, why: str) -> JournalBehind:
        return JournalBehind(path=self._file.path, pending_bytes=self._pending_bytes, why=why)


def _refuse_larger(body: bytes) -> None:
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(
            f"a record or snapshot may have {BODY_BYTES_MAX} bytes, got {len(body)}: split it"
        )
