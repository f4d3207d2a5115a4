"""What do the journal's tests share? Records that say their lsn, and journals that note what they
were told."""

import shutil
from pathlib import Path

from tidegate.orchestrator.journal.journal import Journal

WAIT_S = 60.0
"""Far longer than anything here takes: reaching it is a failure, not a timing."""


def record(lsn: int) -> bytes:
    """A record that can be known by its content, of a few bytes to a few KB."""
    return lsn.to_bytes(8, "little") * (1 + lsn * 7919 % 600)


class Told:
    """What a journal's callbacks said."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.errors: list[BaseException] = []


def started(journal: Journal) -> Told:
    told = Told()
    journal.start(told.committed.append, told.errors.append)
    return told


def append_up_to(journal: Journal, lsn: int) -> None:
    """Append :func:`record` from where the journal is."""
    while (appended := journal.append(record(journal.statistics().appended_lsn + 1))) < lsn:
        pass
    assert appended == lsn


def filled(path: Path, records: int) -> None:
    """A closed journal of so many records, each in a commit of its own."""
    with Journal.create(path, header=b"a header") as journal:
        started(journal)
        for lsn in range(1, records + 1):
            append_up_to(journal, lsn)
            journal.flush(WAIT_S)


def crash_image(path: Path, target: Path) -> Path:
    """What a kill -9 now would leave of an open journal that is not just writing."""
    target.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(path.with_name(path.name + suffix), target / (path.name + suffix))
    return target / path.name


def contents(path: Path) -> dict[int, bytes]:
    """Open it, and read all records after the snapshot."""
    with Journal.open(path) as journal:
        return dict(journal.read())


def expected(first: int, last: int) -> dict[int, bytes]:
    return {lsn: record(lsn) for lsn in range(first, last + 1)}
