"""TensorBoard export. ``make test-dashboard`` installs the package."""

import importlib.util
from pathlib import Path

import pytest

from tidegate.errors import ConfigError
from tidegate.observability.tensorboard import TensorBoard

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="needs tensorboard: make test-dashboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_figure_is_a_curve_over_versions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as board:
        for version in range(3):
            board({"version": version, "reward": version / 4, "staleness_max": 2.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["tidegate/reward", "tidegate/staleness_max"]
    points = [(each.step, each.value) for each in events.Scalars("tidegate/reward")]
    assert points == [(0, 0.0), (1, 0.25), (2, 0.5)]


@pytest.mark.skipif(HAS_TENSORBOARD, reason="tensorboard is installed")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tidegate\[tensorboard\]"):
        TensorBoard(tmp_path)
