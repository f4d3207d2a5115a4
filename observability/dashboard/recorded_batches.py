"""Figures of a run's recorded batches, for the dashboard's curves.

:mod:`observers` reads them for a resumed run, :mod:`recorded` for a finished one.
"""

from collections.abc import Mapping
from pathlib import Path

from tidegate.observability.facts import read_metrics


def read_batches(directory: Path, *, batches: int | None = None) -> list[dict[str, float]]:
    """Return the figures of a run's first ``batches``, or of all recorded ones if None."""
    lines = read_metrics(directory, stops_at_damage=True)  # show what is readable
    figures = [_figures(line) for line in lines if "version" in line]
    return figures[:batches]


def _figures(line: Mapping[str, object]) -> dict[str, float]:
    """Keep the numeric fields: a curve can't show others, which users may have added."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
