"""Figures of a run's batches from before it was resumed, for the dashboard's curves."""

from collections.abc import Mapping
from pathlib import Path

from tidegate.observability.facts import read_metrics


def earlier_batches(directory: Path, *, batches: int | None = None) -> list[dict[str, float]]:
    """Return the figures of a run's first ``batches``, all if None, or of as many as are there."""
    lines = read_metrics(directory, stops_at_damage=True)  # a dashboard shows what there is
    figures = [_figures(line) for line in lines if "version" in line]
    return figures[:batches]


def _figures(line: Mapping[str, object]) -> dict[str, float]:
    """Leave out what a curve can't show; owners may have written other things in there."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
