"""A recorded run in Python and notebooks: tables, plots and reprs."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate
from tests.observability.recorded import a_rollout, recorder, some_statistics
from tidegate.errors import AuditError, ConfigError


def a_run(directory: Path) -> Path:
    with recorder(directory, {"max_staleness": 2}) as records:
        for version in range(3):
            records.batch({"version": version, "reward": version / 4, "wall_s": 1.0})
        records.batch({"version": 3, "reward": 1.0, "wall_s": 2.0, "held_out_reward": 0.5})
        records.rollout(a_rollout(), task="<b>1+1", advantage=0.5, consumed_version=5)
        records.finish(some_statistics())
    return directory


@pytest.fixture
def run(tmp_path: Path) -> tidegate.RecordedRun:
    return tidegate.open_run(a_run(tmp_path / "<run>"))


@pytest.mark.parametrize("format", ["arrow", "polars", "pandas", "datasets"])
def test_trajectories_and_metrics_are_tables_of_the_users_package(
    run: tidegate.RecordedRun, format: Any
) -> None:
    if format != "arrow" and importlib.util.find_spec(format) is None:
        with pytest.raises(ConfigError, match=f"pip install {format}"):
            run.trajectories(format)
        return
    table = run.trajectories(format, columns=["task", "token_ids", "reward"])
    names = table.columns if format in ("polars", "pandas") else table.column_names
    assert list(names) == ["task", "token_ids", "reward"]
    assert list(map(int, _values(table["token_ids"])[0])) == [5, 6, 10, 7, 11, 12]
    assert _values(run.metrics(format)["reward"]) == [0.0, 0.25, 0.5, 1.0]


def _values(column: Any) -> list[Any]:
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def test_without_columns_a_table_has_all_of_them_and_rollouts_come_one_by_one(
    run: tidegate.RecordedRun,
) -> None:
    assert {"rollout_id", "turns", "logprobs"} <= set(run.trajectories("arrow").column_names)
    assert [rollout.rollout_id for rollout in run.rollouts()] == [7]


def test_plots_are_pictures_that_a_notebook_shows(run: tidegate.RecordedRun) -> None:
    for figure in (run.plot(), run.plot_metrics("reward", "held_out_reward", over="wall_s")):
        png: bytes = figure._repr_png_()  # type: ignore[attr-defined]
        assert png.startswith(b"\x89PNG")
    axes = run.plot_metrics("held_out_reward").axes
    assert [np.asarray(drawn.get_xdata()).tolist() for drawn in axes[0].lines] == [[3]]


def test_its_reprs_show_the_figures_escaped_in_html(run: tidegate.RecordedRun) -> None:
    assert "batches 4" in repr(run)
    assert "training reward 0.000 to 1.000" in repr(run.facts)
    page = run._repr_html_()
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert "mean 2.00, max 2, bound 2" in page
    assert run.settings == {"max_staleness": 2}
    assert run.report() == run.directory / "report.md"


def test_a_run_without_a_batch_opens_and_says_so(tmp_path: Path) -> None:
    recorder(tmp_path / "run").close()
    run = tidegate.open_run(tmp_path / "run")
    assert repr(run) == f"RecordedRun(of {tmp_path / 'run'}, batches 0)"
    assert len(run.trajectories("arrow")) == 0
    with pytest.raises(AuditError, match="no statistics"):
        _ = run.facts


def test_what_is_not_there_is_refused_with_what_is(
    run: tidegate.RecordedRun, tmp_path: Path
) -> None:
    with pytest.raises(AuditError, match="give the directory of a recorded run"):
        tidegate.open_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="a format is polars, pandas, datasets, arrow; got 'csv'"):
        run.trajectories("csv")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no column 'reword'; they have rollout_id"):
        run.trajectories(columns=["reword"])
    with pytest.raises(ConfigError, match="no batch has a figure 'loss'; there are version"):
        run.plot_metrics("reward", "loss")
    with pytest.raises(ConfigError, match="at least one name"):
        run.plot_metrics()
