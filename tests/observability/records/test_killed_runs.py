"""Runs that are killed, resumed or out of disk space: what was acknowledged can still be read."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import tidegate
from tests.models import make_model_directory
from tests.mortal_trainer import live, weights
from tests.observability.recorded import a_rollout, keep, recorder
from tidegate.cli.command import app
from tidegate.errors import JournalFailed, RecordingFailed
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.dashboard.recorded import RecordedSource
from tidegate.observability.dashboard.rollout_queries import RolloutQuery
from tidegate.observability.records.run_directories import process_directories
from tidegate.observability.records.trajectories import (
    STREAM_FILE,
    TRAJECTORIES_FILE,
    find_trajectory,
    read_trajectories,
)
from tidegate.observability.reports.facts import read_facts, read_metrics
from tidegate.observability.reports.report import write_report

pytestmark = pytest.mark.wire

TASKS = 12
BATCH_ROLLOUTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


TRAINER = """
import json, sys
from pathlib import Path
import tidegate
from tests.mortal_trainer import save, weights
from tests.observability.recorded import solve

model, directory, tasks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
path = directory / "checkpoint.json"
state = json.loads(path.read_text()) if path.exists() else None
with tidegate.serve_sync(
    model=model, engines=1, max_running_turns=4, group_size=2, groups_per_batch=2,
    max_staleness=1, run_directory=directory, journal=True, resume=state or True,
) as rollouts:
    if rollouts.is_resumed:
        rollouts.publish(weights(model, rollouts.version))
    for batch in rollouts.batches([f"{n}+1=" for n in range(tasks)], episode=solve):
        state = rollouts.state_dict()
        save(path, state)
        rollouts.publish(weights(model, rollouts.version + 1))
        rollouts.ack(state)
        sys.stdout.write("acknowledged\\n")
        sys.stdout.flush()
        sys.stdin.readline()
"""


def live_and_be_killed(model: Path, directory: Path, *, batches: int | None) -> None:
    """Train in a process that is killed after it acknowledged ``batches`` batches; None: never."""
    command = [sys.executable, "-c", TRAINER, str(model), str(directory), str(TASKS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    live(process, batches)
    assert process.returncode == (0 if batches is None else -9)


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after two batches, resumed, and killed after one more."""
    directory = tmp_path_factory.mktemp("runs") / "killed"
    for batches in (2, 1):
        live_and_be_killed(model, directory, batches=batches)
    return directory


