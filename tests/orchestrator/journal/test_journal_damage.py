"""What can be read of a truncated or garbled journal."""

import os
import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from tests.orchestrator.journal.journals import (
    WAIT_S,
    append_up_to,
    contents,
    crash_image,
    expected,
    filled,
    started,
)
from tidegate.errors import (
    JournalCorrupt,
    JournalError,
)
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.salvage import main, salvage
from tidegate.orchestrator.journal.schema import PAGE_BYTES

GARBLINGS = 40
"""Seeded damages per test, some milliseconds each."""

WAL_HEADER_BYTES = 32
WAL_FRAME_BYTES = 24 + PAGE_BYTES
"""SQLite's file format, section 4: a header of 24 bytes, then the page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a journal after a kill -9, and its WAL size after each of its last 40 commits."""
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


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_fifo_in_place_of_one_of_its_files_is_refused_and_not_waited_for(
    path: Path, suffix: str
) -> None:
    filled(path, 3)
    fifo = path.with_name(path.name + suffix)
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    with pytest.raises(JournalCorrupt, match=f"{fifo.name} is not a regular file"):
        Journal.open(path)
    with pytest.raises(JournalCorrupt, match=f"{fifo.name} is not a regular file"):
        salvage(path, path.with_name("salvaged.sqlite"))


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
    """Replace up to 100 bytes, of which the first certainly changes."""
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
        # Half of the places hold SQLite's own bookkeeping: a page's first bytes.
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
    """Check that salvaged records are true, and as many as the error has promised."""
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


def test_a_record_that_a_garbled_page_lists_again_is_not_kept_as_a_later_one(path: Path) -> None:
    filled(path, 40)
    body = bytearray(path.read_bytes())
    # SQLite's file format, section 1.6: 0x0D is a table's leaf, whose cells' offsets begin at 8.
    leaf, cells = next(
        (at, cells)
        for at in range(0, len(body), PAGE_BYTES)
        if body[at] == 0x0D and (cells := int.from_bytes(body[at + 3 : at + 5])) > 3
    )
    body[leaf + 12 : leaf + 14] = body[leaf + 8 : leaf + 10]
    path.write_bytes(body)
    with pytest.raises(JournalCorrupt) as refused:
        contents(path)
    assert 2 <= check_salvage(path, refused.value) < cells


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
    assert f"journal.salvage {path} NEW_FILE` and resume from a checkpoint that is" in message
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
