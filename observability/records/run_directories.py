"""Directories of one run: its own, and ``part-1``, ``part-2``, … of the processes that resumed it.

Also reads the JSON files in them, with errors that name the file. Each process records into a
directory of its own, so that nothing written before a crash is touched.
"""

import hashlib
import itertools
import json
import urllib.parse
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.transport.regular_files import read_regular

RUN_FILE = "run.json"

ADAPTERS = "adapters"
"""Directory within a run's directory: it has the records of each trained adapter, as of a run.
Within ``weights`` the directory of this name has the versions of the other adapters."""

NAME_CHARACTERS_MAX = 200
"""Characters of an escaped name; file systems take 255."""


def directory_name(name: str) -> str:
    """Return the name of the directory that has something of an adapter, whose name is any text."""
    escaped = urllib.parse.quote(name, safe=" :@+,=")
    if escaped.startswith("."):
        escaped = f"%2E{escaped[1:]}"
    if len(escaped) > NAME_CHARACTERS_MAX:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        escaped = f"{escaped[:NAME_CHARACTERS_MAX]}-{digest}"
    return escaped


def next_part(directory: Path) -> Path:
    """Return the directory, inside a run's, of the next process that records the run."""
    parts = (directory / f"part-{number}" for number in itertools.count(1))
    return next(part for part in parts if not part.exists())


def adapter_directories(directory: Path) -> list[Path]:
    """Return the directories of a run's trained adapters, by name."""
    return sorted(path.parent for path in (directory / ADAPTERS).glob(f"*/{RUN_FILE}"))


def process_directories(directory: Path) -> list[Path]:
    """Return the directories of a run's processes, oldest first; of a ``part-N``, only itself."""
    parts = [path for path in directory.glob("part-*") if path.name[5:].isdecimal()]
    return [directory, *sorted(parts, key=lambda path: int(path.name[5:]))]


def is_part(directory: Path) -> bool:
    """Return whether this is the directory of a process that resumed a run."""
    return directory.name.startswith("part-") and (directory.parent / RUN_FILE).exists()


def read_run_file(directory: Path) -> dict[str, Any]:
    """Read the ``run.json`` of one process.

    Raises:
        AuditError: the file is missing or damaged.
    """
    return read_json(Path(directory) / RUN_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """Read one of a run's JSON files.

    Raises:
        AuditError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        body = json.loads(read_regular(path))
    except FileNotFoundError:
        raise AuditError(f"{path} is missing; give the directory of a recorded run") from None
    except (OSError, ValueError) as error:
        raise AuditError(f"{path} can't be read: {error}") from error
    if not isinstance(body, dict):
        raise AuditError(
            f"{path} must hold a JSON object, as Tidegate writes it, and holds "
            f"{type(body).__name__} {body!r:.80}; give the directory of a recorded run"
        )
    return body


def read_json_lines(path: Path, *, stops_at_damage: bool = False) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; a last line that a crash cut short is omitted.

    ``stops_at_damage``: at a line that can't be read, return the lines before it.

    Raises:
        AuditError: the file is missing, or a complete line can't be read.
    """
    lines: list[dict[str, Any]] = []
    try:
        *whole, _ = read_regular(path).decode(errors="replace").split("\n")
        for number, line in enumerate(whole, start=1):
            if not line.strip():
                continue
            read = json.loads(line)
            if isinstance(read, dict):
                lines.append(read)
            elif not stops_at_damage:
                raise ValueError(
                    f"line {number} must hold a JSON object, as Tidegate writes it, and holds "
                    f"{read!r:.80}"
                )
    except (OSError, ValueError) as error:
        if not stops_at_damage:
            raise AuditError(f"{path} can't be read: {error}") from error
    return lines


def has_ended(run: dict[str, Any]) -> bool:
    """Return whether the process that wrote this ``run.json`` closed its files, and was not killed.

    Files older than the field ``is_final`` have statistics only if the process ended.
    """
    return bool(run.get("is_final", run.get("statistics") is not None))
