"""What does a run look like? One picture: reward, staleness, and who was busy when.

Knows numbers, intervals and colours; what a run is, and whether it went well, is not drawn.
"""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tidegate.orchestrator.report import Facts
from tidegate.orchestrator.trace import TRACE_FILE, TRAINER_TRACK, Interval, Trace, read_trace

EXCERPT_BATCHES = 5
"""Versions that the timeline shows: enough to see the overlap, few enough to tell apart."""

EXCERPT_S_MAX = 10.0

INK, MUTED, BLUE, RED = "#22303c", "#8a97a3", "#2f6f9f", "#c0392b"
TRAINER_COLOURS = {"train": "#4a5560", "publish": "#c0392b", "wait": "#e9edf0"}
TRAINER_WORDS = {"train": "training", "publish": "publishing", "wait": "waiting for rollouts"}
VERSION_COLOURS = colormaps["tab10"].colors  # type: ignore[attr-defined]
"""Repeats after ten versions; an excerpt shows fewer."""


def draw_report(path: Path, directory: Path, facts: Facts, metrics: list[dict[str, Any]]) -> None:
    """Draw a run to a PNG."""
    figure = Figure(figsize=(11, 7.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=[1, 1.05])
    _draw_reward(figure.add_subplot(grid[0, :2]), facts, metrics)
    _draw_staleness(figure.add_subplot(grid[0, 2]), facts)
    _draw_timeline(figure.add_subplot(grid[1, :]), directory, facts)
    how = " · ".join(v for v in (facts.mode, facts.pause_mode, facts.kv_policy) if v)
    figure.suptitle(f"{facts.run}   {how}", x=0.01, ha="left", fontsize=13, color=INK)
    figure.savefig(path, dpi=110)


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=8.5)


def _draw_reward(axes: Axes, facts: Facts, metrics: list[dict[str, Any]]) -> None:
    """Mean reward of each batch, and the two measurements on held-out tasks."""
    points = [
        (row["version"], row["reward"])
        for row in metrics
        if row.get("version") is not None and row.get("reward") is not None
    ]
    _plain(axes, "Reward over weight versions")
    if points:
        axes.plot(*zip(*points, strict=True), color=BLUE, lw=1.6, label="mean of each batch")
    held_out = [(0, facts.reward_before), (facts.versions, facts.reward_after)]
    known = [(version, reward) for version, reward in held_out if reward is not None]
    if known:
        axes.scatter(
            *zip(*known, strict=True), color=RED, s=46, zorder=3, label="held-out tasks", clip_on=False
        )
    for version, reward in known:
        is_first = version == 0
        axes.annotate(
            f"{reward:.2f}",
            (version, reward),
            xytext=(7 if is_first else -7, 9),
            textcoords="offset points",
            ha="left" if is_first else "right",
            color=RED,
            fontsize=10,
            weight="bold",
        )
    rewards = [reward for _, reward in (*points, *known)]
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set_ylim(0, 1.05)
    axes.set_xlim(0, max(1, facts.versions))
    axes.set_xlabel("weight version at the trainer", fontsize=9, color=INK)
    axes.grid(axis="y", color="#eef1f3")
    if rewards:
        axes.legend(loc="lower right", frameon=False, fontsize=9)


def _draw_staleness(axes: Axes, facts: Facts) -> None:
    """Trained rollouts by staleness, with the bound that none may cross."""
    counts = {int(value): count for value, count in facts.staleness_histogram.items()}
    highest = max([facts.staleness_bound, *counts])
    values = range(highest + 1)
    total = max(1, sum(counts.values()))
    shares = [100 * counts.get(value, 0) / total for value in values]
    _plain(axes, "Staleness of trained rollouts")
    colours = [BLUE if value <= facts.staleness_bound else RED for value in values]
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
    bound = facts.staleness_bound
    axes.axvline(bound + 0.5, color=RED, ls="--", lw=1.4)
    axes.set_ylim(0, max(shares) * 1.25 or 1)
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
    axes.set_xticks(list(values) if highest <= 12 else [0, bound])
    axes.set_xlim(-0.6, highest + 0.75)
    axes.set_xlabel("versions behind the trainer", fontsize=9, color=INK)
    axes.set_ylabel("% of rollouts", fontsize=9, color=INK)


def _draw_timeline(axes: Axes, directory: Path, facts: Facts) -> None:
    """Engines in the colour of their weights, the trainer in that of what it does."""
    _plain(axes, "")
    axes.grid(visible=False)
    trace = read_trace(directory / TRACE_FILE) if (directory / TRACE_FILE).exists() else Trace()
    if not any(trace.tracks.values()):
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no timeline was recorded", ha="center", color=MUTED)
        return
    start_us, end_us = _excerpt(trace)
    began_us = min(track[0].started_us for track in trace.tracks.values() if track)
    engines = sorted(set(trace.tracks) - {TRAINER_TRACK})
    # The trainer at the top, the engines below it: weights flow downwards.
    lanes = {name: row for row, name in enumerate([*reversed(engines), TRAINER_TRACK])}
    for name, row in lanes.items():
        shown = [
            _clipped(i, start_us, end_us)
            for i in trace.tracks.get(name, [])
            if i.ended_us > start_us and i.started_us < end_us
        ]
        _draw_lane(axes, row, shown, (start_us, end_us), is_trainer=name == TRAINER_TRACK)
    for instant in trace.instants:
        if instant.name == "swap" and start_us <= instant.at_us <= end_us:
            row = lanes.get(instant.track, 0)
            axes.vlines(instant.at_us, row - 0.46, row + 0.46, color=INK, lw=1.1)
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(start_us, end_us)
    axes.xaxis.set_major_formatter(lambda at_us, _: f"{(at_us - began_us) / 1e6:.1f}")
    axes.set_xlabel("seconds since the run began", fontsize=9, color=INK)
    title = (
        f"Timeline, an excerpt: engines by weight version (a line marks each swap), trainer below "
        f"idle {facts.trainer_idle_share:.0%}, engines {facts.engine_idle_share:.0%} over the run"
    )
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
