"""What does a Ray actor do to be an engine? It runs the worker's program, and tells how it ended.

It imports neither Ray nor the engine: Ray makes an actor of this class, and the worker is a program
known by its name.
"""

import contextlib
import importlib
import io
import os
import sys
from typing import Any

from tidegate.orchestrator.fleet.processes import LOG_LINES_SHOWN, WORKER
from tidegate.transport.security import EngineKeys

DEFECT = 1
"""The worker's exit status when it failed itself; a fresh process may do better."""


class RayEngine:
    """One engine, in the process that Ray made for it."""

    def __init__(self, arguments: list[str], keys: EngineKeys | None) -> None:
        """What the worker is told. Keys come this way, and touch no disk."""
        self._arguments = arguments
        self._keys = keys

    def serve(self) -> tuple[int, str]:
        """Be an engine until it ends; its exit status, and what it said last.

        After a :data:`DEFECT` this process is to be ended: what it has in memory is in doubt.
        """
        worker: Any = importlib.import_module(WORKER)
        said = _Tail(sys.stderr)
        with contextlib.redirect_stderr(said):
            status = int(worker.main(self._arguments, self._keys))
        return status, said.last_words()

    def pid(self) -> int:
        """Of this process. Answers while it serves."""
        return os.getpid()


class _Tail(io.TextIOBase):
    """Passes text on, and remembers the end of it."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._end = ""

    def write(self, text: str) -> int:
        self._end = (self._end + text)[-4096:]
        self._target.write(text)  # Ray's own stderr doesn't say how much it wrote
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def last_words(self) -> str:
        lines = self._end.splitlines()[-LOG_LINES_SHOWN:]
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return "\n  ".join(lines)
