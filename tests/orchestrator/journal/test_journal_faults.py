"""Journals on a disk that is full, read-only or removed, and journals of other versions."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.journal.journals import (
    WAIT_S,
    append_up_to,
    contents,
    expected,
    filled,
    record,
    started,
)
from tidegate.errors import (
    JournalCorrupt,
    JournalExists,
    JournalFailed,
    JournalTooNew,
)
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.schema import PAGE_BYTES, SCHEMA_VERSION

pytestmark = pytest.mark.wire


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """Make a directory that a process without rights can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


# ------------------------------------------------------------------------- the disk refuses


def test_a_full_disk_ends_the_journal_and_loses_nothing_that_was_committed(path: Path) -> None:
    journal = Journal.create(path, header=b"")
    reported = started(journal)
    append_up_to(journal, 10)
    journal.flush(WAIT_S)
    limit_pages(journal, 8)
    lsn = journal.append(bytes(20 * PAGE_BYTES))
    with pytest.raises(
        JournalFailed, match=r"database or disk is full\. Everything reported as committed"
    ):
        journal.flush(WAIT_S)
    with pytest.raises(JournalFailed, match="free disk space or repair the disk, then resume"):
        journal.append(b"one more")
    journal.close()
    assert [type(error) for error in reported.errors] == [JournalFailed]
    assert reported.committed[-1] == lsn - 1 == 10
    assert contents(path) == expected(1, 10)
    with Journal.open(path) as journal:  # there is room again
        started(journal)
        append_up_to(journal, 20)
    assert contents(path) == expected(1, 20)


def limit_pages(journal: Journal, pages: int) -> None:
    """Make SQLite report a full disk beyond so many pages."""
    journal._file._connection.execute(f"PRAGMA max_page_count = {pages}")


LIMITED_WRITER = """
import os, resource, sys
from pathlib import Path
from tests.orchestrator.journal.journals import record
from tidegate.orchestrator.journal.journal import Journal

journal = Journal.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
committed, errors = [0], []
journal.start(committed.append, errors.append)
lsn = 0
while not errors:
    lsn += 1
    try:
        journal.append(record(lsn))
        journal.flush(60)
    except OSError as error:
        message = str(error)
journal.close()
print(committed[-1], len(errors), message, sep="|")
"""


def test_a_file_that_can_grow_no_further_raises_and_loses_nothing_committed(path: Path) -> None:
    Journal.create(path, header=b"").close()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED_WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    reported, errors, message = done.stdout.split("|")
    assert int(reported) > 0
    assert errors == "1"
    assert f"{path} can't be used: " in message
    found = contents(path)
    assert len(found) >= int(reported)
    assert found == expected(1, len(found))


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
def test_a_file_removed_under_the_journal_is_noticed_before_any_commit_is_reported(
    path: Path, name: str
) -> None:
    with Journal.create(path, header=b"") as journal:
        reported = started(journal)
        append_up_to(journal, 1)
        journal.flush(WAIT_S)
        path.with_name(name).unlink()
        journal.append(record(2))
        with pytest.raises(JournalFailed, match=f"{name} was removed or replaced while it was in"):
            journal.flush(WAIT_S)
        assert reported.committed == [1]
        assert len(reported.errors) == 1


def test_a_directory_removed_under_the_journal_is_noticed(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run" / "journal.sqlite", header=b"") as journal:
        reported = started(journal)
        shutil.rmtree(tmp_path / "run")
        journal.append(record(1))
        with pytest.raises(JournalFailed, match="was removed or replaced"):
            journal.flush(WAIT_S)
        assert reported.committed == []


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from tidegate.errors import JournalFailed
from tidegate.orchestrator.journal.journal import Journal

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


def test_an_error_of_the_callback_ends_the_journal_and_is_reported(path: Path) -> None:
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
    with pytest.raises(JournalCorrupt, match="schema version -1 does not exist"):
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
