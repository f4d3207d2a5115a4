"""How do ours and a peer's compare? By turns in one run, so that a busy machine slows both.

A row's value is the median of its runs; its spread, half the distance between the quartiles as a
share of that. It knows nothing of what is measured.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

RUNS = 5

Measure = Callable[[], Mapping[str, float]]
"""One run: what came out, by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: float
    """The peer's value, in the same unit and run."""
    ratio: float
    """Ours over the peer's."""
    against: str
    """Who the peer is."""
    spread: float
    """Of ours."""


def by_turns(
    measures: Mapping[str, Measure], *, runs: int = RUNS
) -> dict[str, dict[str, list[float]]]:
    """Run all by turns; for each measure, what came out by name, one figure per run."""
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in measures}
    for _ in range(runs):
        for name, measure in measures.items():
            for what, figure in measure().items():
                figures[name].setdefault(what, []).append(figure)
    return figures


def row(name: str, unit: str, ours: list[float], peer: list[float], against: str) -> Row:
    """Compare the medians."""
    value, peer_value = statistics.median(ours), statistics.median(peer)
    return Row(name, value, unit, peer_value, value / peer_value, against, _spread(ours))


def _spread(figures: list[float]) -> float:
    lower, middle, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return (upper - lower) / 2 / middle


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    """Print each as soon as it is there."""
    for one in rows:
        if as_json:
            print(json.dumps(asdict(one)), flush=True)
        else:
            print(
                f"{one.name}, {one.value:.4g} ±{100 * one.spread:.0f} %, {one.unit}, "
                f"{one.against}: {one.peer:.4g}, {one.ratio:.2f}",
                flush=True,
            )


def skipped(what: str, module: str) -> None:
    """Say why a peer has no row."""
    print(f"# {what} is left out: {module} is not installed (pip install 'tidegate[bench]')")
