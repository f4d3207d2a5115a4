"""Pictures of runs, drawn with matplotlib: one run's reward, staleness and timeline for its report,
and several runs' curves for a comparison.

The timeline comes from the run's ``trace.json``.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tidegate.observability.records.trace import (
    TRAINER_TRACK,
    Interval,
    Trace,
    read_trace,
    trace_path,
)
from tidegate.observability.reports.comparison import (
    ComparedRun,
    held_out_curve,
    reward_curve,
    staleness_shares,
)
from tidegate.observability.reports.facts import Facts

EXCERPT_VERSIONS = 6
"""Versions in the timeline's excerpt: enough to show the overlap, few enough to distinguish."""

EXCERPT_S_MAX = 10.0
"""Longest excerpt of the timeline, in seconds."""

LABEL_SHARE_MIN = 0.035
"""Bars narrower than this share of the timeline get no label."""

INK, MUTED, BLUE, RED = "#22303c", "#8a97a3", "#2f6f9f", "#c0392b"
EVALUATION_COLOURS = ("#b5651d", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f", "#1f3b57")
"""One for each name of evaluations; further ones are not drawn."""
TRAINING, WAITING = "#5b6670", "#e6eaed"
VERSION_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e58ba0")
"""Colour of version v is number v mod 7; an excerpt shows about six versions."""


class NotebookFigure(Figure):
    """Figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=110)
        return png.getvalue()


def metrics_figure(rows: list[dict[str, Any]], names: Sequence[str], *, over: str) -> Figure:
    """Return a figure with one panel for each name, over another figure of the batches."""
    figure = NotebookFigure(figsize=(11, 2.6 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True)
    for name, axes in zip(names, panels[:, 0], strict=True):
        _style_axes(axes, name, x=over if axes is panels[-1, 0] else "")
        known = [row for row in rows if row.get(name) is not None and row.get(over) is not None]
        axes.plot([row[over] for row in known], [row[name] for row in known], color=BLUE, lw=1.6)
        axes.grid(axis="y", color="#eef1f3")
    return figure


def report_figure(directory: Path, facts: Facts, metrics: list[dict[str, Any]]) -> Figure:
    """Return the run's picture."""
    figure = NotebookFigure(figsize=(11, 7.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=[1, 1.05])
    _draw_reward(figure.add_subplot(grid[0, :2]), facts, metrics)
    _draw_staleness(figure.add_subplot(grid[0, 2]), facts)
    _draw_timeline(figure.add_subplot(grid[1, :]), directory, facts)
    modes = " · ".join(v for v in (facts.mode, facts.pause_mode, facts.kv_policy) if v)
    figure.suptitle(f"Run {facts.run}    {modes}", x=0.01, ha="left", fontsize=13, color=INK)
    return figure


def _style_axes(axes: Axes, title: str, *, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=8.5)


def _draw_reward(axes: Axes, facts: Facts, metrics: list[dict[str, Any]]) -> None:
    """Draw the mean reward of each batch, and the evaluations, each name in its colour."""
    points = [
        (row["version"], row["reward"])
        for row in metrics
        if row.get("version") is not None and row.get("reward") is not None
    ]
    _style_axes(axes, "Reward over weight versions", x="weight version at the trainer")
    if points:
        axes.plot(*zip(*points, strict=True), color=BLUE, lw=1.6, label="mean of each batch")
    held_out = _held_out_points(facts)
    for name, colour in zip(held_out, EVALUATION_COLOURS, strict=False):
        versions, rewards = zip(*held_out[name], strict=True)
        axes.plot(versions, rewards, "o:", color=colour, ms=6, lw=1, label=name, clip_on=False)
    known = [point for points in held_out.values() for point in points]
    for version, reward in (*known[:1], *known[1:][-1:]):
        # Below the first and last point, where a rising curve leaves room.
        axes.annotate(
            f"{reward:.2f}",
            (version, reward),
            xytext=(9, -5) if version == 0 else (-6, -17),
            textcoords="offset points",
            ha="left" if version == 0 else "right",
            color=INK,
            fontsize=11,
        )
    drawn = [reward for _, reward in (*points, *known)]
    if all(0 <= reward <= 1 for reward in drawn):
        axes.set_ylim(0, 1.05)
    axes.set_xlim(0, max(1, facts.versions))
    axes.grid(axis="y", color="#eef1f3")
    if drawn:
        axes.legend(loc="lower right", frameon=False, fontsize=9)


def _held_out_points(facts: Facts) -> dict[str, list[tuple[int, float]]]:
    """Return versions and rewards of the evaluations by name, or those that the owner recorded."""
    points: dict[str, list[tuple[int, float]]] = {}
    for point in facts.evaluations:
        points.setdefault(point.name, []).append((point.version, point.reward))
    recorded = [(0, facts.reward_before), (facts.versions, facts.reward_after)]
    known = [(version, reward) for version, reward in recorded if reward is not None]
    return points or ({"held-out tasks": known} if known else {})


def _draw_staleness(axes: Axes, facts: Facts) -> None:
    """Draw the share of trained rollouts by staleness, with the bound."""
    counts = {int(value): count for value, count in facts.staleness_histogram.items()}
    bound = facts.staleness_bound
    highest = max([bound or 0, *counts])
    values = range(highest + 1)
    total = max(1, sum(counts.values()))
    shares = [100 * counts.get(value, 0) / total for value in values]
    title = "Staleness of trained rollouts"
    _style_axes(axes, title, x="versions behind the trainer", y="% of rollouts")
    colours = [BLUE if bound is None or value <= bound else RED for value in values]
    axes.bar(values, shares, color=colours, width=0.7)
    for value, share in zip(values, shares, strict=True):
        axes.annotate(
            f"{share:.0f} %" if share >= 1 or share == 0 else "<1 %",
            (value, share),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=INK,
        )
    axes.set_ylim(0, max(shares) * 1.25 or 1)
    if bound is not None:
        _draw_bound(axes, bound)
    axes.set_xticks(list(values) if highest <= 12 else [0, highest])
    axes.set_xlim(-0.6, highest + 0.75)


def _draw_bound(axes: Axes, bound: int) -> None:
    axes.axvline(bound + 0.5, color=RED, ls="--", lw=1.4)
    axes.annotate(
        f"bound {bound}",
        (bound + 0.5, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color=RED,
        fontsize=9,
    )


def _draw_timeline(axes: Axes, directory: Path, facts: Facts) -> None:
    """Draw a lane per engine, coloured by version, and one of the trainer, by activity."""
    title = (
        f"Timeline, an excerpt. Idle over the whole run: trainer "
        f"{facts.trainer_idle_share:.0%}, engines {facts.engine_idle_share:.0%}"
    )
    _style_axes(axes, title, x="seconds since the run began")
    axes.grid(visible=False)
    path = trace_path(directory)
    trace = read_trace(path) if path.exists() else Trace()
    if not any(trace.tracks.values()):
        axes.set_title("")
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no timeline was recorded", ha="center", color=MUTED)
        return
    start_us, end_us = _excerpt(trace)
    began_us = min(track[0].started_us for track in trace.tracks.values() if track)
    engines = sorted(set(trace.tracks) - {TRAINER_TRACK})
    # The trainer at the top, the engines below it: weights flow downwards.
    lanes = {name: row for row, name in enumerate([*reversed(engines), TRAINER_TRACK])}
    for name, row in lanes.items():
        bars = [
            (max(start_us, i.started_us), min(end_us, i.ended_us), i)
            for i in trace.tracks.get(name, [])
            if i.ended_us > start_us and i.started_us < end_us
        ]
        _draw_lane(axes, row, bars, end_us - start_us, is_trainer=name == TRAINER_TRACK)
    for instant in trace.instants:
        if (
            instant.name == "swap"
            and instant.track in lanes
            and start_us <= instant.at_us <= end_us
        ):
            row = lanes[instant.track]
            axes.vlines(instant.at_us, row - 0.44, row + 0.44, color=INK, lw=1.2)
    axes.set_yticks(list(lanes.values()), list(lanes), fontsize=10)
    axes.set_ylim(-0.55, len(lanes) - 0.45)
    axes.set_xlim(start_us, end_us)
    axes.xaxis.set_major_formatter(lambda at_us, _: f"{(at_us - began_us) / 1e6:.1f}")
    _draw_legend(axes)


def _excerpt(trace: Trace) -> tuple[int, int]:
    """Return the start and end of an excerpt from the middle of the run."""
    ends = [i.ended_us for i in trace.tracks.get(TRAINER_TRACK, []) if i.name == "publish"]
    if len(ends) >= 2:
        first = max(0, (len(ends) - EXCERPT_VERSIONS) // 2)
        start_us = ends[first]
        end_us = ends[min(first + EXCERPT_VERSIONS, len(ends) - 1)]
    else:
        intervals = [i for track in trace.tracks.values() for i in track]
        start_us = min(i.started_us for i in intervals)
        end_us = max(i.ended_us for i in intervals)
    return start_us, max(start_us + 1, min(end_us, start_us + int(EXCERPT_S_MAX * 1e6)))


def _draw_lane(
    axes: Axes,
    row: int,
    bars: list[tuple[int, int, Interval]],
    window_us: int,
    *,
    is_trainer: bool,
) -> None:
    """Draw a lane's bars, and a label on each labelled range that is wide enough."""
    axes.broken_barh(
        [(start, end - start) for start, end, _ in bars],
        (row - 0.36, 0.72),
        facecolors=[_colour(i, is_trainer) for _, _, i in bars],
        lw=0,
    )
    for start, end, label, colour in _labelled_ranges(bars, is_trainer):
        if end - start >= LABEL_SHARE_MIN * window_us:
            axes.text(
                (start + end) / 2,
                row,
                label,
                ha="center",
                va="center",
                fontsize=8.5,
                color=MUTED if colour == WAITING else "white",
                weight="bold",
                # Otherwise the range's idle gaps would show through its label.
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 2.0},
                clip_on=True,
            )


def _colour(interval: Interval, is_trainer: bool) -> str:
    if is_trainer and interval.name != "publish":
        return TRAINING if interval.name == "train" else WAITING
    return VERSION_COLOURS[interval.version % len(VERSION_COLOURS)]


def _labelled_ranges(
    bars: list[tuple[int, int, Interval]], is_trainer: bool
) -> list[tuple[int, int, str, str]]:
    """Merge neighbouring bars with the same label, gaps included, so that a label is drawn once."""
    ranges: list[tuple[int, int, str, str]] = []
    for start, end, interval in bars:
        label = interval.name if is_trainer else f"v{interval.version}"
        if ranges and ranges[-1][2] == label:
            ranges[-1] = (ranges[-1][0], end, *ranges[-1][2:])
        else:
            ranges.append((start, end, label, _colour(interval, is_trainer)))
    return ranges


def _draw_legend(axes: Axes) -> None:
    keys = [
        Patch(color=TRAINING, label="trainer trains"),
        Patch(color=WAITING, label="trainer waits for rollouts"),
        Patch(color=VERSION_COLOURS[0], label="a weight version: published, then decoding"),
        Patch(facecolor="white", edgecolor=MUTED, lw=0.6, label="engine idle"),
    ]
    axes.legend(
        handles=keys,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(keys),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
    )


# ---------------------------------------------------------------- comparison

RUN_COLOURS = (
    *("#0072b2", "#e69f00", "#7a4fa3", "#56b4e9", "#8c5a2b", "#cc79a7"),
    *("#1f3b57", "#b8a000", "#b39ddb", "#5f6b76", "#d9a066", "#a8b3bd"),
)
"""Line colour of each run, without red and green; at least `RUNS_MAX` of them."""


def draw_comparison(path: Path, runs: Sequence[ComparedRun]) -> None:
    """Draw reward over time and over versions, staleness and idle shares into a PNG file."""
    figure = Figure(figsize=(12, 7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    (by_time, by_version), (staleness, idle) = figure.subplots(2, 2)
    _draw_rewards(by_time, runs, over="wall_s", named="time", unit="time, s")
    _draw_rewards(by_version, runs, over="version", named="versions", unit="weight version")
    _draw_shares(staleness, runs)
    _draw_idle(idle, runs)
    figure.savefig(path, dpi=110)


def _draw_rewards(
    axes: Axes, runs: Sequence[ComparedRun], *, over: str, named: str, unit: str
) -> None:
    has_held_out = any(run.facts.evaluations for run in runs)
    marked = " (marks: held-out tasks)" if has_held_out else ""
    _style_axes(axes, f"Reward over {named}{marked}", x=unit, y="mean reward of a batch")
    for run, colour in zip(runs, RUN_COLOURS, strict=False):
        points = reward_curve(run, over=over)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.4, label=run.name)
        if held_out := held_out_curve(run, over=over):
            axes.plot(*zip(*held_out, strict=True), "o:", color=colour, ms=5, lw=0.8)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _draw_shares(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """Draw the share of trained rollouts by staleness, one bar per run side by side."""
    title = "Trained rollouts by staleness"
    _style_axes(axes, title, x="staleness, versions", y="share of trained rollouts")
    width = 0.8 / len(runs)
    for index, (run, colour) in enumerate(zip(runs, RUN_COLOURS, strict=False)):
        shares = staleness_shares(run)
        places = [age + width * (index - (len(runs) - 1) / 2) for age, _ in shares]
        axes.bar(places, [share for _, share in shares], width, color=colour, label=run.name)
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
