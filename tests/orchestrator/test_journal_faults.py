"""What becomes of a journal on a disk that is full, read-only, removed or damaged?"""

import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.journals import (
    WAIT_S,
    append_up_to,
    contents,
    crash_image,
    expected,
    filled,
    record,
    started,
)
from tidegate.errors import (
    JournalCorrupt,
    JournalError,
    JournalExists,
    JournalFailed,
    JournalTooNew,
)
from tidegate.orchestrator.journal import Journal
from tidegate.orchestrator.journal_salvage import main, salvage
from tidegate.orchestrator.journal_schema import PAGE_BYTES, SCHEMA_VERSION

GARBLINGS = 40
"""Seeded places of damage per test; some milliseconds each."""

WAL_HEADER_BYTES = 32
WAL_FRAME_BYTES = 24 + PAGE_BYTES
"""SQLite's file format, section 4: a header of 24 bytes, then the page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that a process without rights can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


# ------------------------------------------------------------------------- the disk refuses


def test_a_full_disk_ends_the_journal_and_loses_nothing_that_was_committed(path: Path) -> None:
    journal = Journal.create(path, header=b"")
    told = started(journal)
    append_up_to(journal, 10)
    journal.flush(WAIT_S)
    limit_pages(journal, 8)
    lsn = journal.append(bytes(20 * PAGE_BYTES))
    with pytest.raises(JournalFailed, match=r"database or disk is full\. All that was told"):
        journal.flush(WAIT_S)
    with pytest.raises(JournalFailed, match="make room or mend the disk, then resume"):
        journal.append(b"one more")
    journal.close()
    assert [type(error) for error in told.errors] == [JournalFailed]
    assert told.committed[-1] == lsn - 1 == 10
    assert contents(path) == expected(1, 10)
    with Journal.open(path) as journal:  # there is room again
        started(journal)
        append_up_to(journal, 20)
    assert contents(path) == expected(1, 20)


def limit_pages(journal: Journal, pages: int) -> None:
    """Make SQLite find the disk full beyond so many pages."""
    journal._file._connection.execute(f"PRAGMA max_page_count = {pages}")


LIMITED_WRITER = """
import os, resource, sys
from pathlib import Path
from tests.orchestrator.journals import record
from tidegate.orchestrator.journal import Journal

journal = Journal.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
told, errors = [0], []
journal.start(told.append, errors.append)
lsn = 0
while not errors:
    lsn += 1
    try:
        journal.append(record(lsn))
        journal.flush(60)
    except OSError as error:
        message = str(error)
journal.close()
print(told[-1], len(errors), message, sep="|")
"""


def test_a_file_that_can_grow_no_further_is_told_and_loses_nothing_committed(path: Path) -> None:
    Journal.create(path, header=b"").close()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED_WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told, errors, message = done.stdout.split("|")
    assert int(told) > 0
    assert errors == "1"
    assert f"{path} can't be used: " in message
    found = contents(path)
    assert len(found) >= int(told)
    assert found == expected(1, len(found))


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
def test_a_file_removed_under_the_journal_is_noticed_before_anything_is_told(
    path: Path, name: str
) -> None:
    with Journal.create(path, header=b"") as journal:
        told = started(journal)
        append_up_to(journal, 1)
        journal.flush(WAIT_S)
        path.with_name(name).unlink()
        journal.append(record(2))
        with pytest.raises(JournalFailed, match=f"{name} was removed or replaced while it was in"):
            journal.flush(WAIT_S)
        assert told.committed == [1]
        assert len(told.errors) == 1


def test_a_directory_removed_under_the_journal_is_noticed(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run" / "journal.sqlite", header=b"") as journal:
        told = started(journal)
        shutil.rmtree(tmp_path / "run")
        journal.append(record(1))
        with pytest.raises(JournalFailed, match="was removed or replaced"):
            journal.flush(WAIT_S)
        assert told.committed == []


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from tidegate.errors import JournalFailed
from tidegate.orchestrator.journal import Journal

if os.geteuid() == 0:
    os.setuid(65534)  # root may write to read-only files
for use in (Journal.open, lambda path: Journal.create(path.with_name("new"), header=b"")):
    try:
        use(Path(sys.argv[1]))
    except JournalFailed as error:
        print(error.why)
"""


def test_a_journal_that_cannot_be_written_says_so_when_it_is_opened(public_directory: Path) -> None:
    path = public_directory / "journal.sqlite"
    filled(path, 3)
    path.chmod(0o444)
    path.with_name("journal.sqlite-lock").chmod(0o666)
    for directory_mode, problems in (
        (0o555, ["readonly database|unable to open", "Permission denied"]),
        (0o777, ["attempt to write a readonly database"]),
    ):
        public_directory.chmod(directory_mode)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        lines = done.stdout.splitlines()
        assert len(lines) == len(problems)
        for line, problem in zip(lines, problems, strict=True):
            assert any(part in line for part in problem.split("|")), line
    path.chmod(0o644)
    assert contents(path) == expected(1, 3)


