"""Rows of figures beside a peer's: measured by turns, and printed as they come.

Ours and the peer run alternately, so that a busy machine slows both.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

ERROR_CHARACTERS = 2000
"""Length of the part of a process's errors that is shown."""

Figures = dict[str, float]
"""Figures of one run, by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    """The peer's value, in the same unit and run; None if there is no peer, or it was not run."""
    ratio: float | None = None
    """Ours over the peer's."""

    def text(self) -> str:
        """Return the row for people."""
        peer = "-" if self.peer is None else f"{self.peer:.4g}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return f"{self.name}, {self.value:.4g}, {self.unit}, {peer}, {ratio}"


@dataclass(frozen=True, slots=True)
class SpreadRow(Row):
    """A median beside one of several peers, with its spread."""

    against: str = ""
    """Name of the peer."""
    spread: float = 0.0
    """Half the interquartile range of our value, as a share of the median."""

    def text(self) -> str:
        """Return the row for people."""
        return (
            f"{self.name}, {self.value:.4g} ±{100 * self.spread:.0f} %, {self.unit}, "
            f"{self.against}: {self.peer:.4g}, {self.ratio:.2f}"
        )


def compared(name: str, unit: str, value: float, peer: float | None) -> Row:
    """Return a row with its ratio."""
    return Row(name, value, unit, peer, value / peer if peer else None)


def spread_row(
    name: str, unit: str, ours: Sequence[float], peer: Sequence[float], against: str
) -> Row:
    """Return a row that compares the medians of several runs."""
    value, peer_value = statistics.median(ours), statistics.median(peer)
    lower, middle, upper = statistics.quantiles(ours, n=4, method="inclusive")
    spread = (upper - lower) / 2 / middle
    return SpreadRow(name, value, unit, peer_value, value / peer_value, against, spread)


def by_turns(
    measures: Mapping[str, Callable[[], Mapping[str, float]]], *, runs: int = 5
) -> dict[str, dict[str, list[float]]]:
    """Run all alternately; return each measure's figures by name, one per run."""
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in measures}
    for _ in range(runs):
        for name, measure in measures.items():
            for what, figure in measure().items():
                figures[name].setdefault(what, []).append(figure)
    return figures


def medians(runs: int, *measures: Callable[[], float]) -> list[float]:
    """Run all alternately; return the median of each."""
    taken = [[measure() for measure in measures] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def sample(
    command: Sequence[str],
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Figures:
    """Run a process, on one thread, that prints its figures as JSON in its last line.

    Raises:
        RuntimeError: the process failed.
        TimeoutExpired: it took too long, and was killed.
    """
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **threads, **(environment or {})},
        timeout=timeout_s,
    )
    if done.returncode:
        errors = done.stderr[-ERROR_CHARACTERS:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{errors}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    """Print rows as they are measured, because the next one may take minutes."""
    for row in rows:
        print(json.dumps(asdict(row)) if as_json else row.text(), flush=True)


def print_figures(row: Mapping[str, object], *, as_json: bool) -> None:
    """Print a row of named figures."""
    text = ", ".join(f"{name} {figure}" for name, figure in row.items())
    print(json.dumps(row, ensure_ascii=False) if as_json else text, flush=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``--json``, to which a benchmark adds options of its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    return parser


def main(description: str | None, rows: Callable[[], Iterable[Row]]) -> None:
    """Run a benchmark whose only option is ``--json``."""
    show(rows(), as_json=make_parser(description).parse_args().json)
