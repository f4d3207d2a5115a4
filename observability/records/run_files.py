"""Files of one recording process, and the thread that writes them during the run.

:class:`RunRecorder` submits jobs to a :class:`RunFiles`. Rollouts go to an Arrow IPC stream at
once, and to a Parquet file in row groups.
"""

import io
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import RecordingFailed
from tidegate.observability.records.trajectories import (
    SCHEMA,
    STREAM_FILE,
    TRAJECTORIES_FILE,
    RolloutSnapshot,
    to_record_batch,
)
from tidegate.transport.private_directory import make_private_directory, make_private_file

METRICS_FILE = "metrics.jsonl"

EVALUATIONS_FILE = "evaluations.jsonl"
"""Exists once there was an evaluation."""

QUEUED_JOBS_MAX = 256
"""Limit of queued jobs, each at most 32 rollouts or one line."""

ROW_GROUP_TOKENS_MAX = 1_000_000
"""Tokens per Parquet row group: 8 MB of ids and log-probs, in memory until it is full."""

ROW_GROUP_ROLLOUTS_MAX = 4096
"""Rollouts per Parquet row group."""

SYNC_TIMEOUT_S = 600.0
"""Longest wait for the queue to reach the disk: two copies of a 140 GB model at 0.5 GB/s."""

log = logging.getLogger("tidegate")


