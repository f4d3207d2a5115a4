"""The journal: what was synced is read again, and what a crash cut off is not."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate.serving.tinker.journal import (
    ModelCreated,
    ModelJournal,
    RequestAccepted,
    SamplerOpened,
    ServerState,
    SessionEnded,
    SessionOpened,
    SessionRecord,
    append_record,
    read_model,
)
from tidegate.serving.tinker.training import LoraSpec

CREATED = ModelCreated(model_seq_id=0, session_id="s", spec=LoraSpec(rank=4, seed=1))


def request(seq_id: int) -> RequestAccepted:
    return RequestAccepted(seq_id=seq_id, path="optim_step", body=b"%d" % seq_id)


def save(directory: Path) -> None:
    (directory / "weights").write_text("saved")


def new_journal(directory: Path) -> ModelJournal:
    created = ModelJournal(directory, CREATED, 1)
    created.begin()
    return created


def recovered_seq_ids(directory: Path) -> list[int]:
    recovered = read_model(directory)
    assert recovered is not None
    assert recovered.start.created == CREATED
    return [each.seq_id for each in recovered.requests]


def test_requests_are_read_again_in_their_order_and_once(tmp_path: Path) -> None:
    written = new_journal(tmp_path)
    for seq_id in (2, 1, 3, 2):
        written.append(request(seq_id))
    recovered = read_model(tmp_path)
    assert recovered is not None
    assert [each.body for each in recovered.requests] == [b"1", b"2", b"3"]
    assert recovered.snapshot is None
    assert recovered.start.seq_id == 1


@pytest.mark.parametrize("damage", [b"", b"\x05", b"\x05\0\0\0\1\2\3\4abc", b"\xff" * 20])
def test_a_record_that_a_crash_cut_off_ends_the_file_and_later_ones_follow_the_last_whole_one(
    tmp_path: Path, damage: bytes
) -> None:
    new_journal(tmp_path).append(request(1))
    with (tmp_path / "1.requests").open("ab") as file:
        file.write(damage)
    recovered = read_model(tmp_path)
    assert recovered is not None
    recovered.journal.append(request(2))
    assert recovered_seq_ids(tmp_path) == [1, 2]


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Return a function that lets no file of this process grow beyond some bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_append_that_a_full_disk_cuts_off_leaves_what_is_before_and_after_it(
    tmp_path: Path, full_disk: Callable[[int], None]
) -> None:
    written = new_journal(tmp_path)
    written.append(request(1))
    before = (tmp_path / "1.requests").stat().st_size
    full_disk(before + 10)
    with pytest.raises(OSError, match="File too large"):
        written.append(request(2))
    full_disk(resource.RLIM_INFINITY)
    assert (tmp_path / "1.requests").stat().st_size == before
    written.append(request(3))
    assert recovered_seq_ids(tmp_path) == [1, 3]


def test_a_whole_record_of_an_unknown_kind_is_passed_over(tmp_path: Path) -> None:
    written = new_journal(tmp_path)
    append_record(tmp_path / "1.requests", SessionEnded(session_id="of another file"))
    written.append(request(1))
    assert recovered_seq_ids(tmp_path) == [1]


def test_a_request_is_repeated_until_it_has_ended_three_starts(tmp_path: Path) -> None:
    def start(seq_id: int) -> bool:
        return new_journal(tmp_path).begin_attempt(seq_id)

    for _ in range(3):
        assert start(6)  # which ends each time
        new_journal(tmp_path).end_attempt(6)
        assert start(7)
    assert start(6)
    assert not start(7)


def test_requests_before_the_last_snapshot_but_one_are_forgotten(tmp_path: Path) -> None:
    written = new_journal(tmp_path)
    for seq_id in range(1, 8):
        written.append(request(seq_id))
    written.begin_segment(5, 2, [request(5), request(6), request(7)], save)  # 7 was sent ahead
    assert recovered_seq_ids(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    written.append(request(8))
    written.begin_segment(8, 4, [request(8)], save)
    assert recovered_seq_ids(tmp_path) == [5, 6, 7, 8]
    recovered = read_model(tmp_path)
    assert recovered is not None
    assert recovered.snapshot == tmp_path / "5"
    assert (tmp_path / "5" / "weights").read_text() == "saved"
    assert recovered.start.steps == 2
    assert recovered.journal.segment == 8
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "5",
        "5.requests",
        "8",
        "8.requests",
    ]


def test_a_snapshot_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise OSError("no space left on device")

    written = new_journal(tmp_path)
    written.append(request(1))
    with pytest.raises(OSError, match="no space left"):
        written.begin_segment(2, 1, [], fail)
    written.append(request(2))
    assert recovered_seq_ids(tmp_path) == [1, 2]


def test_a_directory_without_a_whole_first_record_is_no_models(tmp_path: Path) -> None:
    assert read_model(tmp_path / "none") is None
    (tmp_path / "1.requests").write_bytes(b"torn")
    assert read_model(tmp_path) is None


def test_ended_sessions_are_forgotten_with_their_samplers(tmp_path: Path) -> None:
    state = ServerState(tmp_path)
    kept, ended = (SessionOpened(session_id=name, tenant="t") for name in ("kept", "ended"))
    samplers = [SamplerOpened(session_id=name, seq_id=0) for name in ("kept", "ended")]
    records: list[SessionRecord] = [kept, ended, *samplers, SessionEnded(session_id="ended")]
    for record in records:
        state.note(record)
    for _ in range(2):
        assert state.open_sessions() == ([kept], samplers[:1])
    state.close()
    ServerState(tmp_path).close()  # the directory is free again
