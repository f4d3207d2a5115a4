"""What did a run's batches look like before it was resumed? As its directory has it.

Reads lines of figures. Which of them count, it tells by their versions; it knows no journal.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tidegate.orchestrator.records.run_files import METRICS_FILE


def earlier_batches(directory: Path, *, batches: int) -> list[dict[str, float]]:
    """The figures of the first ``batches`` of a run, or of as many as are there, in order.

    Each resume has a part of its own, which begins where the trainer's checkpoint was: what the
    parts before it have from there on was undone.
    """
    parts = sorted(directory.glob("part-*"), key=lambda part: (len(part.name), part.name))
    known: list[dict[str, float]] = []
    for part in (directory, *parts):
        lines = lines_of_figures(part / METRICS_FILE)
        if lines:
            known = [line for line in known if line["version"] < lines[0]["version"]] + lines
    return known[:batches]


def lines_of_figures(path: Path) -> list[dict[str, float]]:
    """Those of a file of :data:`METRICS_FILE`'s kind, up to one that can't be read."""
    lines: list[dict[str, float]] = []
    try:
        for line in path.read_text().splitlines():
            read = json.loads(line)
            figures = _figures(read) if isinstance(read, dict) else {}
            if "version" in figures:
                lines.append(figures)
    except (OSError, ValueError):
        pass  # a process that was killed leaves half a line, or none
    return lines


def _figures(line: Mapping[str, object]) -> dict[str, float]:
    """What a curve can show, and a metric be told as; others may have written in there."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
