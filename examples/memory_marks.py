"""How much memory do trainer and engines take together, at the most, in each phase of a step?

Counts the anonymous pages of this process and all it has started, by sampling: a peak shorter than
the pause between two looks may be missed. It knows nothing of what the memory is for.
"""

import mmap
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_EVERY_S = 0.02
"""A look takes about 0.1 ms for three processes, and a train step some tenths of a second."""


class MemoryMarks:
    """High-water marks, by phase; use it in ``with``, and say when a phase begins."""

    def __init__(self) -> None:
        self._phase = ""
        self._marks: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-marks", daemon=True)

    def begin(self, phase: str) -> None:
        """From now on, marks are of this phase."""
        self._phase = phase
        self._look()

    @property
    def megabytes(self) -> dict[str, int]:
        """The marks so far."""
        return {phase: -(-marked // 2**20) for phase, marked in self._marks.items() if phase}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        phase = self._phase
        taken = sum(anonymous_bytes(pid) for pid in family(os.getpid()))
        self._marks[phase] = max(self._marks.get(phase, 0), taken)


def family(pid: int) -> list[int]:
    """A process, and all that it and those have started."""
    found = [pid]
    for parent in found:
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
            children = " ".join((thread / "children").read_text() for thread in threads)
        except OSError:  # it has just ended
            continue
        found += map(int, children.split())
    return found


def anonymous_bytes(pid: int) -> int:
    """What a process has of its own: resident pages but for those of files; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
