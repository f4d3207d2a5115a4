"""Plot of a plan: throughput and mean staleness over the staleness bound.

`tidegate plan --picture` calls it. Built on matplotlib and the rows of ``plan.py``.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tidegate.simulation.planning.plan import PlanRow, recommended

INK, MUTED, BLUE, RED = "#22303c", "#8a97a3", "#2f6f9f", "#c0392b"


def plot_plan(path: Path, rows: Sequence[PlanRow]) -> None:
    """Plot the rows of :func:`plan.staleness_rows` to a PNG file."""
    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    speed, age = figure.subplots(1, 2)
    bounds = [row.candidate.max_staleness for row in rows]
    pairs = (
        (speed, "tokens_per_s", "Trained tokens per second"),
        (age, "mean_staleness", "Mean staleness, versions"),
    )
    for axes, name, title in pairs:
        closed = [getattr(row.closed, name) for row in rows]
        axes.plot(bounds, closed, "-o", color=BLUE, lw=1.6, ms=4, label="closed forms")
        simulated = [row for row in rows if row.simulated is not None]
        if simulated:
            bounds_simulated = [row.candidate.max_staleness for row in simulated]
            values = [getattr(row.simulated, name) for row in simulated]
            axes.plot(bounds_simulated, values, "x", color=INK, ms=7, label="simulated")
        axes.axvline(
            recommended(rows).candidate.max_staleness, color=RED, lw=1, label="recommended"
        )
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
        axes.set_xlabel("max_staleness", color=INK)
        axes.set_ylim(bottom=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=8.5)
        axes.legend(frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=110)
