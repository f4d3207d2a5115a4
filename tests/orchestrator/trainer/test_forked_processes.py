"""Tests that a process forked from a trainer's gets an error when it uses the run, and does it no
harm."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.models import make_model_directory
from tidegate.errors import RunForked, check_not_forked
from tidegate.orchestrator.journal.replay import replay_journal

pytestmark = pytest.mark.wire

RUN_TIMEOUT_S = 180
"""Far longer than the trainer takes: reaching it is a failure, not a timing."""


def test_every_call_in_a_forked_process_raises_and_the_run_continues(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    command = [sys.executable, "-m", "tests.forking_trainer", str(model), str(tmp_path / "run")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    asked = ["statistics", "batches", "publish", "state_dict", "score", "Process", "DataLoader"]
    assert ended.stdout.splitlines() == [f"{each}: RunForked" for each in asked]
    rows = pq.read_table(tmp_path / "run" / "trajectories.parquet")
    assert rows.num_rows >= 24
    assert replay_journal(tmp_path / "run").difference is None


def test_the_error_names_both_processes_and_says_what_to_do() -> None:
    with pytest.raises(RunForked, match=r"belongs to process 1, .*'spawn'.*num_workers=0"):
        check_not_forked(1)
