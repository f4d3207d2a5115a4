"""How do a run's files reach the disk without making the run wait? Through one thread.

Knows files, rows and lines; when something is worth writing is the recorder's business.
"""

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

from tidegate.orchestrator.records.trajectories import (
    SCHEMA,
    TRAJECTORIES_FILE,
    Snapshot,
    to_record_batch,
)

METRICS_FILE = "metrics.jsonl"

QUEUED_JOBS_MAX = 256
"""Each is at most 32 rollouts or one line; a writer that far behind has a broken disk."""

ROW_GROUP_TOKENS_MAX = 1_000_000
"""8 MB of tokens and log-probs; a row group is held in memory until it is full."""

ROW_GROUP_ROLLOUTS_MAX = 4096


class RunFiles:
    """The open files of one run, and the only thread that touches them.

    A job that fails is remembered and the next ones still run: a full disk should cost as little
    as it can. :meth:`close` raises the first failure.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED_JOBS_MAX)
        self._failure: Exception | None = None
        self._parquet = pq.ParquetWriter(directory / TRAJECTORIES_FILE, SCHEMA, compression="zstd")
        self._metrics: IO[bytes] = (directory / METRICS_FILE).open("wb")
        self._row_group: list[pa.RecordBatch] = []
        self._row_group_rollouts = 0
        self._row_group_tokens = 0
        self._thread = threading.Thread(target=self._work, name="run-files", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Have the thread do this after all that was submitted before; waits while it is full."""
        self._jobs.put(job)

    def close(self) -> None:
        """Do what is queued, close the files, end the thread, and raise what failed first."""
        self._jobs.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def write_rollouts(self, snapshots: list[Snapshot]) -> None:
        """Add rows; only to be called as a job."""
        if not snapshots:
            return
        self._row_group.append(to_record_batch(snapshots))
        self._row_group_rollouts += len(snapshots)
        self._row_group_tokens += sum(len(s.token_ids) for s in snapshots)
        if (
            self._row_group_tokens >= ROW_GROUP_TOKENS_MAX
            or self._row_group_rollouts >= ROW_GROUP_ROLLOUTS_MAX
        ):
            self._flush_row_group()

    def write_metrics(self, line: bytes) -> None:
        """Add a line, at once, for those who watch the file; only to be called as a job."""
        self._metrics.write(line)
        self._metrics.flush()

    def _flush_row_group(self) -> None:
        if self._row_group:
            table = pa.Table.from_batches(self._row_group, schema=SCHEMA)
            self._row_group = []
            self._row_group_rollouts = self._row_group_tokens = 0
            self._parquet.write_table(table)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._attempt(job)
        for end in (self._flush_row_group, self._parquet.close, self._metrics.close):
            self._attempt(end)

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  raised by close(), in the owner's thread
            self._failure = self._failure or error


def replace_file(path: Path, body: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(body)
    os.replace(draft, path)


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Give a draft directory that becomes ``target`` only when its files are complete."""
    draft = target.with_name(target.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    shutil.rmtree(target, ignore_errors=True)
    os.replace(draft, target)
