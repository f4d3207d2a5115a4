"""Result table of the benchmarks that compare with a peer.

Most benchmark modules print their :class:`Row` objects by it. Standard library only.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    """The peer's value, in the same unit and run; None if there is no peer, or it was not run."""
    ratio: float | None = None
    """Ours over the peer's."""


def compared(name: str, unit: str, value: float, peer: float | None) -> Row:
    """Return a row with its ratio."""
    return Row(name, value, unit, peer, value / peer if peer else None)


def show(rows: Iterable[Row], *, as_json: bool) -> None:
    """Print rows as they are measured, because the next one may take minutes."""
    for row in rows:
        print(json.dumps(asdict(row)) if as_json else _text(row), flush=True)


def _text(row: Row) -> str:
    peer = "-" if row.peer is None else f"{row.peer:.4g}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return f"{row.name}, {row.value:.4g}, {row.unit}, {peer}, {ratio}"
