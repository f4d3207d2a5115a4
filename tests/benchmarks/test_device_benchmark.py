"""The device benchmark on a CPU: every stage with tiny models, cut off and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device import STAGES

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.device", "--json", "--device", "cpu"]
    command += ["--shape", "tiny", "--rows", str(tmp_path / "rows.jsonl")]
    return subprocess.run(
        [*command, "--models", str(tmp_path / "models"), *arguments],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        cwd=ROOT,
    )


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def ends(tmp_path: Path) -> dict[str, str]:
    return {row["stage"]: row["how"] for row in rows(tmp_path) if row["name"] == "stage"}


def test_each_stage_runs_without_a_gpu_and_one_that_ended_is_not_run_again(tmp_path: Path) -> None:
    first = run(tmp_path, "--stages", "machine", "kernels")
    assert (first.returncode, ends(tmp_path)) == (0, {"machine": "ended", "kernels": "ended"}), (
        first.stderr
    )
    before = rows(tmp_path)

    rest = run(tmp_path)

    assert rest.returncode == 0, rest.stderr
    assert ends(tmp_path) == dict.fromkeys(STAGES, "ended"), rest.stderr
    assert rows(tmp_path)[: len(before)] == before
    printed = [json.loads(line) for line in rest.stdout.splitlines()]
    assert printed == rows(tmp_path)[len(before) :]
    assert {row["stage"] for row in printed} == STAGES.keys() - {"machine", "kernels"}
    assert [row for row in printed if "error" in row] == []


def test_a_run_that_is_cut_off_leaves_its_rows_and_starts_that_stage_again(tmp_path: Path) -> None:
    cut = run(tmp_path, "--minutes", "0.02", "--stages", "machine")
    assert cut.returncode == 1
    assert "time is up before machine" in cut.stderr
    assert not (tmp_path / "rows.jsonl").exists() or not ends(tmp_path)

    again = run(tmp_path, "--stages", "machine")

    assert (again.returncode, ends(tmp_path)) == (0, {"machine": "ended"})


def test_a_device_that_is_not_there_is_refused_with_status_2(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cuda:97")

    assert (done.returncode, done.stdout) == (2, "")
    assert "device='cuda:97'" in done.stderr
    assert os.listdir(tmp_path) == []
