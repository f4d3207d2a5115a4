"""Tests of the demo in a short form: the same script and small model, fewer versions."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from examples.async_grpo import LATEST, MODES, main
from examples.tiny_model import make_model
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.observability.recorded import REPORT_KEYS
from tidegate.observability.audit.audit import audit_run

pytestmark = pytest.mark.wire

SHORT = ["--versions", "4", "--groups-per-batch", "4", "--held-out", "16", "--step-time-s", "0"]


@pytest.fixture(scope="module")
def hardly_warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, seed=0, steps_max=10)
    return path


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert children(recursive=True) == []


def report_of(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / "report.json").read_text())
    return content


@pytest.mark.slow
def test_the_demo_learns_within_its_bound_and_every_token_agrees(tmp_path: Path) -> None:
    arguments = ["--mode", "async", "--runs", str(tmp_path), "--name", "demo"]
    assert main([*arguments, "--step-time-s", "0.01"]) == 0
    run = tmp_path / "demo"
    report = report_of(run)
    assert report.keys() >= REPORT_KEYS
    before, after = report["reward_before"], report["reward_after"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert before <= 0.40
    assert after >= 0.60
    assert report["versions"] == 24
    assert report["step_time_min_s"] == 0.01
    assert report["max_staleness"] == report["staleness_bound"] == 2
    assert isinstance(report["mixed_version_share"], float)
    assert report["mixed_version_share"] > 0
    assert report["tokens_discarded"] == 0
    assert {path.name for path in run.iterdir()} >= {
        "report.md",
        "report.png",
        "trace.json",
        "trajectories.parquet",
        "metrics.jsonl",
        "weights",
    }
    audit = audit_run(run)
    assert audit.agrees, audit.lines()
    assert audit.tokens > 10_000


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        (["--mode", "one-step", "--pause-mode", "wait"], 1),
        (["--mode", "async", "--pause-mode", "abort"], 2),
        (["--mode", "async", "--kv-policy", "keep"], 2),
        (["--mode", "one-step", "--colocated", "--quantization", "int8"], 1),
    ],
)
def test_every_mode_and_pause_runs_and_keeps_its_bound(
    hardly_warm: Path, tmp_path: Path, arguments: list[str], bound: int
) -> None:
    common = ["--model", str(hardly_warm), "--runs", str(tmp_path), "--name", "run", *SHORT]
    assert main([*common, *arguments]) == 0
    report = report_of(tmp_path / "run")
    assert report["staleness_bound"] == bound
    assert isinstance(report["max_staleness"], int)
    assert report["max_staleness"] <= bound
    assert report["versions"] == 4
    assert report["colocated"] is ("--colocated" in arguments)
    assert isinstance(report["memory_mb"], dict)
    assert report["memory_mb"].keys() == {"rollout", "train"}
    assert audit_run(tmp_path / "run").agrees


def test_without_a_mode_all_are_run_on_the_same_tasks_and_compared(
    hardly_warm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--model", str(hardly_warm), "--runs", str(tmp_path), "--name", "demo", *SHORT]
    assert main([*common, "--step-time-s", "0.001"]) == 0
    reports = {mode: report_of(tmp_path / LATEST / mode) for mode in MODES}
    assert {mode: report["staleness_bound"] for mode, report in reports.items()} == MODES
    assert {report["rollouts_trained"] for report in reports.values()} == {4 * 4 * 8}
    assert len({report["reward_before"] for report in reports.values()}) == 1
    output = capsys.readouterr().out
    assert "engines are paced: no step takes less than 1 ms" in output
    rows = (tmp_path / "demo" / "comparison.txt").read_text().splitlines()
    assert all(row in output for row in rows)
    assert rows[0].split() == list(MODES)
    assert rows[1].split()[-3:] == ["0", "1", "2"]
    assert rows[2] == f"{'engines paced to steps of at least':<46}" + 3 * "      1 ms"
    assert any(row.startswith("rollouts of two or more versions") for row in rows)
    assert any(row.startswith("the first version that was trained takes ") for row in rows)
    assert [row.split()[0] for row in rows[-2:]] == ["reward", "reward"]
    assert (tmp_path / "demo" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert audit_run(tmp_path / "demo" / "async").agrees


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_script_trains_any_given_model_directory(tmp_path: Path, architecture: str) -> None:
    path = make_model_directory(tmp_path / "model", architecture)
    common = ["--mode", "async", "--model", str(path), "--runs", str(tmp_path), "--name", "run"]
    assert main([*common, *SHORT]) == 0
    assert report_of(tmp_path / "run")["versions"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--max-staleness", "-1"], "max_staleness=-1"),
        (["--engines", "-2"], "engines=-2"),
    ],
)
def test_invalid_input_is_reported_with_status_2(
    hardly_warm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    common = ["--model", str(hardly_warm), "--runs", str(tmp_path), *SHORT]
    assert main([*common, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_ends_cleanly_on_a_signal(
    hardly_warm: Path, tmp_path: Path, signal_number: int
) -> None:
    command = [sys.executable, "-m", "examples.async_grpo", "--model", str(hardly_warm)]
    options = ["--runs", str(tmp_path), "--name", "run", "--held-out", "8", "--versions", "500"]
    options += ["--step-time-s", "0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        while "batch 2/500" not in demo.stdout.readline():
            assert demo.poll() is None
        engines = psutil.Process(demo.pid).children(recursive=True)
        assert len(engines) == 2
        demo.send_signal(signal_number)
        output = demo.stdout.read()
        assert demo.wait(30) in (130, 143)
        assert "Traceback" not in output
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert alive == []
