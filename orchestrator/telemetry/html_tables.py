"""HTML tables of a few figures, for notebooks: ``_repr_html_`` of runs and batches."""

from collections.abc import Mapping
from html import escape

from tidegate.transport.printable import printable


def html_table(title: str, figures: Mapping[str, object]) -> str:
    """Return a table of two columns, with everything in it escaped."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{_cell(name)}</th>"
        f"<td style='text-align:left'>{_cell(value)}</td></tr>"
        for name, value in figures.items()
    )
    return f"<table><caption>{_cell(title)}</caption>{rows}</table>"


def line(title: str, figures: Mapping[str, object]) -> str:
    """Return the same as one line, ``Batch(number 3, rollouts 128)``, for ``__repr__``."""
    return f"{title}({', '.join(f'{name} {value}' for name, value in figures.items())})"


def _cell(value: object) -> str:
    return escape(printable(str(value)))
