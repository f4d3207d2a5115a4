"""Experiment trackers. ``make test-trackers`` installs their packages."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from tidegate.errors import ConfigError
from tidegate.observability.trackers import MLflow, TensorBoard, Tracker, WandB, call_all

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own

FIGURES = [
    {"version": version, "reward": version / 4, "staleness_max": 2.0} for version in range(3)
]


def needs(package: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {package}: make test-trackers")


def write(tracker: Tracker) -> None:
    with tracker:
        for figures in FIGURES:
            tracker(figures)
    tracker.close()  # may be called again


@needs("tensorboard")
def test_in_tensorboard_each_figure_is_a_curve_over_versions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["tidegate/reward", "tidegate/staleness_max"]
    points = [(each.step, each.value) for each in events.Scalars("tidegate/reward")]
    assert points == [(0, 0.0), (1, 0.25), (2, 0.5)]


@needs("mlflow")
def test_in_mlflow_each_figure_is_a_metric_over_versions(tmp_path: Path) -> None:
    tracker = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}", run_name="one")
    write(tracker)
    history = tracker.client.get_metric_history(tracker.run_id, "tidegate/reward")
    assert [(each.step, each.value) for each in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    run = tracker.client.get_run(tracker.run_id)
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    again = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert again.client.get_run(again.run_id).info.experiment_id == run.info.experiment_id
    again.close()
    assert (
        importlib.import_module("mlflow").active_run() is None
    )  # the user's own runs are left alone


@needs("wandb")
def test_in_wandb_each_figure_is_logged_at_its_version(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = WandB(mode="offline", dir=str(tmp_path), project="mine")
    write(tracker)
    importlib.import_module("wandb").teardown()  # its service process
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    printed = capfd.readouterr().err  # W&B's summary: the curve, then the last value
    assert "tidegate/reward ▁▅█" in printed
    assert "tidegate/reward 0.5" in printed


@pytest.mark.parametrize(
    ("package", "tracker", "install"),
    [
        ("tensorboard", TensorBoard, r"tidegate\[tensorboard\]"),
        ("mlflow", MLflow, "pip install mlflow"),
        ("wandb", WandB, "pip install wandb"),
    ],
)
def test_a_missing_package_is_named(
    package: str, tracker: type, install: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=install):
        tracker(tmp_path) if tracker is TensorBoard else tracker()


def test_a_callback_that_raises_keeps_no_figures_from_the_others() -> None:
    seen: list[object] = []
    with pytest.raises(ExceptionGroup, match="callbacks"):
        call_all([lambda figures: 1 / 0, seen.append])(FIGURES[1])
    assert seen == [FIGURES[1]]
