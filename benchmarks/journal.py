"""Throughput and commit latency of the journal, against SQLite.

``python -m benchmarks.journal [--json] [--directory DIR]`` prints ``name, value, unit, peer,
ratio``; each value is the median of five runs, ours and the peer's alternately. The directory
decides which disk is measured. A group's record is 8 rollouts of 64 tokens of 8 bytes, and ids: 5
KB. The peer is SQLite with the journal's settings and a commit per record.
"""

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.table import Row, compared, make_parser, medians, show
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.schema import PAGE_BYTES

RUNS = 5
GROUP_BYTES = 5000
GROUPS = 40_000
PEER_RECORDS = 400
"""Number of records that a peer writes, because it commits each alone: a few hundred a second."""
PACED_S = 1.5
TICK_S = 0.001
TIMEOUT_S = 120.0


class Bench:
    """Measurements in one directory, each with a new file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = 0
        self._record = os.urandom(GROUP_BYTES)

    def path(self) -> Path:
        """Return an unused path. Delete earlier files first, so that the disk does not write their
        unwritten pages during the next measurement."""
        for file in self._directory.iterdir():
            file.unlink()
        self._files += 1
        return self._directory / f"{self._files}.sqlite"

    def append_ours(self) -> float:
        """Return the records per second from the first append until the last commit."""
        with Journal.create(self.path(), header=b"") as journal:
            journal.start(lambda lsn: None, _raise)
            started_s = time.perf_counter()
            for _ in range(GROUPS):
                journal.append(self._record)
            journal.flush(TIMEOUT_S)
            return GROUPS / (time.perf_counter() - started_s)

    def insert_each(self) -> float:
        """Return the records per second of SQLite."""
        connection = sqlite3.connect(self.path(), isolation_level=None)
        for pragma in (f"page_size = {PAGE_BYTES}", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE records (lsn INTEGER PRIMARY KEY, body BLOB)")
        started_s = time.perf_counter()
        for _ in range(PEER_RECORDS):
            connection.execute("INSERT INTO records (body) VALUES (?)", (self._record,))
        per_s = PEER_RECORDS / (time.perf_counter() - started_s)
        connection.close()
        return per_s

    def latency_ms(self, share: float, groups_per_s: int) -> float:
        """Return a quantile of the time from append to the commit's report, at a steady rate."""
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
                    journal.append(self._record)
                next_s += TICK_S
                time.sleep(max(0.0, next_s - time.perf_counter()))
            journal.flush(TIMEOUT_S)
        return sorted(latencies)[int(share * len(latencies))]


def _raise(error: BaseException) -> None:
    raise error


def rows(bench: Bench) -> Iterator[Row]:
    """Yield all rows."""

    def row(name: str, unit: str, ours: Callable[[], float], peer: Callable[[], float]) -> Row:
        return compared(name, unit, *medians(RUNS, ours, peer))

    yield row("appended_groups_per_s", "groups/s", bench.append_ours, bench.insert_each)
    for groups_per_s in (1_000, 20_000):
        for quantile, share in (("median", 0.5), ("p99", 0.99)):
            yield row(
                f"commit_latency_{quantile}_at_{groups_per_s}_groups_per_s",
                "ms",
                partial(bench.latency_ms, share, groups_per_s),
                lambda: 1e3 / bench.insert_each(),
            )


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        show(rows(Bench(Path(directory))), as_json=options.json)


if __name__ == "__main__":
    main()
