"""Escaping of control characters in untrusted text, before a log, table or terminal shows it.

Model output, tasks, error texts and peer names may hold escape sequences that move a terminal's
cursor, set its title or clear earlier output.
"""

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""C0 and C1 controls, line and paragraph separators, bidirectional marks, and surrogates."""


def printable(text: str, *, keeps: str = "") -> str:
    """Return ``text`` with control characters as Python escapes: ``\\x1b``, ``\\u202e``.

    Characters in ``keeps`` are not escaped, for example the newline in multi-line text.
    """

    def escaped(match: re.Match[str]) -> str:
        return match[0] if match[0] in keeps else match[0].encode("unicode_escape").decode()

    return CONTROLS.sub(escaped, text)


def printable_values(value: Any) -> Any:
    """Apply :func:`printable` to every string in plain data, including keys."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(each) for key, each in value.items()}
    return [printable_values(each) for each in value] if isinstance(value, list | tuple) else value


def print_stderr(text: str) -> None:
    """Write a line to standard error, escaped."""
    sys.stderr.write(printable(text) + "\n")


class EscapeControls(logging.Filter):
    """Logging filter that escapes control characters in log arguments and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record in place; return True always."""
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
