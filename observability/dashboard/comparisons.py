"""Runs side by side: which runs can be compared with the shown one, and the comparison as JSON.

Figures are those of `tidegate compare`, read from the runs' directories, so a running run is
compared as far as it is recorded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tidegate.errors import ConfigError
from tidegate.observability.records.run_directories import RUN_FILE, read_run_file
from tidegate.observability.reports.comparison import (
    RUNS_MAX,
    ComparedRun,
    comparison_rows,
    held_out_curve,
    read_runs,
    reward_curve,
    staleness_shares,
)

LISTED_MAX = 200
"""Limit of runs offered for a comparison; the newest are offered."""


class ComparableRuns:
    """The shown run and others: those in the same parent directory, and those that were named."""

    def __init__(self, directory: Path | None, others: Sequence[Path] = ()) -> None:
        """``directory``: the shown run's; None if it is not recorded, then nothing is offered."""
        self._directory = directory
        self._others = tuple(others)

    def names(self) -> list[str]:
        """Return the names of all runs, the shown one first, named ones next, then newest first."""
        return list(self._directories())

    def compare(self, names: Sequence[str]) -> dict[str, Any]:
        """Return a comparison of the runs with these names.

        Raises:
            ConfigError: a name is unknown, or there are too few or too many.
            AuditError: a run can't be read.
        """
        known = self._directories()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"there is no run {unknown[0]!r:.80} beside this one")
        if not 2 <= len(names) <= RUNS_MAX:
            raise ConfigError(f"2 to {RUNS_MAX} runs can be compared, got {len(names)}")
        return comparison_body(read_runs([known[name] for name in names]))

    def address(self, others: Sequence[Path]) -> str:
        """Return the part of the page's address that compares the shown run with these.

        Raises:
            AuditError: one of them is no recorded run.
        """
        for other in others:
            read_run_file(other)
        shown = {(self._directory or Path()).resolve(), *(other.resolve() for other in others)}
        names = [name for name, path in self._directories().items() if path in shown]
        return f"#compare?{urlencode([('run', name) for name in names])}"

    def _directories(self) -> Mapping[str, Path]:
        if self._directory is None:
            return {}
        shown = self._directory.resolve()
        beside = [path.parent for path in shown.parent.glob(f"*/{RUN_FILE}")]
        beside.sort(key=lambda path: (path / RUN_FILE).stat().st_mtime, reverse=True)
        found: dict[str, Path] = {}
        for path in (shown, *(other.resolve() for other in self._others), *beside[:LISTED_MAX]):
            if path not in found.values():
                found[path.name if path.name not in found else str(path)] = path
        return found


def comparison_body(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return a comparison as JSON: the table of `tidegate compare`, and its curves' points."""
    return {
        "runs": [run.name for run in runs],
        "rows": comparison_rows(runs),
        "reward_by_time": [reward_curve(run, over="wall_s") for run in runs],
        "reward_by_version": [reward_curve(run, over="version") for run in runs],
        "held_out_by_version": [held_out_curve(run) for run in runs],
        "staleness": [staleness_shares(run) for run in runs],
        "idle": [[run.facts.trainer_idle_share, run.facts.engine_idle_share] for run in runs],
    }