class RunFiles:
    """The open files of one recording process, and the only thread that writes them.

    A job that fails is logged, and the first failure is passed to ``on_failure`` on the writing
    thread. Later jobs still run, so that as much as possible is written.
    """

    def __init__(self, directory: Path, on_failure: Callable[[RecordingFailed], None]) -> None:
        self._directory = directory
        self._on_failure = on_failure
        self._jobs: queue.Queue[tuple[Callable[[], None], str] | None] = queue.Queue(
            QUEUED_JOBS_MAX
        )
        self.failure: RecordingFailed | None = None
        """The first failure; None if every job succeeded."""
        for name in (METRICS_FILE, STREAM_FILE):
            make_private_file(directory / name)
        (directory / TRAJECTORIES_FILE).unlink(missing_ok=True)
        self._stream = RolloutStream(directory / STREAM_FILE)
        self._parquet: pq.ParquetWriter | None = None
        """Writer of the Parquet file's draft, from the first full row group on: a killed run leaves
        no file that looks like its records and can't be read."""
        self._parquet_draft = directory / f"{TRAJECTORIES_FILE}.draft"
        self._is_parquet_whole = True
        self._metrics: IO[bytes] = (directory / METRICS_FILE).open("wb", buffering=0)
        self._row_group: list[pa.RecordBatch] = []
        self._row_group_rollouts = 0
        self._row_group_tokens = 0
        self._thread = threading.Thread(target=self._work, name="run-files", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], what: str) -> None:
        """Queue a job that writes the file named ``what``; blocks while the queue is full."""
        self._jobs.put((job, what))

    def sync(self, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """Wait until everything submitted before is written.

        Rows, lines and ``run.json`` then survive a power failure too; archived weights may not.

        Raises:
            RecordingFailed: a file could not be written, or the wait took longer than
                ``timeout_s``.
        """
        done = threading.Event()

        def to_disk() -> None:
            self._stream.sync()
            os.fsync(self._metrics.fileno())
            _sync_directory(self._directory)

        self.submit(to_disk, STREAM_FILE)
        self.submit(
            done.set, STREAM_FILE
        )  # a job of its own, so that a failure of the one before is already stored
        if not done.wait(timeout_s):
            raise RecordingFailed(
                path=self._directory,
                why=f"the disk did not write what was recorded within {timeout_s:.0f} s",
            )
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def close(self) -> None:
        """Run the queued jobs, complete and close the files, and stop the thread. Call it once.

        Blocks until the disk has accepted everything. Afterwards the directory has either the
        complete Parquet file or, if that could not be written, the Arrow stream. ``submit`` and
        ``sync`` must not be called any more.

        Raises:
            RecordingFailed: the first failure since the start, of any job.
        """
        self._jobs.put(None)
        self._thread.join()
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def write_rollouts(self, snapshots: list[RolloutSnapshot]) -> None:
        """Append rows to the stream at once, and to the Parquet file's next row group.

        Call it only from a job: it writes to the files.
        """
        if not snapshots:
            return
        rows = to_record_batch(snapshots)
        self._row_group.append(rows)
        self._row_group_rollouts += len(snapshots)
        self._row_group_tokens += sum(len(s.token_ids) for s in snapshots)
        try:
            self._stream.append(rows)
        finally:
            if (
                self._row_group_tokens >= ROW_GROUP_TOKENS_MAX
                or self._row_group_rollouts >= ROW_GROUP_ROLLOUTS_MAX
            ):
                self._flush_row_group()

    def write_metrics(self, line: bytes) -> None:
        """Append a line to metrics.jsonl at once, unbuffered. Call it only from a job."""
        _write_whole(self._metrics.fileno(), line, at=self._metrics.tell())

    def write_evaluation(self, line: bytes) -> None:
        """Append a line to evaluations.jsonl. Call it only from a job."""
        path = self._directory / EVALUATIONS_FILE
        if not path.exists():
            make_private_file(path)
        with path.open("ab", buffering=0) as file:
            _write_whole(file.fileno(), line, at=file.tell())
            os.fsync(file.fileno())

    def _flush_row_group(self) -> None:
        if self._row_group and self._is_parquet_whole:
            table = pa.Table.from_batches(self._row_group, schema=SCHEMA)
            self._is_parquet_whole = False
            self._open_parquet().write_table(table)
            self._is_parquet_whole = True
        self._row_group = []
        self._row_group_rollouts = self._row_group_tokens = 0

    def _open_parquet(self) -> pq.ParquetWriter:
        if self._parquet is None:
            make_private_file(self._parquet_draft)
            self._parquet = pq.ParquetWriter(self._parquet_draft, SCHEMA, compression="zstd")
        return self._parquet

    def _close_trajectories(self) -> None:
        """Close both files, and delete the redundant one: the stream if the Parquet file is
        complete, else the Parquet file's draft."""
        redundant = self._parquet_draft
        try:
            self._open_parquet().close()
            if self._is_parquet_whole:
                os.replace(self._parquet_draft, self._directory / TRAJECTORIES_FILE)
                redundant = self._directory / STREAM_FILE
        finally:
            self._stream.close()
            redundant.unlink(missing_ok=True)

    def _work(self) -> None:
        while (queued := self._jobs.get()) is not None:
            self._attempt(*queued)
        self._attempt(self._flush_row_group, TRAJECTORIES_FILE)
        self._attempt(self._close_trajectories, TRAJECTORIES_FILE)
        self._attempt(self._metrics.close, METRICS_FILE)

    def _attempt(self, job: Callable[[], None], what: str) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  stored, and raised by sync() and close() in the owner's thread
            failure = RecordingFailed(path=self._directory / what, why=_why(error))
            failure.__cause__ = error
            log.error("run=unrecorded path=%s why=%r", failure.path, failure.why)
            if self.failure is None:
                self.failure = failure
                self._on_failure(failure)


class RolloutStream:
    """Writer of an Arrow IPC stream, readable up to its last complete record batch at any time.

    A record batch that can't be written completely is truncated away, so that later ones stay
    readable.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._buffer = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._writer = pa.ipc.new_stream(self._buffer, SCHEMA, options=options)
        self._size = 0
        self._begin = b""
        """Schema and rows of a first write that failed. They are written with the next batch,
        because readers need the schema."""

    def append(self, rows: pa.RecordBatch) -> None:
        """Write a record batch; the kernel has all of it when this returns.

        Raises:
            OSError: the write failed; the stream is as it was before.
        """
        self._writer.write_batch(rows)
        body = self._begin + self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        try:
            _write_whole(self._file, body, at=self._size)
        except OSError:
            self._begin = b"" if self._size else body
            raise
        self._begin = b""
        self._size += len(body)

    def sync(self) -> None:
        """Flush the file to the disk with ``fsync``."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. An IPC stream needs no footer."""
        os.close(self._file)


def _write_whole(file: int, body: bytes, *, at: int) -> None:
    """Write all of ``body`` at the file's end ``at``; on failure, truncate back to ``at``."""
    rest = memoryview(body)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, at)
        os.lseek(file, at, os.SEEK_SET)
        raise


def _why(error: Exception) -> str:
    """Return an error in one line, with its type unless it is an ``OSError``."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def _sync_directory(directory: Path) -> None:
    """Flush a directory's and its parent's entries, so that new files survive a power failure."""
    for path in (directory, directory.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_file(path: Path, body: bytes) -> None:
    """Replace a file atomically: readers, also after a crash, see the old or the new content."""
    draft = path.with_name(path.name + ".draft")
    try:
        make_private_file(draft)
        with draft.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave the new name with no content
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)  # frees disk space for smaller files
        raise


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Yield a draft directory, and rename it to ``target`` only after its files are complete."""
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    make_private_directory(draft)
    try:
        yield draft
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
    except BaseException:
        shutil.rmtree(
            draft, ignore_errors=True
        )  # on a full disk, it may hold all the remaining space
        raise
