"""Comparison of runs, and reading of recorded trajectories by polars and datasets."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command_line import tidegate
from tests.observability.recorded import record_run
from tidegate.errors import AuditError, ConfigError
from tidegate.observability.dashboard.comparisons import ComparableRuns
from tidegate.observability.records.trajectories import SCHEMA, read_trajectories
from tidegate.observability.reports.facts import read_facts

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two short runs of the same model with different staleness bounds."""
    directory = tmp_path_factory.mktemp("runs")
    return [
        record_run(directory / f"eta-{bound}", batches=2, max_staleness=bound) for bound in (0, 1)
    ]


def test_a_comparison_has_a_column_per_run_with_its_reports_values(
    runs: list[Path], tmp_path: Path
) -> None:
    picture = tmp_path / "both.png"
    ended = tidegate("compare", *runs, "--picture", picture)
    lines = ended.out.splitlines()
    assert ended.status == 0
    assert lines[0] == "| | eta-0 | eta-1 |"
    assert "| staleness bound | 0 | 1 |" in lines
    assert "| rollouts trained | 8 | 8 |" in lines
    assert "| rollouts discarded | 0 | 0 |" in lines
    assert "| rollouts that forked | 0.0% | 0.0% |" in lines
    tokens = [read_facts(run).tokens_trained for run in runs]
    assert f"| tokens trained | {tokens[0]} | {tokens[1]} |" in lines
    assert lines[-1] == "| audit | - | - |"
    assert picture.read_bytes().startswith(b"\x89PNG")
    output = [json.loads(line) for line in tidegate("compare", *runs, "--json").out.splitlines()]
    assert [(each["run"], each["staleness_bound"]) for each in output] == [
        ("eta-0", 0),
        ("eta-1", 1),
    ]


def test_a_comparison_needs_two_runs_and_names_a_missing_one(runs: list[Path]) -> None:
    for names, says in (((), "give 2 to 12 runs to compare, got 1"), (("no-run",), "no-run")):
        ended = tidegate("compare", runs[0], *names)
        assert ended.status == 2
        assert says in ended.err


def test_a_dashboard_compares_runs_beside_the_shown_one_and_named_ones(
    runs: list[Path], tmp_path: Path
) -> None:
    comparable = ComparableRuns(runs[0])
    assert comparable.names() == ["eta-0", "eta-1"]
    body = comparable.compare(["eta-0", "eta-1"])
    assert body["runs"] == ["eta-0", "eta-1"]
    assert ("staleness bound", ["0", "1"]) in body["rows"]
    assert [len(points) for points in body["reward_by_version"]] == [2, 2]
    elsewhere = tmp_path / "eta-0"
    shutil.copytree(runs[0], elsewhere)
    named = ComparableRuns(runs[0], [elsewhere])
    assert named.names() == ["eta-0", str(elsewhere), "eta-1"]
    assert named.address([elsewhere]).startswith("#compare?run=eta-0&run=")


def test_a_dashboard_refuses_to_compare_what_is_no_run_beside_it(
    runs: list[Path], tmp_path: Path
) -> None:
    comparable = ComparableRuns(runs[0])
    with pytest.raises(ConfigError, match=r"no run '\.\./eta-0' beside this one"):
        comparable.compare(["eta-0", "../eta-0"])
    with pytest.raises(ConfigError, match="2 to 12 runs can be compared, got 1"):
        comparable.compare(["eta-0"])
    with pytest.raises(AuditError, match="recorded run"):
        comparable.address([tmp_path])
    assert ComparableRuns(None).names() == []


@pytest.mark.parametrize("package", ["polars", "datasets"])
def test_another_package_reads_every_token_and_writes_a_file_that_reads_back_as_the_same(
    runs: list[Path], tmp_path: Path, package: str
) -> None:
    reader = pytest.importorskip(package, reason=f"pip install {package}")
    path, written = runs[1] / "trajectories.parquet", tmp_path / "written.parquet"
    actual = list(read_trajectories(runs[1]))
    if package == "polars":
        table = reader.read_parquet(path)
        spans = table["turns"].to_list()[0][0]["spans"]
        assert [s["version"] for s in spans] == [s.version for s in actual[0].turns[0].spans]
        table.write_parquet(written)
    else:
        table = reader.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        table.to_parquet(str(written))
    assert list(map(list, table["token_ids"])) == [rollout.token_ids for rollout in actual]
    assert read_back(written, tmp_path / "again") == actual


def read_back(written: Path, directory: Path) -> list[object]:
    """Cast columns to our schema, because other tools have wider types for text and lists."""
    directory.mkdir()
    table: pa.Table = pq.read_table(written).select(SCHEMA.names).cast(SCHEMA)
    pq.write_table(table, directory / "trajectories.parquet")
    return list(read_trajectories(directory))
