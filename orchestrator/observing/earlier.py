"""What did a run's batches look like before it was resumed? As its directory has it.

Reads lines of figures. Which of them count, it tells by their versions; it knows no journal.
"""

import json
from pathlib import Path
from typing import Any

from tidegate.orchestrator.records.run_files import METRICS_FILE


def earlier_batches(directory: Path, *, batches: int) -> list[dict[str, Any]]:
    """The figures of the first ``batches`` of a run, or of as many as are there, in order.

    Each resume has a part of its own, which begins where the trainer's checkpoint was: what the
    parts before it have from there on was undone.
    """
    parts = sorted(directory.glob("part-*"), key=lambda part: (len(part.name), part.name))
    known: list[dict[str, Any]] = []
    for part in (directory, *parts):
        lines = _lines(part / METRICS_FILE)
        if lines:
            known = [line for line in known if line["version"] < lines[0]["version"]] + lines
    return known[:batches]


def _lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    try:
        for line in path.read_text().splitlines():
            figures = json.loads(line)
            if isinstance(figures, dict) and isinstance(figures.get("version"), int | float):
                lines.append(figures)
    except (OSError, ValueError):
        pass  # a process that was killed leaves half a line, or none
    return lines
