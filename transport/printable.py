"""Escaping of control characters in text of others, before a log, a table or a terminal shows it.

Model output, task text, error texts and the names that peers give themselves may hold escape
sequences, which move a terminal's cursor, set its title or clear what was written before.
"""

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""C0 and C1 controls, separators of lines, marks that reverse the order of text, and surrogates."""


def printable(text: str, *, keeps: str = "") -> str:
    """Return ``text`` with control characters as Python writes them: ``\\x1b``, ``\\u202e``.

    Characters in ``keeps`` stay: a newline, where lines are wanted.
    """

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0] in keeps else found[0].encode("unicode_escape").decode()

    return CONTROLS.sub(escaped, text)


def printable_values(value: Any) -> Any:
    """Return plain data with :func:`printable` applied to each string, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(each) for key, each in value.items()}
    return [printable_values(each) for each in value] if isinstance(value, list | tuple) else value


def say(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(printable(text) + "\n")


class EscapeControls(logging.Filter):
    """Escapes control characters in the arguments of log records, and in their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record in place; never leave one out."""
        if isinstance(record.args, tuple):
            escaped = tuple(map(_escaped, record.args))
            if escaped != record.args:
                record.unescaped_args = record.args  # for formatters that escape by themselves
                record.args = escaped
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = printable(text, keeps="\n\t")
        return True


def _escaped(value: object) -> object:
    if isinstance(value, int | float | None):
        return value
    text = str(value)
    safe = printable(text)
    return value if safe == text else safe
