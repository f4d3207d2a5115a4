"""Alternating measurements of ours and a peer in one run, so that a busy machine slows both.

The other modules of this folder use it; standard library only. A row's value is the median of its
runs; its spread, half the interquartile range as a share of the median.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

RUNS = 5

Measure = Callable[[], Mapping[str, float]]
"""One run; returns its figures by name."""


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
    """Name of the peer."""
    spread: float
    """Spread of our value."""


def by_turns(
    measures: Mapping[str, Measure], *, runs: int = RUNS
) -> dict[str, dict[str, list[float]]]:
    """Run all alternately; return each measure's figures by name, one per run."""
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
    """Print each row as soon as it is measured."""
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
    """Print why a peer has no row."""
    print(f"# {what} is omitted: {module} is not installed (pip install 'tidegate[bench]')")
