"""Does the command end with the status and the one line that scripts and people rely on?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestrator import sampled_runs
from tests.orchestrator.test_recording import some_statistics
from tidegate.orchestrator import cli
from tidegate.orchestrator.records.recording import RunRecorder


def status_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tidegate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = sampled_runs.make_models()
    directory = tmp_path_factory.mktemp("runs") / "honest"
    return sampled_runs.record_run(directory, models, [sampled_runs.kept(models, 0)])


def test_an_audit_that_agrees_has_status_0_and_leaves_its_result(
    honest_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["audit", str(honest_run)], monkeypatch) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "10 of 10 tokens agree within 0.0002"
    assert said[-1] == "agrees"
    audit = json.loads((honest_run / "audit.json").read_text())
    assert audit["agrees"] is True
    assert audit["lines"] == said


def test_an_audit_that_disagrees_has_status_1_and_says_where(
    honest_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["audit", str(honest_run), "--tolerance", "0"], monkeypatch) == 1
    said = capsys.readouterr().out
    assert "rollout 0, turn 0:" in said
    assert said.splitlines()[-1] == "DISAGREES"


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_directory_that_is_no_run_is_one_line_on_stderr_and_status_2(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of([command, str(tmp_path / "nowhere")], monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = [line for line in said.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert "nowhere" in line


def test_report_prints_the_page_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with RunRecorder(tmp_path / "run", settings={}, model=tmp_path) as recorder:
        recorder.finish(some_statistics())
    assert status_of(["report", str(tmp_path / "run")], monkeypatch) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.md'}\n"


def test_ctrl_c_ends_the_command_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert status_of([], monkeypatch) == 130


def test_engine_hands_all_its_arguments_to_the_worker() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tidegate.orchestrator.cli", "engine", "--no-such-option", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "tidegate.engine.worker" in ended.stderr


def test_the_command_starts_without_importing_torch() -> None:
    code = (
        "import sys, tidegate.orchestrator.cli\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
