"""Plan of a run: each choice of settings with its predicted figures, and one recommendation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate.simulation.planning.closed_forms import predict
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload, Prediction
from tidegate.transport.messages import KvPolicy, PauseMode

NEARLY_BEST = 0.98
"""Share of the best throughput that suffices to recommend a smaller staleness bound."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One choice of settings and the figures predicted for it."""

    varied: str
    """Varied setting: ``max_staleness``, ``pause``, ``split`` or ``batch``."""
    candidate: PlanCandidate
    closed: Prediction
    simulated: Prediction | None = None

    @property
    def best(self) -> Prediction:
        """Simulated prediction if there is one, because it assumes less; else the closed form."""
        return self.simulated or self.closed


def staleness_rows(
    workload: PlanWorkload, base: PlanCandidate, bounds: Sequence[int]
) -> list[PlanRow]:
    """Predict the run ``base`` for each staleness bound, in ascending order."""
    choices = [replace(base, max_staleness=bound) for bound in sorted(set(bounds))]
    return [PlanRow("max_staleness", each, predict(workload, each)) for each in choices]


def recommended(rows: Sequence[PlanRow]) -> PlanRow:
    """Return the first row whose throughput is at least ``NEARLY_BEST`` of the best."""
    best_tokens_per_s = max(row.best.tokens_per_s for row in rows)
    return next(row for row in rows if row.best.tokens_per_s >= NEARLY_BEST * best_tokens_per_s)


def other_rows(
    workload: PlanWorkload,
    base: PlanCandidate,
    *,
    pauses: Sequence[PauseMode] = (),
    device_splits: Sequence[tuple[int, int]] = (),
    batches: Sequence[int] = (),
) -> Iterator[PlanRow]:
    """Predict ``base`` with one setting changed: pause mode, engines and trainers, or batch
    size."""
    for mode in pauses:
        kv: tuple[KvPolicy, ...] = ("keep", "recompute") if mode == "keep" else ("keep",)
        for policy in kv:
            yield _plan_row(workload, "pause", replace(base, pause_mode=mode, kv_policy=policy))
    for engines, trainers in device_splits:
        yield _plan_row(workload, "split", replace(base, engines=engines, trainers=trainers))
    for groups in batches:
        yield _plan_row(workload, "batch", replace(base, groups_per_batch=groups))


def _plan_row(workload: PlanWorkload, varied: str, candidate: PlanCandidate) -> PlanRow:
    return PlanRow(varied, candidate, predict(workload, candidate))


def advice(rows: Sequence[PlanRow]) -> str:
    """Return the recommendation as a sentence, from the rows of :func:`staleness_rows`."""
    row = recommended(rows)
    eta, prediction = row.candidate.max_staleness, row.best
    text = (
        f"max_staleness={eta}: {prediction.tokens_per_s:.0f} tokens/s, a batch every "
        f"{prediction.batch_s:.2f} s, mean staleness {prediction.mean_staleness:.2f}"
    )
    return f"{text}; {row.closed.conclusion}"


INK, MUTED, BLUE, RED = "#22303c", "#8a97a3", "#2f6f9f", "#c0392b"


def plot_plan(path: Path, rows: Sequence[PlanRow]) -> None:
    """Plot throughput and mean staleness of the rows of :func:`staleness_rows` to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
