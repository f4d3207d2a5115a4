"""How does a machine read the log? One JSON object a line, with the fields that the words name.

What is logged says ``engine=%s lost: %s``; so ``engine`` is a field. It reads that off each record
and adds nothing to what is logged, or when.
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
    r"%%|(?:(?P<name>\b[a-z_]+)=)?%[-#0 +]*(?:\d+)?(?:\.\d+)?[a-zA-Z]"
    r"|(?P<word>\b[a-z_]+)=(?P<said>\w+)"
)
"""Of a format: each argument with its name, if it has one, and names whose value is written out."""

OWN = frozenset({"time", "level", "run", "message", "error"})


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, run, message, and its fields.

    Fields are ``rollout``, ``engine``, ``version``, ``stuck`` and whatever else a message names.
    Times are in UTC. What a field can't be in JSON is told as text.
    """

    def __init__(self, run: str = "") -> None:
        """``run`` is on every line, to tell the runs of one log from each other."""
        super().__init__()
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever was logged."""
        args = getattr(record, "unescaped_args", None)
        if args is not None:  # JSON has escapes of its own
            record = copy.copy(record)
            record.args = args
        told_at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": told_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
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
        except UnicodeEncodeError:  # of file names that are no text, Python makes such strings
            told = {name: _escaped(value) for name, value in line.items()}
            return _safe(msgspec.json.encode(told, enc_hook=str).decode())


def log_as_json(run: str = "", stream: IO[str] | None = None) -> logging.Handler:
    """Have all that Tidegate logs written as JSON lines, to standard error if left out.

    The handler is that of the logger ``tidegate``, which passes nothing on to others from now on.
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
    """By name; nothing of a message that names none."""
    if not isinstance(record.msg, str):
        return {}
    values = iter(record.args if isinstance(record.args, tuple) else ())
    found: dict[str, Any] = {}
    for match in _FIELD.finditer(record.msg):
        if match[0] == "%%":
            continue
        if match["word"] is not None:
            found[match["word"]] = match["said"]
            continue
        value = next(values, None)
        if match["name"] is not None:
            found[match["name"]] = _plain(value)
    return found


def _safe(line: str) -> str:
    """Escape what JSON need not: a terminal may show the line."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def _plain(value: object) -> object:
    """Infinity and NaN become null in JSON: as text they say what they are."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(value: object) -> object:
    if isinstance(value, int | float | None):
        return value
    return str(value).encode(errors="backslashreplace").decode()
