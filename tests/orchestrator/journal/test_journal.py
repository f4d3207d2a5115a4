"""A journal returns its records in order, however its writer ended."""

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.journal.journals import (
    WAIT_S,
    append_up_to,
    contents,
    crash_image,
    expected,
    filled,
    started,
)
from tidegate.errors import JournalBehind, JournalExists, JournalLocked, JournalMissing, RunClosed
from tidegate.orchestrator.journal import file as journal_file
from tidegate.orchestrator.journal import journal as journal_module
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.schema import pack, unpack

pytestmark = pytest.mark.wire

KILLS = 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.sqlite"


def test_records_reported_as_committed_are_on_the_disk_at_that_moment(
    path: Path, tmp_path: Path
) -> None:
    images: list[tuple[int, Path]] = []

    def copy_it(lsn: int) -> None:  # on the writer's thread, so nothing is being written
        images.append((lsn, crash_image(path, tmp_path / f"image-{len(images)}")))

    with Journal.create(path, header=b"") as journal:
        journal.start(copy_it, lambda error: None)
        append_up_to(journal, 50)
    assert images[-1][0] == 50
    for lsn, image in images:
        assert contents(image) == expected(1, lsn)


class HeldUp:
    """Callback that holds a journal's writer up until it may continue."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.may_continue = threading.Event()

    def __call__(self, lsn: int) -> None:
        self.reported.append(lsn)
        self.may_continue.wait(WAIT_S)


def test_records_that_come_while_the_disk_is_busy_share_the_next_commit(path: Path) -> None:
    writer = HeldUp()
    with Journal.create(path, header=b"") as journal:
        journal.start(writer, lambda error: None)
        append_up_to(journal, 1)
        journal.flush(WAIT_S)
        append_up_to(journal, 100)
        writer.may_continue.set()
    assert writer.reported == [1, 100]


def test_a_commit_takes_no_more_bytes_than_its_limit_and_keeps_the_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMMIT_BYTES_MAX", 10_000)
    writer = HeldUp()
    with Journal.create(path, header=b"") as journal:
        journal.start(writer, lambda error: None)
        journal.append(bytes(4000))
        journal.flush(WAIT_S)
        for _ in range(6):
            journal.append(bytes(4000))
        journal.append(bytes(50_000))  # a single record may be larger
        writer.may_continue.set()
    assert writer.reported == [1, 3, 5, 7, 8]


def test_only_the_newest_of_several_waiting_snapshots_is_stored(path: Path) -> None:
    with Journal.create(path, header=b"") as journal:
        started(journal)
        for lsn in range(1, 101):
            append_up_to(journal, lsn)
            journal.compact(lsn, b"state at %d" % lsn)
        journal.flush(WAIT_S)
        assert journal.snapshot() == (100, b"state at 100")
        with pytest.raises(ValueError, match=r"from the last snapshot's, 100, to .* 100, got 101"):
            journal.compact(101, b"")
        with pytest.raises(ValueError, match="got 99"):
            journal.compact(99, b"")


def test_bytes_since_the_snapshot_say_what_a_reopening_would_read(path: Path) -> None:
    with Journal.create(path, header=b"") as journal:
        started(journal)
        journal.append(bytes(1000))
        assert journal.bytes_since_snapshot == 1000
        journal.flush(WAIT_S)
        journal.compact(1, b"state")
        journal.append(bytes(300))
        assert journal.bytes_since_snapshot == 300
    with Journal.open(path) as journal:
        assert journal.bytes_since_snapshot == 300


def test_the_file_stays_bounded_when_records_are_compacted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "WAL_BYTES_MAX", 256 * 1024)
    sizes = []
    with Journal.create(path, header=b"") as journal:
        started(journal)
        for _ in range(12):
            for _ in range(10):
                journal.append(bytes(100_000))
                journal.flush(WAIT_S)
            journal.compact(journal.statistics().appended_lsn, bytes(50_000))
            journal.flush(WAIT_S)
            sizes.append(journal.statistics().file_bytes)
    assert max(sizes[4:]) <= 1.1 * max(sizes[:4])  # 1 MB a round: it would be 12 MB


def test_there_is_one_journal_per_file(path: Path) -> None:
    with pytest.raises(JournalMissing, match="no journal at"):
        Journal.open(path)
    filled(path, 3)
    with pytest.raises(JournalExists, match="exists already; resume that run"):
        Journal.create(path, header=b"another")
    assert contents(path) == expected(1, 3)


def test_a_journal_whose_creator_died_on_the_way_is_missing_and_can_be_created(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with pytest.raises(JournalMissing):
        Journal.open(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    with pytest.raises(JournalMissing):
        Journal.open(path)
    filled(path, 3)
    assert contents(path) == expected(1, 3)


def test_a_second_user_is_refused_at_once_with_the_process_of_the_first(path: Path) -> None:
    with Journal.create(path, header=b"") as journal:
        with pytest.raises(JournalLocked, match=r"in use by process \d+ on "):
            Journal.open(path)
        with pytest.raises(JournalLocked):
            Journal.create(path, header=b"")
        started(journal)
        append_up_to(journal, 3)  # the refused ones did no harm
    assert contents(path) == expected(1, 3)


def test_a_running_journal_can_be_read_with_plain_sqlite(path: Path) -> None:
    with Journal.create(path, header=b"a header") as journal:
        started(journal)
        append_up_to(journal, 5)
        journal.flush(WAIT_S)
        viewer = sqlite3.connect(path)
        rows = viewer.execute("SELECT first_lsn, records, body FROM batches").fetchall()
        viewer.close()
    found = [r for first, count, body in sorted(rows) for r in unpack(count, body)]
    assert found == list(expected(1, 5).values())


def test_a_disk_that_hangs_is_reported_by_flush_and_by_append(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PENDING_BYTES_MAX", 1000)
    writer = HeldUp()
    with Journal.create(path, header=b"") as journal:
        journal.start(writer, lambda error: None)
        journal.append(b"held up")
        journal.flush(WAIT_S)
        journal.append(bytes(1001))
        with pytest.raises(JournalBehind, match=r"not done in 0\.0 s"):
            journal.flush(0.01)
        with pytest.raises(JournalBehind, match="no more is kept in memory"):
            journal.append(b"one more")
        writer.may_continue.set()
        assert journal.flush(WAIT_S) == 2


def test_a_journal_is_written_between_start_and_close_only(path: Path) -> None:
    journal = Journal.create(path, header=b"")
    with pytest.raises(RuntimeError, match=r"start\(\) the journal"):
        journal.append(b"")
    started(journal)
    with pytest.raises(RuntimeError, match="started already"):
        started(journal)
    with pytest.raises(RuntimeError, match=r"read it before start"):
        journal.read()
    journal.append(b"last")
    journal.close()
    journal.close()
    with pytest.raises(RunClosed, match="is closed"):
        journal.append(b"")
    assert contents(path) == {1: b"last"}


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_what_is_packed_is_unpacked(records: list[bytes]) -> None:
    assert list(unpack(len(records), pack(records))) == records


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 30)),
        st.tuples(st.just("compact"), st.integers(0, 30)),
        st.tuples(st.sampled_from(("flush", "reopen", "crash")), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(OPERATIONS)
def test_any_sequence_of_uses_leaves_what_a_list_would_hold(
    operations: list[tuple[str, int]],
) -> None:
    last = held = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        journal = Journal.create(path, header=b"h")
        started(journal)
        for number, (operation, amount) in enumerate(operations):
            if operation == "append":
                last += amount
                append_up_to(journal, last)
            elif operation == "compact":
                held = max(held, last - amount)
                journal.compact(held, b"state at %d" % held)
            else:
                journal.flush(WAIT_S)
                if operation == "crash":
                    path = crash_image(path, Path(directory) / str(number))
                if operation != "flush":
                    journal.close()
                    journal = Journal.open(path)
                    assert journal.snapshot() in ((held, b"state at %d" % held), None)
                    assert (journal.snapshot() is None) <= (held == 0)
                    assert dict(journal.read()) == expected(held + 1, last)
                    started(journal)
        journal.close()
        assert contents(path) == expected(held + 1, last)


# ------------------------------------------------------------------------- killed

WRITER = """
import os, sys
from pathlib import Path
from tests.orchestrator.journal.journals import append_up_to
from tidegate.orchestrator.journal.journal import Journal

