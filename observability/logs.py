"""JSON log formatter: one object per line, with fields taken from the format string.

Users call :func:`log_as_json`, which installs it on the logger ``tidegate``. Log calls are
``key=value`` formats such as ``engine=%s lost: %s``; their keys become JSON fields, here
``engine``.
"""

import copy
import logging
import math
import re
import sys
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

from tidegate.transport.printable import CONTROLS

_FIELD = re.compile(
    r"%%|(?:(?P<name>\b[a-z_][a-z0-9_]*)=)?%[-#0 +]*(?:\d+)?(?:\.\d+)?[a-zA-Z]"
    r"|(?P<literal_name>\b[a-z_][a-z0-9_]*)=(?P<literal>\w+)"
)
"""Matches each ``%`` argument of a format string, with its key if any, and each ``key=word``."""

OWN = frozenset({"time", "level", "run", "message", "error"})
"""Keys that every line sets itself; a field of the same name is dropped."""


class JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time, level, run, message, and the message's fields.

    Fields are ``rollout``, ``engine``, ``version``, ``stuck`` and any other key of a format string.
    A value that JSON can't hold is written as its ``str``.
    """

    def __init__(self, run: str = "") -> None:
        """``run``, if not empty, is on every line, to distinguish the runs in one log."""
        super().__init__()
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        args = getattr(record, "unescaped_args", None)
        if args is not None:  # JSON has escapes of its own
            record = copy.copy(record)
            record.args = args
        logged_at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": logged_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        if self._run:
            line["run"] = self._run
        fields = {name: value for name, value in _fields(record).items() if name not in OWN}
        line |= {**fields, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return _safe(msgspec.json.encode(line, enc_hook=str).decode())
        except (
            UnicodeEncodeError
        ):  # lone surrogates, as Python decodes file names that are not UTF-8
            escaped = {name: _escaped(value) for name, value in line.items()}
            return _safe(msgspec.json.encode(escaped, enc_hook=str).decode())


def log_as_json(run: str = "", stream: IO[str] | None = None) -> logging.Handler:
    """Write all that Tidegate logs as JSON lines to ``stream``, or to standard error if None.

    Replaces the handlers of the logger ``tidegate`` and stops its propagation. Returns the new
    handler.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(run))
    logger = logging.getLogger("tidegate")
    logger.handlers[:] = [handler]
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return handler


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the record's fields by key; empty if its message is no format string."""
    if not isinstance(record.msg, str):
        return {}
    values = iter(record.args if isinstance(record.args, tuple) else ())
    found: dict[str, Any] = {}
    for match in _FIELD.finditer(record.msg):
        if match[0] == "%%":
            continue
        if match["literal_name"] is not None:
            found[match["literal_name"]] = match["literal"]
            continue
        value = next(values, None)
        if match["name"] is not None:
            found[match["name"]] = _plain(value)
    return found


def _safe(line: str) -> str:
    """Escape control characters that JSON allows, because a terminal may show the line."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def _plain(value: object) -> object:
    """Return infinity and NaN as text, because msgspec encodes both as null."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(value: object) -> object:
    if isinstance(value, int | float | None):
        return value
    return str(value).encode(errors="backslashreplace").decode()
