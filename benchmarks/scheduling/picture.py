"""Plot of efficiency over the largest staleness, one panel per workload."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import FillStyleType

from benchmarks.scheduling.rows import BOUNDS, Row

MARKERS = "osD^vP*X<>hpd"

PANEL_INCHES = (3.9, 3.0)
COLUMNS = 2
"""Two panels of this size fill the width of a page, so that text keeps its size there."""

MODES: dict[str, FillStyleType] = {"keep": "full", "abort": "left", "wait": "none"}
"""Fill style of the markers, by pause mode."""


def draw(table: Sequence[Row], path: Path) -> None:
    """Draw the picture into a file."""
    workloads = list(dict.fromkeys(row.workload for row in table))
    policies = list(dict.fromkeys(row.policy for row in table if row.policy not in BOUNDS))
    width, height = PANEL_INCHES
    with mpl.rc_context({"font.size": 9}):
        rows = len(workloads) // COLUMNS + 1  # the legend takes a cell
        figure = Figure((width * COLUMNS, height * rows), layout="constrained")
        cells = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False).flatten()
        for workload, axes in zip(workloads, cells, strict=False):
            _panel(axes, [row for row in table if row.workload == workload], policies)
            axes.set_title(workload)
        for axes in cells[::COLUMNS]:
            axes.set_ylabel("efficiency (1: no machine ever idle)")
        for axes in cells[len(workloads) :]:
            axes.set_axis_off()
        handles = {
            label: handle
            for axes in cells
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        cells[-1].legend(handles.values(), handles, loc="center", ncols=2, frameon=False)
        figure.savefig(path, dpi=110)


def _panel(axes: Axes, table: Sequence[Row], policies: Sequence[str]) -> None:
    figures = {(row.policy, row.eta, row.mode, row.name): row.value for row in table}
    for number, policy in enumerate(policies):
        runs = [(p, eta, mode) for p, eta, mode, name in figures if name == "efficiency"]
        label: str | None = policy
        for run in [run for run in runs if run[0] == policy]:
            x, y = figures[*run, "max_staleness"], figures[*run, "efficiency"]
            axes.plot(
                x,
                y,
                marker=MARKERS[number % len(MARKERS)],
                color=mpl.colormaps["tab20"](number % 20),
                fillstyle=MODES[run[2]],
                linestyle="none",
                label=label,
            )
            label = None
    for bound, linestyle in zip(BOUNDS, ("-", ":", "--", "-."), strict=True):
        of_eta = {
            eta: y
            for (policy, eta, _, name), y in figures.items()
            if (policy, name) == (bound, "efficiency")
        }
        if of_eta:
            axes.plot([*of_eta], [*of_eta.values()], linestyle, color="0.4", label=bound)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    oldest = max(row.value for row in table if row.name == "max_staleness")
    axes.set_xlim(-0.5, oldest + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("greatest age of a trained token, versions")
    axes.grid(alpha=0.2)
