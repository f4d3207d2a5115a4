"""Reads and verifies a journal's file; shared by :class:`JournalFile` and ``salvage.py``.

Every row has a checksum and every lsn is accounted for, so damage is found and named, never
returned as a record. Nothing is written.
"""

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tidegate.errors import (
    JournalCorrupt,
    JournalError,
    JournalFailed,
    JournalMissing,
    JournalTooNew,
)
from tidegate.orchestrator.journal.schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    checksum,
    unpack,
)

DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLite error codes that mean a damaged file; a damaged table name leads to the last one."""

SQLITE_PROBLEMS = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions that a damaged file may raise: SQLite quotes names from it, of any bytes."""


class JournalSnapshot(NamedTuple):
    """State of a core, and the lsn of the last record that it covers."""

    lsn: int
    body: bytes


def check(path: Path, connection: sqlite3.Connection) -> None:
    """Raise unless the file is an intact journal of a known schema."""
    if pragma(connection, "application_id") != APPLICATION_ID:
        if is_unused(connection):
            raise JournalMissing(path=path)  # its creator died before it was complete
        raise JournalCorrupt(path=path, where="it is an SQLite database, but not a journal")
    if (found := pragma(connection, "user_version")) > SCHEMA_VERSION:
        raise JournalTooNew(path=path, found=found, known=SCHEMA_VERSION)
    if found < 0:
        raise JournalCorrupt(path=path, where=f"schema version {found} does not exist")
    finding = connection.execute("PRAGMA quick_check(1)").fetchone()[0].decode(errors="replace")
    if finding != "ok":
        raise JournalCorrupt(path=path, where=finding, intact_lsn=intact_lsn(path, connection))


def read_header(path: Path, connection: sqlite3.Connection) -> bytes:
    """Return the bytes that the journal was created with."""
    for body, crc32 in connection.execute("SELECT body, crc32 FROM header"):
        if _is_intact(1, 0, body, crc32):
            return bytes(body)
    raise JournalCorrupt(path=path, where="the header is gone or fails its checksum")


def read_snapshot(path: Path, connection: sqlite3.Connection) -> JournalSnapshot | None:
    """Return the newest snapshot; None without one."""
    query = "SELECT lsn, body, crc32 FROM snapshots ORDER BY lsn DESC LIMIT 1"
    for lsn, body, crc32 in connection.execute(query):
        if not _is_intact(lsn, 0, body, crc32):
            raise JournalCorrupt(path=path, where=f"the snapshot at {lsn} fails its checksum")
        return JournalSnapshot(lsn, body)
    return None


def read_last_lsn(
    path: Path, connection: sqlite3.Connection, snapshot: JournalSnapshot | None
) -> int:
    """Return the lsn of the newest record; 0 before the first."""
    snapshot_lsn = snapshot.lsn if snapshot else 0
    query = "SELECT first_lsn, records, body, crc32 FROM batches ORDER BY first_lsn DESC LIMIT 1"
    for first, count, body, crc32 in connection.execute(query):
        if not _is_intact(first, count, body, crc32):
            where = f"the records from {first} on fail their checksum"
            raise JournalCorrupt(path=path, where=where, intact_lsn=intact_lsn(path, connection))
        return max(snapshot_lsn, int(first) + int(count) - 1)
    return snapshot_lsn


def read_records(
    path: Path, connection: sqlite3.Connection, snapshot: JournalSnapshot | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the records after the snapshot, in order, each with its lsn."""
    last = snapshot_lsn = snapshot.lsn if snapshot else 0
    last_of_row = 0
    query = "SELECT first_lsn, records, body, crc32 FROM batches ORDER BY first_lsn"
    try:
        for first, count, body, crc32 in connection.execute(query):
            if not _is_intact(first, count, body, crc32):
                where = f"the records from {first} on fail their checksum"
                raise JournalCorrupt(path=path, where=where, intact_lsn=last)
            if first > last + 1:
                where = f"records {last + 1} to {first - 1} are missing"
                raise JournalCorrupt(path=path, where=where, intact_lsn=last)
            if first <= last_of_row:
                where = f"the records from {first} on are found again"
                raise JournalCorrupt(path=path, where=where, intact_lsn=last)
            for lsn, record in enumerate(unpack(count, body), first):
                if lsn > snapshot_lsn:
                    yield lsn, record
            last_of_row = first + count - 1
            last = max(last, last_of_row)
    except SQLITE_PROBLEMS as error:
        if _is_damage(error):
            raise JournalCorrupt(path=path, where=str(error), intact_lsn=last) from error
        raise JournalFailed(path=path, why=str(error)) from error


def intact_lsn(path: Path, connection: sqlite3.Connection) -> int | None:
    """Return the last lsn readable without a gap; None if not even the header is."""
    try:
        read_header(path, connection)
        snapshot = read_snapshot(path, connection)
        last = snapshot.lsn if snapshot else 0
        for lsn, _ in read_records(path, connection, snapshot):
            last = lsn
    except JournalCorrupt as error:
        return error.intact_lsn
    except SQLITE_PROBLEMS:
        return None
    return last


def is_unused(connection: sqlite3.Connection) -> bool:
    """Whether the database is empty: new, or left by a creator that died early."""
    tables = connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    return not tables and pragma(connection, "application_id") == 0


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """Return the value of a numeric pragma."""
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


@contextmanager
def as_journal_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite and the disk as journal errors, which say what to do."""
    try:
        yield
    except JournalError:
        raise
    except SQLITE_PROBLEMS as error:
        if _is_damage(error):
            raise JournalCorrupt(path=path, where=str(error)) from error
        raise JournalFailed(path=path, why=str(error)) from error
    except OSError as error:
        raise JournalFailed(path=path, why=str(error)) from error


def _is_damage(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    # The low byte is the primary code; the others say where in SQLite it occurred.
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in DAMAGE_CODES


def _is_intact(number: int, count: int, body: bytes, crc32: int) -> bool:
    try:
        return checksum(number, count, body) == crc32
    except (TypeError, struct.error):  # a damaged row may hold a value of any type
        return False