journal = Journal.open(Path(sys.argv[1]))
lsn = journal.statistics().appended_lsn
journal.start(lambda lsn: os.write(1, lsn.to_bytes(8, "little")), lambda error: os._exit(3))
while True:
    lsn += 1 + lsn * 31 % 40
    append_up_to(journal, lsn)
    if lsn * 17 % 11 == 0:
        journal.compact(lsn - lsn * 13 % 60, b"%d" % (lsn - lsn * 13 % 60)) if lsn > 5000 else None
    if lsn * 7 % 5 == 0 or journal.statistics().pending_bytes > 2**26:  # from 4, lsn % 5 stays 4
        journal.flush(60)
"""


def test_a_killed_writer_leaves_all_records_reported_as_committed_and_no_gap(path: Path) -> None:
    chance = random.Random(5)
    Journal.create(path, header=b"a header").close()
    for _ in range(KILLS):
        reported = write_until_killed(path, commits=chance.randrange(1, 200))
        with Journal.open(path) as journal:  # at once: the lock went with its holder
            snapshot = journal.snapshot()
            records = dict(journal.read())
            last = journal.statistics().appended_lsn
        assert journal.header == b"a header"
        assert snapshot is None or snapshot.body == b"%d" % snapshot.lsn
        assert records == expected(snapshot.lsn + 1 if snapshot else 1, last)
        assert last >= reported


def write_until_killed(path: Path, commits: int) -> int:
    """Kill a writing process after so many reported commits; return the last reported lsn."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        output = writer.stdout.read(8 * commits)
        writer.kill()
        output += writer.stdout.read()
    assert writer.returncode == -signal.SIGKILL
    return int.from_bytes(output[-8:], "little")


FORKING = """
import os, signal, sys
from pathlib import Path
from tidegate.orchestrator.journal.journal import Journal

journal = Journal.open(Path(sys.argv[1]))
read_end, write_end = os.pipe()
if os.fork() == 0:  # a data loader's worker: it lives on when its parent is killed
    os.write(write_end, b"x")
    sys.stdin.read()
    sys.exit()
os.read(read_end, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_that_outlives_a_killed_run_does_not_hold_its_journal(path: Path) -> None:
    filled(path, 3)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path)], stdin=subprocess.PIPE
    ) as parent:
        assert parent.wait(WAIT_S) == -signal.SIGKILL
        assert contents(path) == expected(1, 3)
        assert parent.stdin is not None
        parent.stdin.close()  # the child ends
