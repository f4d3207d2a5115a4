"""Comparison of recorded runs as a Markdown table or JSON, for ``tidegate compare``.

Reads the same files as a report: `run.json` and `metrics.jsonl` of each run.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import AuditError
from tidegate.observability.records.evaluations import held_out_name
from tidegate.observability.reports.facts import Facts, read_facts, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS_MAX = 12
"""Limit of compared runs: a wider table is unreadable, and the picture has 12 colours."""


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
    lines = ["| |" + "".join(f" {run.name} |" for run in runs), "|---" * (len(runs) + 1) + "|"]
    return [*lines, *(_line(label, cells) for label, cells in comparison_rows(runs))]


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


def _line(label: str, cells: Sequence[str]) -> str:
    return f"| {label} |" + "".join(f" {cell} |" for cell in cells)


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


def held_out_curve(run: ComparedRun, *, over: str = "version") -> "list[Point]":
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


Point = tuple[float, float]


def curve(
    run: ComparedRun, value: Callable[[dict[str, Any]], Any], *, over: str = "version"
) -> list[Point]:
    """Return the points of a figure over another one, for the batches that have both."""
    points = [(row.get(over), value(row)) for row in run.metrics]
    return [(x, y) for x, y in points if x is not None and y is not None]


# ---------------------------------------------------------------- picture

INK, MUTED = "#22303c", "#8a97a3"
COLOURS = (
    *("#0072b2", "#e69f00", "#7a4fa3", "#56b4e9", "#8c5a2b", "#cc79a7"),
    *("#1f3b57", "#b8a000", "#b39ddb", "#5f6b76", "#d9a066", "#a8b3bd"),
)
"""Line colour of each run, without red and green; at least `RUNS_MAX` of them."""


def draw_comparison(path: Path, runs: Sequence[ComparedRun]) -> None:
    """Draw reward over time and over versions, staleness and idle shares into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (by_time, by_version), (staleness, idle) = figure.subplots(2, 2)
    _draw_reward(by_time, runs, over="wall_s", named="time", unit="time, s")
    _draw_reward(by_version, runs, over="version", named="versions", unit="weight version")
    _draw_staleness(staleness, runs)
    _draw_idle(idle, runs)
    figure.savefig(path, dpi=110)


def _style_axes(axes: "Axes", title: str, *, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, color=INK, fontsize=8.5)
    axes.set_ylabel(y, color=INK, fontsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5)


def _draw_reward(
    axes: "Axes", runs: Sequence[ComparedRun], *, over: str, named: str, unit: str
) -> None:
    has_held_out = any(run.facts.evaluations for run in runs)
    marked = " (marks: held-out tasks)" if has_held_out else ""
    _style_axes(axes, f"Reward over {named}{marked}", x=unit, y="mean reward of a batch")
    for run, colour in zip(runs, COLOURS, strict=False):
        points = curve(run, lambda row: row.get("reward"), over=over)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.4, label=run.name)
        if held_out := held_out_curve(run, over=over):
            axes.plot(*zip(*held_out, strict=True), "o:", color=colour, ms=5, lw=0.8)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _draw_staleness(axes: "Axes", runs: Sequence[ComparedRun]) -> None:
    """Draw the share of trained rollouts by staleness, one bar per run side by side."""
    from matplotlib.ticker import MaxNLocator

    title = "Trained rollouts by staleness"
    _style_axes(axes, title, x="staleness, versions", y="share of trained rollouts")
    width = 0.8 / len(runs)
    for index, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        histogram = {int(age): count for age, count in run.facts.staleness_histogram.items()}
        total = max(1, sum(histogram.values()))
        ages = [age + width * (index - (len(runs) - 1) / 2) for age in histogram]
        shares = [count / total for count in histogram.values()]
        axes.bar(ages, shares, width, color=colour, label=run.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)


def _draw_idle(axes: "Axes", runs: Sequence[ComparedRun]) -> None:
    _style_axes(axes, "Idle time of trainer and engines", x="share of the run's time", y="run")
    rows = range(len(runs))
    trainer = [run.facts.trainer_idle_share for run in runs]
    engines = [run.facts.engine_idle_share for run in runs]
    axes.barh([row - 0.2 for row in rows], trainer, 0.38, color="#5b6670", label="trainer")
    axes.barh([row + 0.2 for row in rows], engines, 0.38, color="#b8c0c7", label="engines")
    axes.set_yticks(list(rows), [run.name for run in runs])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8)
