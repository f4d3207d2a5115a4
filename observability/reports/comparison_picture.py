"""Picture of compared runs, drawn with matplotlib for ``tidegate compare --picture``.

Shows reward over time and over versions, staleness, and idle shares, from :mod:`comparison`'s data.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tidegate.observability.reports.comparison import ComparedRun, curve, held_out_curve

INK, MUTED = "#22303c", "#8a97a3"
COLOURS = (
    *("#0072b2", "#e69f00", "#7a4fa3", "#56b4e9", "#8c5a2b", "#cc79a7"),
    *("#1f3b57", "#b8a000", "#b39ddb", "#5f6b76", "#d9a066", "#a8b3bd"),
)
"""Line colour of each run, without red and green; at least `RUNS_MAX` of them."""


def draw_comparison(path: Path, runs: Sequence[ComparedRun]) -> None:
    """Draw the runs into a PNG file."""
    figure = Figure(figsize=(12, 7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (by_time, by_version), (staleness, idle) = figure.subplots(2, 2)
    _draw_reward(by_time, runs, over="wall_s", named="time", unit="time, s")
    _draw_reward(by_version, runs, over="version", named="versions", unit="weight version")
    _draw_staleness(staleness, runs)
    _draw_idle(idle, runs)
    figure.savefig(path, dpi=110)


def _style_axes(axes: Axes, title: str, *, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, color=INK, fontsize=8.5)
    axes.set_ylabel(y, color=INK, fontsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5)


def _draw_reward(
    axes: Axes, runs: Sequence[ComparedRun], *, over: str, named: str, unit: str
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


def _draw_staleness(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """Draw the share of trained rollouts by staleness, one bar per run side by side."""
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


def _draw_idle(axes: Axes, runs: Sequence[ComparedRun]) -> None:
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
