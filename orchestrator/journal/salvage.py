"""Command that copies the intact beginning of a damaged journal to a new one, which can be resumed.

    python -m tidegate.orchestrator.journal.salvage DAMAGED NEW_FILE

Run by hand; it only reads the damaged SQLite file. Records beyond the first damage are useless,
because every record depends on those before it.
"""

import argparse
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tidegate.errors import JournalCorrupt, JournalMissing, TidegateError
from tidegate.orchestrator.journal.file import FileLock, JournalFile, refuse_irregular
from tidegate.orchestrator.journal.reading import (
    as_journal_errors,
    read_header,
    read_records,
    read_snapshot,
)
from tidegate.transport.printable import print_stderr

RECORDS_PER_COMMIT = 10_000
"""Records in one commit, which takes milliseconds however small: at most about 50 MB."""


def salvage(damaged: Path, target: Path) -> int:
    """Make a new journal of all records before the first damage; return the last one's lsn.

    Raises:
        JournalExists: ``target`` exists.
        JournalCorrupt: the header or the snapshot is damaged, so nothing can be kept.
        JournalLocked: a run is using the damaged journal.
    """
    if not damaged.exists():
        raise JournalMissing(path=damaged)
    refuse_irregular(damaged)
    lock = FileLock(damaged)
    try:
        with as_journal_errors(damaged):
            # Read-only, so that closing does not merge its WAL and spread the damage.
            connection = sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True)
            connection.text_factory = bytes
            with closing(connection):
                return _copy(damaged, connection, target)
    finally:
        lock.release()


def _copy(damaged: Path, connection: sqlite3.Connection, target: Path) -> int:
    header = read_header(damaged, connection)
    snapshot = read_snapshot(damaged, connection)
    file = JournalFile.create(target, header)
    with closing(file):
        if snapshot is not None:
            file.last_lsn = snapshot.lsn
            file.commit([], snapshot)
        records: list[bytes] = []
        try:
            for _, record in read_records(damaged, connection, snapshot):
                records.append(record)
                if len(records) == RECORDS_PER_COMMIT:
                    file.commit(records, None)
                    records = []
        except JournalCorrupt:
            pass  # the first damage: later records are useless
        if records:
            file.commit(records, None)
        return file.last_lsn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 if no record can be copied."""
    parser = argparse.ArgumentParser(description="Keep what is before a journal's first damage.")
    parser.add_argument("damaged", type=Path)
    parser.add_argument("target", type=Path, metavar="new_file")
    options = parser.parse_args(arguments)
    try:
        lsn = salvage(options.damaged, options.target)
    except TidegateError as error:
        print_stderr(f"error: {error}")
        return 2
    sys.stdout.write(f"{options.target} holds all records up to {lsn}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
