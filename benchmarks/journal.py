"""Throughput, commit latency and disk usage of the journal, against SQLite and plain files.

``python -m benchmarks.journal [--json] [--directory DIR]`` prints ``name, value, unit, peer,
ratio``; each value is the median of five runs, ours and the peer's alternately. The directory
decides which disk is measured. A group's record is 8 rollouts of 64 tokens of 8 bytes, and ids: 5
KB. A command that no module imports. Built on ``orchestrator/journal/`` and sqlite3.
"""

import argparse
import os
import queue
import sqlite3
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.table import Row, compared, show
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.schema import PAGE_BYTES

RUNS = 5
GROUP_BYTES = 5000
SMALL_BYTES = 100
GROUPS = 40_000
SMALL_RECORDS = 400_000
PEER_RECORDS = 400
"""Number of records that a peer writes if it commits each record alone. Such a peer is slow: a few
hundred records take long enough to measure."""
CHUNK_BYTES = 8 * 1024 * 1024
PACED_S = 1.5
TICK_S = 0.001
ROUNDS = 8
"""Rounds of filling and compacting."""
TIMEOUT_S = 120.0


class Bench:
    """Measurements in one directory, each with a new file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = 0

    def path(self) -> Path:
        """Return an unused path. Delete earlier files first, so that the disk does not write their
        unwritten pages during the next measurement."""
        for file in self._directory.iterdir():
            file.unlink()
        self._files += 1
        return self._directory / f"{self._files}.sqlite"

    def journal(self) -> Journal:
        """Create and start a journal."""
        journal = Journal.create(self.path(), header=b"")
        journal.start(lambda lsn: None, _raise)
        return journal

    # ------------------------------------------------------------------------- throughput

    def append_ours(self, record: bytes, count: int) -> float:
        """Return the records per second from the first append until the last commit."""
        with self.journal() as journal:
            started_s = time.perf_counter()
            for _ in range(count):
                journal.append(record)
            journal.flush(TIMEOUT_S)
            return count / (time.perf_counter() - started_s)

    def insert_each(self, record: bytes) -> float:
        """Measure the peer: SQLite with the same settings, one commit per record."""
        connection = sqlite3.connect(self.path(), isolation_level=None)
        for pragma in (f"page_size = {PAGE_BYTES}", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE records (lsn INTEGER PRIMARY KEY, body BLOB)")
        started_s = time.perf_counter()
        for _ in range(PEER_RECORDS):
            connection.execute("INSERT INTO records (body) VALUES (?)", (record,))
        per_s = PEER_RECORDS / (time.perf_counter() - started_s)
        connection.close()
        return per_s

    def write_each(self, record: bytes) -> float:
        """Measure the peer: a plain file, fsync after each record."""
        framed = struct.pack("<I", len(record)) + record
        with self.path().open("wb", buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(PEER_RECORDS):
                file.write(framed)
                os.fsync(file.fileno())
            return PEER_RECORDS / (time.perf_counter() - started_s)

    def write_chunks(self, record: bytes, count: int) -> float:
        """Measure the disk's limit: a plain file, fsync after each 8 MiB."""
        framed = struct.pack("<I", len(record)) + record
        per_chunk = CHUNK_BYTES // len(framed)
        chunk = framed * per_chunk
        with self.path().open("wb", buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(count // per_chunk):
                file.write(chunk)
                os.fsync(file.fileno())
            return count // per_chunk * per_chunk / (time.perf_counter() - started_s)

    # ------------------------------------------------------------------------- latency

    def latencies_ms(self, record: bytes, groups_per_s: int) -> list[float]:
        """Return the latencies from append to the commit notification, at a steady rate."""
        appended_s: list[float] = []
        latencies: list[float] = []

        def reported(lsn: int) -> None:
            now_s = time.perf_counter()
            latencies.extend((now_s - at_s) * 1e3 for at_s in appended_s[len(latencies) : lsn])

        with Journal.create(self.path(), header=b"") as journal:
            journal.start(reported, _raise)
            started_s = next_s = time.perf_counter()
            while next_s < started_s + PACED_S:
                for _ in range(round(groups_per_s * TICK_S)):
                    appended_s.append(time.perf_counter())
                    journal.append(record)
                next_s += TICK_S
                time.sleep(max(0.0, next_s - time.perf_counter()))
            journal.flush(TIMEOUT_S)
        return latencies

    def append_us(self, record: bytes) -> float:
        """Return the cost of ``append`` to its caller, while the writer thread works."""
        with self.journal() as journal:
            started_s = time.perf_counter()
            for _ in range(SMALL_RECORDS // 4):
                journal.append(record)
            return (time.perf_counter() - started_s) / (SMALL_RECORDS // 4) * 1e6

    # ------------------------------------------------------------------------- size

    def disk_bytes(self, record: bytes, count: int) -> float:
        """Return the size of the closed file per record."""
        path = self.path()
        with Journal.create(path, header=b"") as journal:
            journal.start(lambda lsn: None, _raise)
            for _ in range(count):
                journal.append(record)
        return path.stat().st_size / count

    def disk_bytes_after_rounds(self, record: bytes, count: int, rounds: int) -> float:
        """Return the size of the open file in MB, WAL included, after filling and compacting it."""
        with self.journal() as journal:
            for _ in range(rounds):
                for _ in range(count):
                    lsn = journal.append(record)
                journal.flush(TIMEOUT_S)
                journal.compact(lsn, record)
                journal.flush(TIMEOUT_S)
            return journal.statistics().file_bytes / 1e6

    def reopen_records_per_s(self, record: bytes, count: int) -> float:
        """Return the records per second of opening, checking and reading all."""
        path = self.path()
        with Journal.create(path, header=b"") as journal:
            journal.start(lambda lsn: None, _raise)
            for _ in range(count):
                journal.append(record)
        started_s = time.perf_counter()
        with Journal.open(path) as journal:
            records = sum(1 for _ in journal.read())
            return records / (time.perf_counter() - started_s)

    def read_lines_per_s(self, record: bytes, count: int) -> float:
        """Measure the peer: a plain file of length-prefixed records, unchecked."""
        path = self.path()
        path.write_bytes((struct.pack("<I", len(record)) + record) * count)
        started_s, records = time.perf_counter(), 0
        with path.open("rb") as file:
            while prefix := file.read(4):
                file.read(struct.unpack("<I", prefix)[0])
                records += 1
        return records / (time.perf_counter() - started_s)


def _raise(error: BaseException) -> None:
    raise error


def compare(name: str, unit: str, ours: Callable[[], float], peer: Callable[[], float]) -> Row:
    """Run both alternately and compare the medians."""
    pairs = [(ours(), peer()) for _ in range(RUNS)]
    value = statistics.median(pair[0] for pair in pairs)
    peer_value = statistics.median(pair[1] for pair in pairs)
    return compared(name, unit, value, peer_value)


def rows(bench: Bench) -> list[Row]:
    """Return all rows. A row's name states its peer, except where the peer is SQLite or a file with
    one commit per record."""
    group, small = os.urandom(GROUP_BYTES), os.urandom(SMALL_BYTES)
    return [
        *appended_rows(bench, group, small),
        *latency_rows(bench, group),
        *size_rows(bench, group, small),
        compare(
            "reopened_groups_per_s_beside_unchecked_file",
            "groups/s",
            lambda: bench.reopen_records_per_s(group, GROUPS),
            lambda: bench.read_lines_per_s(group, GROUPS),
        ),
    ]


def appended_rows(bench: Bench, group: bytes, small: bytes) -> list[Row]:
    """Measure how fast records are appended."""

    def groups() -> float:
        return bench.append_ours(group, GROUPS)

    def records() -> float:
        return bench.append_ours(small, SMALL_RECORDS)

    def put_us() -> float:
        waiting: queue.Queue[bytes] = queue.Queue()
        started_s = time.perf_counter()
        for _ in range(SMALL_RECORDS // 4):
            waiting.put(small)
        return (time.perf_counter() - started_s) / (SMALL_RECORDS // 4) * 1e6

    per_s = "appended_groups_per_s"
    return [
        compare(per_s, "groups/s", groups, lambda: bench.insert_each(group)),
        compare(
            f"{per_s}_beside_file_and_fsync", "groups/s", groups, lambda: bench.write_each(group)
        ),
        compare(
            f"{per_s}_beside_bare_disk",
            "groups/s",
            groups,
            lambda: bench.write_chunks(group, GROUPS),
        ),
        compare("appended_records_per_s", "records/s", records, lambda: bench.insert_each(small)),
        compare("append_us_beside_queue", "µs", lambda: bench.append_us(small), put_us),
    ]


def latency_rows(bench: Bench, group: bytes) -> list[Row]:
    """Measure how long a record takes until it is durable."""

    def latency_ms(share: float, groups_per_s: int) -> float:
        ordered = sorted(bench.latencies_ms(group, groups_per_s))
        return ordered[int(share * len(ordered))]

    return [
        compare(
            f"commit_latency_{name}_at_{groups_per_s}_groups_per_s",
            "ms",
            partial(latency_ms, share, groups_per_s),
            lambda: 1e3 / bench.insert_each(group),
        )
        for groups_per_s in (1_000, 20_000)
        for name, share in (("median", 0.5), ("p99", 0.99))
    ]


def size_rows(bench: Bench, group: bytes, small: bytes) -> list[Row]:
    """Measure the size of the file."""
    fill = GROUPS // 2
    return [
        compare(
            "disk_bytes_per_group_beside_payload",
            "bytes",
            lambda: bench.disk_bytes(group, GROUPS),
            lambda: float(GROUP_BYTES),
        ),
        compare(
            "disk_bytes_per_record_beside_payload",
            "bytes",
            lambda: bench.disk_bytes(small, SMALL_RECORDS),
            lambda: float(SMALL_BYTES),
        ),
        compare(
            "disk_mb_after_8_compactions_beside_1",
            "MB",
            lambda: bench.disk_bytes_after_rounds(group, fill, ROUNDS),
            lambda: bench.disk_bytes_after_rounds(group, fill, 1),
        ),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        show(rows(Bench(Path(directory))), as_json=options.json)


if __name__ == "__main__":
    main()
