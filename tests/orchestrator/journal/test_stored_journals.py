"""Journals and snapshots that an earlier commit wrote are read, and give the same states.

They pin the format. Where it has to change, ``EVENT_FORMAT`` is raised, which refuses older
journals by their runs' names, and :mod:`stored_journals` writes these anew.
"""

import lzma
from pathlib import Path

import msgspec
import pytest

from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.replay import replay_journal
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE, core_from_header
from tidegate.orchestrator.journal.run_journal import decode_header

STORED = Path(__file__).parent / "stored"

DIGESTS = STORED / "digests.json"


class Expected(msgspec.Struct):
    """What a replay of a stored journal must give."""

    events: int
    checksums: int
    digest: str


class StoredSnapshot(msgspec.Struct):
    """A core's saved state after a journal's first events."""

    events: int
    state: bytes


EXPECTED = msgspec.json.decode(DIGESTS.read_bytes(), type=dict[str, Expected])


@pytest.fixture
def run_directory(name: str, tmp_path: Path) -> Path:
    """Make a run directory with a stored journal."""
    stored = STORED / f"{name}.journal.xz"
    (tmp_path / JOURNAL_FILE).write_bytes(lzma.decompress(stored.read_bytes()))
    return tmp_path


@pytest.mark.parametrize("name", EXPECTED)
def test_a_stored_journal_replays_to_the_states_that_it_was_written_with(
    name: str, run_directory: Path
) -> None:
    report = replay_journal(run_directory)
    assert report.difference is None
    found = Expected(sum(report.events.values()), report.states_compared, report.digest)
    assert found == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_stored_snapshot_is_loaded_and_saved_with_the_same_bytes_and_continues(
    name: str, run_directory: Path
) -> None:
    snapshots = msgspec.msgpack.decode(
        lzma.decompress((STORED / f"{name}.snapshots.xz").read_bytes()), type=list[StoredSnapshot]
    )
    assert len(snapshots) > 1
    with Journal.open(run_directory / JOURNAL_FILE) as journal:
        header = decode_header(journal.header)
        records = [record for _, record in journal.read()]

    def new_core() -> Core:
        return core_from_header(header)

    core = new_core()
    for before, after in zip([StoredSnapshot(0, b""), *snapshots], snapshots, strict=False):
        for record in records[before.events : after.events]:
            replay(record, core)
        assert save(core, is_replayed=True) == after.state
        core = new_core()
        load(after.state, core)
        assert save(core, is_replayed=True) == after.state
    assert digest(core, is_replayed=True) == EXPECTED[name].digest
