"""Result table of the tests that run for long, with an exit status."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    limit: str = ""
    """Condition that must hold; empty if the value is only reported."""
    holds: bool = True


def show(table: Sequence[Row], *, as_json: bool) -> int:
    """Print the table; return exit status 1 if any condition fails."""
    for row in table:
        if as_json:
            line = json.dumps(asdict(row))
        else:
            verdict = ("holds" if row.holds else "DOES NOT HOLD") if row.limit else ""
            line = f"{row.name}, {row.value:.4g}, {row.unit}, {row.limit}, {verdict}"
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    return 0 if all(row.holds for row in table) else 1