@pytest.fixture(scope="module")
def finished(killed: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, resumed once more and trained to its end."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    shutil.copytree(killed, directory)
    live_and_be_killed(model, directory, batches=None)
    return directory


def trained_ids(directory: Path) -> list[int]:
    return [r.rollout_id for r in read_trajectories(directory) if r.state == "trained"]


def test_a_killed_run_has_the_rollouts_statistics_and_curve_of_each_acknowledged_batch(
    killed: Path,
) -> None:
    assert [life.name for life in process_directories(killed)] == ["killed", "part-1"]
    assert len(trained_ids(killed)) == len(set(trained_ids(killed))) == 3 * BATCH_ROLLOUTS
    facts = read_facts(killed)
    assert (facts.batches, facts.rollouts_trained) == (3, 3 * BATCH_ROLLOUTS)
    assert facts.tokens_trained > 0
    assert facts.wall_s > 0
    assert len(read_metrics(killed)) == 3
    assert audit_run(killed).agrees
    assert not list(killed.rglob("trajectories.parquet*"))


def test_each_command_reads_a_killed_run(killed: Path, finished: Path) -> None:
    runner = CliRunner()
    for arguments, says in (
        (["report", str(killed)], "report.md"),
        (["compare", str(killed), str(finished)], f"| rollouts trained | {3 * BATCH_ROLLOUTS} |"),
        (["top", "--once", str(killed)], "killed or failed"),
        (["audit", str(killed)], "agrees"),
        (["audit", str(killed / "part-1")], "agrees"),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert says in result.output
    shown = RecordedSource(killed)
    assert shown.observe().statistics.batches == 3
    assert len(shown.observe().collected.batches) == 3
    found = shown.rollouts(RolloutQuery(state="trained"))
    lines, total = found.lines, found.total
    assert total == 3 * BATCH_ROLLOUTS
    assert all(shown.rollout(line.rollout_id) is not None for line in lines)


def test_a_run_that_was_killed_twice_and_finished_reads_as_one_run(finished: Path) -> None:
    assert [life.name for life in process_directories(finished)] == ["finished", "part-1", "part-2"]
    rollouts = list(read_trajectories(finished))
    assert len({r.rollout_id for r in rollouts}) == len(rollouts)
    tasks = [r.task for r in rollouts if r.state == "trained"]
    assert sorted(tasks) == sorted(2 * [json.dumps(f"{n}+1=") for n in range(TASKS)])
    facts = read_facts(finished)
    assert facts.batches == TASKS // 2 == len(read_metrics(finished))
    alone = [
        json.loads((life / "run.json").read_bytes())["statistics"]
        for life in process_directories(finished)
    ]
    assert facts.wall_s == pytest.approx(sum(each["wall_s"] for each in alone))
    assert RecordedSource(finished).observe().about["is_whole"] is True
    assert not (finished / "part-2" / STREAM_FILE).exists()
    assert pq.read_metadata(finished / "part-2" / TRAJECTORIES_FILE).num_rows > 0
    assert audit_run(finished).agrees


# ---------------------------------------------------------------- the stream alone


def test_every_prefix_of_a_rollout_stream_reads_back_its_complete_batches(tmp_path: Path) -> None:
    records, sizes = recorder(tmp_path / "run"), []
    for rollout_id in range(3):
        keep(records, a_rollout(rollout_id))
        records.batch({"version": rollout_id})
        records.sync()
        sizes.append((tmp_path / "run" / STREAM_FILE).stat().st_size)
    body = (tmp_path / "run" / STREAM_FILE).read_bytes()
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / TRAJECTORIES_FILE).write_bytes(b"PAR1")
    for end in sorted({*range(0, len(body), 41), *(size - 1 for size in sizes), *sizes}):
        (torn / STREAM_FILE).write_bytes(body[:end])
        ids = [r.rollout_id for r in read_trajectories(torn)]
        assert ids == list(range(sum(size <= end for size in sizes)))
    records.close()
    assert not (tmp_path / "run" / STREAM_FILE).exists()
    assert find_trajectory(tmp_path / "run", 2) is not None


def test_a_rollout_recorded_twice_is_read_as_recorded_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for directory, ids, version in ((run, (0, 1, 2), 4), (run / "part-1", (2, 3), 5)):
        with recorder(directory) as records:
            keep(records, *map(a_rollout, ids), version=version)
    read = [(r.rollout_id, r.consumed_version) for r in read_trajectories(run)]
    assert read == [(0, 4), (1, 4), (2, 5), (3, 5)]
    again = find_trajectory(run, 2)
    assert again is not None
    assert again.consumed_version == 5
    assert len(list(read_trajectories(run / "part-1"))) == 2


# ---------------------------------------------------------------- a full disk

OUT_OF_DISK = """
import resource, signal, sys, logging, time
from pathlib import Path
import tidegate
from tests.mortal_trainer import weights
from tests.observability.recorded import solve

logging.basicConfig()
model, directory, has_journal = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "journal"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit raises EFBIG
trained = 0
try:
    with tidegate.serve_sync(
        model=model, engines=1, max_running_turns=4, group_size=2, groups_per_batch=2,
        run_directory=directory, journal=has_journal,
    ) as rollouts:
        for batch in rollouts.batches([f"{n}+1=" for n in range(2000)], episode=solve):
            trained += 1
            if trained == 3:
                while (directory / "metrics.jsonl").read_bytes().count(b"\\n") < 3:
                    time.sleep(0.01)  # the records' thread writes a batch's line after its rows
                files = [f for f in directory.iterdir() if f.name.startswith(sys.argv[4])]
                limit = max(f.stat().st_size for f in files)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            rollouts.publish(weights(model, 0))
except tidegate.errors.TidegateError as error:
    print(type(error).__name__, trained, error)
"""


@pytest.mark.parametrize(
    ("journal", "fills"),
    [("none", "metrics"), ("journal", "trajectories.arrows")],
)
def test_a_full_disk_ends_the_run_and_the_written_part_is_readable(
    model: Path, tmp_path: Path, journal: str, fills: str
) -> None:
    directory = tmp_path / "run"
    command = [sys.executable, "-c", OUT_OF_DISK, str(model), str(directory), journal, fills]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    name, trained, *message = ended.stdout.split()
    assert name in ("RecordingFailed", "JournalFailed")
    assert "run=unrecorded" in ended.stderr or name == "JournalFailed"
    assert 3 <= int(trained) < 100
    assert "SafetensorError" not in ended.stderr or "run=unrecorded" in ended.stderr
    assert any(why in " ".join(message) for why in ("too large", "full", "I/O error"))
    assert len(trained_ids(directory)) >= 3 * BATCH_ROLLOUTS
    assert len(read_metrics(directory)) >= 3
    assert read_facts(directory).batches >= 1
    assert write_report(directory).is_file()
    assert not list(directory.glob("*.draft"))


def test_a_failing_recorder_does_not_hide_the_runs_error(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def train_and_fail() -> None:
        with tidegate.serve_sync(model=model, engines=1, run_directory=directory) as rollouts:
            (directory / "weights").mkdir(exist_ok=True)
            (directory / "weights" / "v00001.draft").write_text("in the way")
            rollouts.publish(weights(model, 0))
            raise JournalFailed(path=directory, why="a failure of the caller's")

    with pytest.raises(JournalFailed, match="of the caller's"):
        train_and_fail()


def test_acknowledging_raises_the_recorders_failure(tmp_path: Path) -> None:
    failures: list[RecordingFailed] = []
    records = recorder(tmp_path / "run", on_failure=failures.append)
    keep(records, a_rollout(0))
    records.sync()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "run" / STREAM_FILE).stat().st_size
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        keep(records, a_rollout(1))
        with pytest.raises(RecordingFailed, match=STREAM_FILE):
            records.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert len(failures) == 1
    assert (tmp_path / "run" / STREAM_FILE).stat().st_size == size
    keep(records, a_rollout(2))
    with pytest.raises(RecordingFailed):
        records.sync()  # the missing record stays missing
    assert [r.rollout_id for r in read_trajectories(tmp_path / "run")] == [0, 2]
    with pytest.raises(RecordingFailed):
        records.close()
