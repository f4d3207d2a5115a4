"""The command `tidegate`: exit statuses, error lines and help."""

import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.models import CommandInfo

from tests.command_line import tidegate
from tests.models import make_model_directory
from tests.observability import sampled_runs
from tests.observability.recorded import recorder, some_statistics
from tidegate import __version__, serve_sync
from tidegate.cli import command
from tidegate.observability.records.trace import TRACE_FILE, Trace
from tidegate.orchestrator.telemetry.recorder import EngineStep

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = sampled_runs.make_models()
    directory = tmp_path_factory.mktemp("runs") / "honest"
    return sampled_runs.record_run(directory, models, [sampled_runs.kept(models, 0)])


def test_an_audit_that_agrees_exits_0_and_writes_its_result(honest_run: Path) -> None:
    ended = tidegate("audit", honest_run)
    output = ended.out.splitlines()
    assert ended.status == 0
    assert output[1] == "10 of 10 tokens agree within 0.0002"
    assert output[-1].endswith(" tags one version off would not be noticed: agrees")
    audit = json.loads((honest_run / "audit.json").read_text())
    assert audit["agrees"] is True
    assert audit["lines"] == output


def test_an_audit_that_disagrees_exits_1_and_names_the_token(honest_run: Path) -> None:
    ended = tidegate("audit", honest_run, "--tolerance", "0")
    assert ended.status == 1
    assert "rollout 0, turn 0:" in ended.out
    assert ended.out.splitlines()[-1] == "DISAGREES"


@pytest.mark.parametrize("name", ["audit", "report", "replay", "trace"])
def test_a_directory_without_a_run_gives_one_line_on_stderr_and_status_2(
    name: str, tmp_path: Path
) -> None:
    ended = tidegate(name, tmp_path / "nowhere")
    assert (ended.status, ended.out) == (2, "")
    [line] = [line for line in ended.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert "nowhere" in line


def test_report_prints_the_page_it_wrote(tmp_path: Path) -> None:
    with recorder(tmp_path / "run") as records:
        records.finish(some_statistics())
    assert tidegate("report", tmp_path / "run")[:2] == (0, f"{tmp_path / 'run' / 'report.md'}\n")


def test_ctrl_c_ends_the_command_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "app", interrupted)
    assert tidegate().status == 130


def test_the_engine_command_passes_all_arguments_to_the_worker() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tidegate.cli", "engine", "--no-such-option", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "usage: tidegate engine" in ended.stderr


def test_drain_has_a_local_engine_leave_its_run_and_names_the_process(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "model")
    names, address = ("the-one-to-leave", "the-one-to-stay"), f"ipc://{tmp_path}/run"
    command = [sys.executable, "-m", "tidegate.cli", "engine", "--model", str(model)]
    command += ["--connect", address, "--engine"]
    with contextlib.ExitStack() as processes:
        started = [
            processes.enter_context(subprocess.Popen([*command, name], stderr=subprocess.DEVNULL))
            for name in names
        ]
        for process in started:
            processes.callback(process.terminate)
        with serve_sync(model=model, engines=0, listen_address=address) as run:
            while len(run.engines) < 2:
                assert [process.poll() for process in started] == [None, None]
                time.sleep(0.05)
            said = f"{names[0]} (process {started[0].pid}) has left its run\n"
            assert tidegate("drain", names[0])[:2] == (0, said)
            assert started[0].wait(60) == 0
            while len(run.engines) == 2:
                time.sleep(0.05)
            assert [engine.name for engine in run.engines] == [names[1]]
            again = tidegate("drain", names[0])
            assert again.status == 2
            assert f"no engine named {names[0]!r} runs on" in again.err


def test_the_command_imports_nothing_that_its_help_does_not_need() -> None:
    code = (
        "import sys, tidegate.cli\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pyarrow', 'pydantic', 'rich', 'zmq'}"
        "& set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_command_prints_the_package_version() -> None:
    ended = tidegate("--version")
    assert (ended.status, ended.out.strip()) == (0, __version__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", __version__)


def test_help_lists_every_command_under_a_heading_with_its_first_line() -> None:
    output = tidegate("--help").out
    names = [name_of(each) for each in command.app.registered_commands]
    headings = output.split("Options:")[1]
    assert [n for n in names if not re.search(rf"^  {n}  +[A-Z]", headings, re.MULTILINE)] == []
    assert "Inspect a run:" in output
    assert "\x1b[" not in output, "coloured without a terminal"


def test_every_command_has_help_whose_examples_name_the_command() -> None:
    for each in command.app.registered_commands:
        name = name_of(each)
        assert each.callback is not None
        assert each.callback.__doc__, name
        examples = (each.epilog or "").replace("\\\n", "").splitlines()[2:]
        assert all(line.split()[:2] == ["tidegate", name] for line in examples), examples
        if each.add_help_option:
            ended = tidegate(name, "--help")
            assert ended.status == 0
            assert all(line.strip() in ended.out for line in examples[:1])


def test_an_unknown_command_suggests_the_most_similar_one() -> None:
    ended = tidegate("simulat")
    assert ended.status == 2
    assert "Did you mean 'simulate'?" in ended.err


def test_an_unwritable_file_gives_one_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setattr(command, "app", (in_the_way / "page").read_text)
    assert tidegate() == (2, "", f"error: {in_the_way / 'page'}: Not a directory\n")


def name_of(registered: CommandInfo) -> str:
    assert registered.callback is not None
    return registered.name or registered.callback.__name__


def test_trace_summarises_each_track_and_says_how_to_open_the_file(tmp_path: Path) -> None:
    trace = Trace()
    trace.engine_step(EngineStep("engine-0", started_us=0, busy_us=500_000, version=0, rows=7))
    trace.engine_step(
        EngineStep("engine-0", started_us=800_000, busy_us=200_000, version=1, rows=5)
    )
    trace.trainer_interval("wait", 0, 600_000, 0)
    trace.trainer_interval("train", 600_000, 1_000_000, 0)
    trace.write(tmp_path / TRACE_FILE)
    output = tidegate("trace", tmp_path).out.splitlines()
    assert output[0] == f"{tmp_path / TRACE_FILE}: 1.0 s, 0 marks"
    assert output[1] == "  engine-0: 12 tokens, weights v0 to v1, in steps 70% of the time"
    assert output[2] == "  trainer: train 40%, wait 60%"
    assert "ui.perfetto.dev" in output[3]


def test_help_lists_the_demo_in_a_clone_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module("tidegate")
    try:
        for file, listed in ((package.__file__, ["demo", "run"]), (tmp_path / "t/t.py", ["run"])):
            monkeypatch.setattr(package, "__file__", str(file))
            importlib.reload(command)
            assert re.findall(r"^  (demo|run) ", tidegate("--help").out, re.MULTILINE) == listed
        ended = tidegate("demo")
        assert ended.status == 2
        assert "clone the repository" in ended.err
    finally:
        monkeypatch.undo()
        importlib.reload(command)


@pytest.mark.wire
def test_bench_shows_scheduler_and_wire_and_an_engine_beside_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for good
    ended = tidegate("bench", "--rounds", "1", "--json")
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert [row["name"] for row in rows] == ["scheduler", "wire", "engine"]
    assert all(row["value"] > 0 for row in rows)
    assert [row["peer"] for row in rows] == ["", "", "transformers"]
    assert rows[2]["ratio"] > 0
