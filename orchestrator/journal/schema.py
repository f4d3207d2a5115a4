"""SQLite tables and row format of a journal's file, and migrations from older versions.

:class:`JournalFile` creates and writes the tables, ``reading.py`` reads them; `sqlite3 FILE` shows
their content:

    header     one row, written once, as given to ``Journal.create``
    batches    a row per commit: the records ``first_lsn, first_lsn + 1, …`` packed into one body
    snapshots  one row: the newest snapshot, and the lsn of the last record that it covers

A body is the records' lengths (uint32, little-endian, one each), then the records, end to end.
"""

import sqlite3
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence

APPLICATION_ID = 0x74676A6C
""""tgjl" in SQLite's application_id: distinguishes a journal from any other SQLite database."""

SCHEMA_VERSION = 1
"""Version of the tables below, in SQLite's user_version. A file with a greater one is refused."""

PAGE_BYTES = 16384
"""SQLite's page size: twice as fast as 4 KiB for groups of 5 KB. A small commit writes one page."""

SCHEMA = """
CREATE TABLE header (
    id INTEGER PRIMARY KEY CHECK (id = 1), body BLOB NOT NULL, crc32 INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE batches (
    first_lsn INTEGER PRIMARY KEY, records INTEGER NOT NULL, body BLOB NOT NULL,
    crc32 INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE snapshots (
    lsn INTEGER PRIMARY KEY, body BLOB NOT NULL, crc32 INTEGER NOT NULL DEFAULT 0
);
"""


def checksum(number: int, count: int, body: bytes) -> int:
    """Return the CRC-32 of a row: its key, its number of records (0 without any), and its body."""
    return zlib.crc32(body, zlib.crc32(struct.pack("<QQ", number, count)))


def pack(records: Sequence[bytes]) -> bytes:
    """Return one body of these records."""
    lengths = array("I", map(len, records))
    if sys.byteorder == "big":
        lengths.byteswap()
    return b"".join((lengths.tobytes(), *records))


def unpack(count: int, body: bytes) -> Iterator[bytes]:
    """Yield the records of a body whose checksum was right."""
    lengths = struct.unpack_from(f"<{count}I", body)
    start = 4 * count
    for length in lengths:
        yield body[start : start + length]
        start += length


def create_schema(connection: sqlite3.Connection, header: bytes) -> None:
    """Make an empty database a journal, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA.split(";")[:-1]:
        connection.execute(statement)
    connection.execute(
        "INSERT INTO header (id, body, crc32) VALUES (1, ?, ?)", (header, checksum(1, 0, header))
    )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def migrate(connection: sqlite3.Connection, found_version: int) -> None:
    """Migrate a file from ``found_version`` to this version; a crash meanwhile changes nothing."""
    if found_version == SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    for version in range(found_version + 1, SCHEMA_VERSION + 1):
        MIGRATIONS[version](connection)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _add_checksums(connection: sqlite3.Connection) -> None:
    """0 -> 1: compute checksums of rows that had none, trusting their content."""
    connection.create_function("checksum", 3, checksum, deterministic=True)
    for table, key, count in (
        ("header", "id", "0"),
        ("batches", "first_lsn", "records"),
        ("snapshots", "lsn", "0"),
    ):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN crc32 INTEGER NOT NULL DEFAULT 0")
        connection.execute(f"UPDATE {table} SET crc32 = checksum({key}, {count}, body)")


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_checksums}
"""Migrations by the version that each leads to, from the one before."""
