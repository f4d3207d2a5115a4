"""Helpers of the journal's tests: records made of their lsn, and recorded callbacks."""

import shutil
from pathlib import Path

from tidegate.orchestrator.journal.journal import Journal

WAIT_S = 60.0
"""Timeout far above any duration here: reaching it is a failure."""


def record(lsn: int) -> bytes:
    """Make a record of a few bytes to a few KB from which its lsn can be read."""
    return lsn.to_bytes(8, "little") * (1 + lsn * 7919 % 600)


class CommittedLsns:
    """Arguments of a journal's callbacks."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.errors: list[BaseException] = []


def started(journal: Journal) -> CommittedLsns:
    reported = CommittedLsns()
    journal.start(reported.committed.append, reported.errors.append)
    return reported


def append_up_to(journal: Journal, lsn: int) -> None:
    """Append :func:`record` up to ``lsn``."""
    while (appended := journal.append(record(journal.statistics().appended_lsn + 1))) < lsn:
        pass
    assert appended == lsn


def filled(path: Path, records: int) -> None:
    """Make a closed journal of so many records, each in a commit of its own."""
    with Journal.create(path, header=b"a header") as journal:
        started(journal)
        for lsn in range(1, records + 1):
            append_up_to(journal, lsn)
            journal.flush(WAIT_S)


def crash_image(path: Path, target: Path) -> Path:
    """Copy what a kill -9 now would leave of an open journal that is not just writing."""
    target.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(path.with_name(path.name + suffix), target / (path.name + suffix))
    return target / path.name


def contents(path: Path) -> dict[int, bytes]:
    """Open a journal and return all records after the snapshot."""
    with Journal.open(path) as journal:
        return dict(journal.read())


def expected(first: int, last: int) -> dict[int, bytes]:
    return {lsn: record(lsn) for lsn in range(first, last + 1)}
