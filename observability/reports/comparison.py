"""Comparison of recorded runs as a Markdown table or JSON, for ``tidegate compare``.

Reads the same files as a report: `run.json` and `metrics.jsonl` of each run.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.records.evaluations import held_out_name
from tidegate.observability.reports.facts import Facts, read_facts, read_metrics

RUNS_MAX = 12
"""Limit of compared runs: a wider table is unreadable, and the pictures have 12 colours."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Facts and metrics of one compared run."""

    name: str
    """The directory's name, or its path if two directories have the same name."""
    facts: Facts
    metrics: list[dict[str, Any]]
    """One mapping per batch, as in `metrics.jsonl`."""


def read_runs(
    directories: Sequence[Path], *, progress: Callable[[Path], None] = lambda directory: None
) -> list[ComparedRun]:
    """Read the facts and metrics of each run; ``progress`` is called with each before it is read.

    Raises:
        AuditError: there are fewer than two or more than `RUNS_MAX` runs, or a file can't be read.
    """
    if not 2 <= len(directories) <= RUNS_MAX:
        raise AuditError(f"give 2 to {RUNS_MAX} runs to compare, got {len(directories)}")
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    runs = []
    for name, directory in zip(names, directories, strict=True):
        progress(directory)
        runs.append(ComparedRun(name, read_facts(directory), read_metrics(directory)))
    return runs


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("training reward, first tenth", "training_reward_start", ".3f"),
    ("training reward, last tenth", "training_reward_end", ".3f"),
    ("held-out reward before", "reward_before", ".3f"),
    ("held-out reward after", "reward_after", ".3f"),
    ("weight versions", "versions", "d"),
    ("rollouts trained", "rollouts_trained", "d"),
    ("rollouts discarded", "rollouts_discarded", "d"),
    ("rollouts that forked", "forked_share", ".1%"),
    ("tokens trained", "tokens_trained", "d"),
    ("tokens discarded", "tokens_discarded", "d"),
    ("seconds", "wall_s", ".1f"),
    ("tokens per second", "tokens_per_s", ".0f"),
    ("minimum step time, s", "step_time_min_s", ".3f"),
    ("trainer idle", "trainer_idle_share", ".1%"),
    ("engines idle", "engine_idle_share", ".1%"),
    ("staleness bound", "staleness_bound", "d"),
    ("highest staleness", "max_staleness", "d"),
    ("mean staleness", "mean_staleness", ".2f"),
    ("staleness from generation", "staleness_from_generation", ".2f"),
    ("staleness from queue", "staleness_from_queue", ".2f"),
    ("rollouts of 2+ versions", "mixed_version_share", ".1%"),
    ("group wait for last rollout, s", "straggler_wait_s", ".3f"),
    ("seconds per publish", "publish_s", ".3f"),
    ("engine stall per swap, s", "weight_swap_stall_s", ".4f"),
)
"""Rows of the table: label, field of `Facts`, format specification."""

_SETTINGS = (("mode", "mode"), ("pause", "pause_mode"), ("KV", "kv_policy"), ("model", "model"))


def comparison_lines(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a Markdown table with one column per run. Settings are shown only if they differ."""
    rows = ([label, *cells] for label, cells in comparison_rows(runs))
    return markdown_table(["", *(run.name for run in runs)], rows)


def markdown_table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    first, *rest = (
        "|" + "".join(f" {cell}".rstrip() + " |" for cell in cells) for cells in (heading, *rows)
    )
    return [first, "|---" * len(heading) + "|", *rest]


def comparison_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the table's rows: a label, and a cell per run."""
    rows: list[tuple[str, list[str]]] = []
    for label, name in _SETTINGS:
        cells = [str(getattr(run.facts, name) or "-") for run in runs]
        if len(set(cells)) > 1:
            rows.append((label, cells))
    for label, name, format_spec in _ROWS:
        values = [getattr(run.facts, name) for run in runs]
        if any(value is not None for value in values):
            rows.append((label, [_formatted(value, format_spec) for value in values]))
    return [*rows, ("audit", [_audit_cell(run.facts) for run in runs])]


def _formatted(value: Any, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _audit_cell(facts: Facts) -> str:
    if facts.audit is None:
        return "-"
    agrees = "agrees" if facts.audit.get("agrees") else "DISAGREES"
    return str(facts.audit.get("verdict", agrees))


def comparison_json(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return each run's facts, with the keys of its report.json and its name as ``run``."""
    return [{**dataclasses.asdict(run.facts), "run": run.name} for run in runs]


Point = tuple[float, float]


def held_out_curve(run: ComparedRun, *, over: str = "version") -> list[Point]:
    """Return the held-out rewards of a run over ``version``, or over ``wall_s``: the time of the
    first batch at that version or later."""
    name = held_out_name(run.facts.evaluations)
    points = [point for point in run.facts.evaluations if point.name == name]
    if over == "version":
        return [(point.version, point.reward) for point in points]
    times = [(row["version"], row[over]) for row in run.metrics if {"version", over} <= row.keys()]
    end = times[-1][1] if times else 0.0
    return [
        (next((at for version, at in times if version >= point.version), end), point.reward)
        for point in points
    ]


def reward_curve(run: ComparedRun, *, over: str = "version") -> list[Point]:
    """Return the mean reward of each batch over another figure, for the batches that have both."""
    points = [(row.get(over), row.get("reward")) for row in run.metrics]
    return [(x, y) for x, y in points if x is not None and y is not None]


def staleness_shares(run: ComparedRun) -> list[tuple[int, float]]:
    """Return the share of trained rollouts by staleness in versions."""
    histogram = run.facts.staleness_histogram
    total = max(1, sum(histogram.values()))
    return sorted((int(age), count / total) for age, count in histogram.items())
