"""How do the benchmarks that hold a run to its promises say what they found?"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    limit: str = ""
    """What must hold; empty where it is only told."""
    holds: bool = True


def show(table: Sequence[Row], *, as_json: bool) -> int:
    """Print the table; the exit status: 1 if something does not hold."""
    for row in table:
        if as_json:
            print(json.dumps(asdict(row)))
        else:
            verdict = ("holds" if row.holds else "DOES NOT HOLD") if row.limit else ""
            print(f"{row.name}, {row.value:.4g}, {row.unit}, {row.limit}, {verdict}")
    return 0 if all(row.holds for row in table) else 1
