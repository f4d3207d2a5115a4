"""File modes of a run's directory and records."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability.recorded import recorder, some_statistics
from tidegate.orchestrator.journal.resuming import open_run_journal
from tidegate.orchestrator.settings.config import run_settings


@pytest.fixture(autouse=True)
def whatever_is_made_is_open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def record(directory: Path) -> None:
    """Keep a run's journal open while its records are made, so that all of its files exist."""
    settings = run_settings(model=directory, journal=True, run_directory=directory)
    opened = open_run_journal(settings, None)
    with recorder(directory) as records:
        records.finish(some_statistics())
    assert {"journal.db", "journal.db-wal", "journal.db-lock", "trajectories.parquet"} <= {
        path.name for path in directory.iterdir()
    }
    assert [p.name for p in directory.iterdir() if p.is_file() and mode(p) != 0o600] == []
    opened.close()


def test_a_run_directory_and_every_file_in_it_are_private(tmp_path: Path) -> None:
    record(tmp_path / "runs" / "a")
    assert mode(tmp_path / "runs" / "a") == 0o700


def test_an_existing_directory_keeps_its_mode_and_its_new_files_are_private(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "shared"
    directory.mkdir(mode=0o755)
    (directory / "trajectories.parquet").touch(mode=0o644)
    record(directory)
    assert mode(directory) == 0o755