def test_an_error_of_the_callback_ends_the_journal_and_is_told(path: Path) -> None:
    errors: list[BaseException] = []

    def fail(lsn: int) -> None:
        raise RuntimeError("the loop is closed")

    journal = Journal.create(path, header=b"")
    journal.start(fail, errors.append)
    append_up_to(journal, 1)
    journal.close()
    with pytest.raises(JournalFailed, match=r"its writer stopped: RuntimeError\('the loop is cl"):
        journal.append(record(2))
    assert [type(error) for error in errors] == [JournalFailed]
    assert contents(path) == expected(1, 1)


# ------------------------------------------------------------------------- not a journal of ours


def test_files_that_are_no_journals_are_refused_and_left_as_they_are(path: Path) -> None:
    path.write_bytes(b"my thesis, chapter 1. " * 1000)
    foreign = path.with_name("foreign.sqlite")
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE precious (it TEXT)")
    connection.close()
    for file, problem in ((path, "file is not a database"), (foreign, "but not a journal")):
        before = file.read_bytes()
        with pytest.raises(JournalCorrupt, match=problem):
            Journal.open(file)
        with pytest.raises(JournalExists):
            Journal.create(file, header=b"")
        assert file.read_bytes() == before


def test_a_journal_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    filled(path, 3)
    edit(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(
        JournalTooNew, match=r"has schema version 2, and this .* up to 1; resume it"
    ):
        Journal.open(path)
    assert path.read_bytes() == before


def test_a_journal_of_no_version_there_ever_was_is_refused(path: Path) -> None:
    filled(path, 3)
    edit(path, "PRAGMA user_version = -1")
    with pytest.raises(JournalCorrupt, match="there is no schema version -1"):
        Journal.open(path)


def test_a_journal_of_an_older_version_is_brought_to_this_one(path: Path) -> None:
    fresh, old = path.with_name("fresh"), path
    for file in (fresh, old):
        filled(file, 20)
        with Journal.open(file) as journal:
            started(journal)
            journal.compact(5, b"state at 5")
    edit(
        old,
        *(f"ALTER TABLE {t} DROP COLUMN crc32" for t in ("header", "batches", "snapshots")),
        "PRAGMA user_version = 0",
    )
    with Journal.open(old) as journal:
        assert journal.header == b"a header"
        assert journal.snapshot() == (5, b"state at 5")
        assert dict(journal.read()) == expected(6, 20)
    assert columns(old) == columns(fresh)
    assert contents(old) == expected(6, 20)


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    filled(path, 3)
    edit(path, "ALTER TABLE header DROP COLUMN crc32", "PRAGMA user_version = 0")
    before = columns(path)
    with pytest.raises(JournalCorrupt, match="duplicate column name: crc32"):
        Journal.open(path)
    assert columns(path) == before


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def columns(path: Path) -> dict[str, list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    tables = ("header", "batches", "snapshots")
    found = {t: connection.execute(f"PRAGMA table_info({t})").fetchall() for t in tables}
    connection.close()
    return found


# ------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A journal of 40 commits after a kill -9, and how long its WAL was after each."""
    directory = tmp_path_factory.mktemp("crashed")
    path = directory / "journal.sqlite"
    filled(path, 20)
    wal_bytes = []
    with Journal.open(path) as journal:
        started(journal)
        for lsn in range(21, 61):
            append_up_to(journal, lsn)
            journal.flush(WAIT_S)
            wal_bytes.append((directory / "journal.sqlite-wal").stat().st_size)
        return crash_image(path, directory / "image"), wal_bytes


def damaged_copy(crashed: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(crashed.parent, target)
    return target / crashed.name


def test_of_a_wal_cut_anywhere_every_commit_before_the_cut_is_recovered(
    crashed: tuple[Path, list[int]], tmp_path: Path
) -> None:
    image, wal_bytes = crashed
    chance = random.Random(1)
    cuts = [0, WAL_HEADER_BYTES, *wal_bytes[-2:]]
    cuts += [chance.randrange(wal_bytes[-1]) for _ in range(GARBLINGS)]
    for cut in cuts:
        path = damaged_copy(image, tmp_path / "damaged")
        os.truncate(path.with_name("journal.sqlite-wal"), cut)
        intact = 20 + sum(end <= cut for end in wal_bytes)
        assert contents(path) == expected(1, intact), f"cut at {cut}"


def test_of_a_wal_garbled_anywhere_every_commit_before_the_damage_is_recovered(
    crashed: tuple[Path, list[int]], tmp_path: Path
) -> None:
    image, wal_bytes = crashed
    chance = random.Random(2)
    for _ in range(GARBLINGS):
        path = damaged_copy(image, tmp_path / "damaged")
        at = chance.randrange(WAL_HEADER_BYTES, wal_bytes[-1])
        garble(path.with_name("journal.sqlite-wal"), at, chance)
        intact = 20 + sum(end <= at for end in wal_bytes)
        assert contents(path) == expected(1, intact), f"garbled at {at}"


def garble(path: Path, at: int, chance: random.Random) -> None:
    """Replace up to 100 bytes, the first of them by another for sure."""
    body = bytearray(path.read_bytes())
    count = chance.choice((1, 1, 4, 100))
    new = bytes([body[at] ^ chance.randrange(1, 256)]) + chance.randbytes(count - 1)
    body[at : at + count] = new[: len(body) - at]
    path.write_bytes(body)


def test_of_a_garbled_database_no_wrong_record_is_ever_read_and_what_is_intact_can_be_kept(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole" / "journal.sqlite"
    filled(whole, 40)
    length = whole.stat().st_size
    chance = random.Random(3)
    refused = salvaged = 0
    for _ in range(3 * GARBLINGS):
        path = damaged_copy(whole, tmp_path / "damaged")
        # Half of the places are where SQLite keeps its own books: a page's first bytes.
        at = chance.randrange(length)
        garble(path, at if chance.random() < 0.5 else at - at % PAGE_BYTES + at % 120, chance)
        try:
            assert contents(path) == expected(1, 40), f"garbled at {at}"
        except JournalError as error:
            refused += 1
            kept = check_salvage(path, error)
            salvaged += kept > 0
    assert refused > GARBLINGS / 2
    assert salvaged > GARBLINGS / 4


def check_salvage(path: Path, error: JournalError) -> int:
    """What is salvaged must be true, and as much as the error has promised."""
    promised = error.intact_lsn if isinstance(error, JournalCorrupt) else None
    target = path.with_name("salvaged.sqlite")
    try:
        kept = salvage(path, target)
    except JournalError:
        assert promised is None
        return 0
    assert kept >= (promised or 0)
    assert contents(target) == expected(1, kept)
    return kept


def test_a_garbled_record_is_named_and_the_command_keeps_those_before_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(path, 40)
    target = path.with_name("salvaged.sqlite")
    body = path.read_bytes()
    at = body.index(struct.pack("<Q", 30) * 3)
    path.write_bytes(body[:at] + b"X" + body[at + 1 :])
    with Journal.open(path) as journal, pytest.raises(JournalCorrupt) as caught:
        list(journal.read())
    message = str(caught.value)
    assert "is damaged: the records from 30 on fail their checksum; records up to 29" in message
    assert f"journal_salvage {path} NEW_FILE` and resume from a checkpoint that is" in message
    assert main([str(path), str(target)]) == 0
    assert capsys.readouterr().out == f"{target} holds all records up to 29\n"
    assert contents(target) == expected(1, 29)
    assert main([str(path), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_snapshot_is_salvaged_with_the_records_after_it(path: Path) -> None:
    filled(path, 40)
    with Journal.open(path) as journal:
        started(journal)
        journal.compact(10, b"state at 10")
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM batches WHERE first_lsn = 33")
    connection.close()
    target = path.with_name("salvaged.sqlite")
    with Journal.open(path) as journal, pytest.raises(JournalCorrupt, match="33 to 33 are missing"):
        list(journal.read())
    assert salvage(path, target) == 32
    with Journal.open(target) as journal:
        assert journal.header == b"a header"
        assert journal.snapshot() == (10, b"state at 10")
        assert dict(journal.read()) == expected(11, 32)


def test_a_cut_database_is_never_taken_for_a_shorter_one(path: Path) -> None:
    filled(path, 40)
    pages = path.stat().st_size // PAGE_BYTES
    for kept_bytes in (pages * PAGE_BYTES - 1, (pages - 1) * PAGE_BYTES, PAGE_BYTES, 100):
        os.truncate(path, kept_bytes)
        with pytest.raises(JournalCorrupt):
            contents(path)


def test_an_emptied_database_with_a_wal_is_refused_before_sqlite_deletes_the_wal(
    crashed: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path = damaged_copy(crashed[0], tmp_path / "damaged")
    os.truncate(path, 0)
    wal = path.with_name("journal.sqlite-wal")
    before = wal.read_bytes()
    for use in (Journal.open, lambda path: Journal.create(path, header=b"")):
        with pytest.raises(JournalCorrupt, match=r"empty or gone, but journal\.sqlite-wal is"):
            use(path)
    assert wal.read_bytes() == before
