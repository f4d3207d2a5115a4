"""Tests that a run's private directory is removed with the run, however it ends, and not before."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tidegate.transport.private_directory import PrivateDirectory, remove_abandoned

pytestmark = pytest.mark.wire

HOLDER = """
import sys
from tidegate.transport.private_directory import PrivateDirectory
directory = PrivateDirectory("held")
(directory.path / "socket").touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_this_users_alone_and_gone_once_removed(temporary: Path) -> None:
    directory = PrivateDirectory("wei/ghts ☂ " + "x" * 100)
    assert directory.path.parent == temporary
    assert directory.path.name.startswith("tidegate-weights")
    assert len(directory.path.name) < 45
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "file").touch()
    directory.remove()
    directory.remove()
    assert list(temporary.iterdir()) == []


def test_directories_of_a_killed_process_are_removed_by_the_next_and_used_ones_stay(
    temporary: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        mine = PrivateDirectory("mine")
        assert (held / "socket").exists()
        holder.kill()
    assert held.exists()
    other = PrivateDirectory("other")
    assert sorted(temporary.iterdir()) == sorted([mine.path, other.path])
    mine.remove()
    other.remove()


def test_what_is_not_ours_or_not_locked_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    (temporary / "tidegate-notes").mkdir()
    (temporary / "tidegate-file").touch()
    target = tmp_path / "precious"
    target.mkdir()
    (target / ".lock").touch()
    os.symlink(target, temporary / "tidegate-link")
    remove_abandoned()
    assert {path.name for path in temporary.iterdir()} == {
        "precious",
        "tidegate-file",
        "tidegate-link",
        "tidegate-notes",
    }
    assert (target / ".lock").exists()
