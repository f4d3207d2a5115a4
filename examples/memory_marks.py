"""Peak memory of a process tree by phase, sampled from /proc, for trainer and engines together.

The training loop of ``grpo`` uses it; standard library only. It counts anonymous pages; a peak
shorter than the sampling interval may be missed.
"""

import mmap
import os
import threading
from pathlib import Path
from typing import Self

SAMPLING_INTERVAL_S = 0.02
"""Interval between two samples. A sample of three processes takes about 0.1 ms, and a train step
some tenths of a second."""


class MemoryMarks:
    """High-water marks by phase; a context manager, with :meth:`begin` at each phase."""

    def __init__(self) -> None:
        self._phase = ""
        self._marks: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-marks", daemon=True)

    def begin(self, phase: str) -> None:
        """Start a phase."""
        self._phase = phase
        self._sample()

    @property
    def megabytes(self) -> dict[str, int]:
        """Peak memory of each phase so far, in MiB."""
        return {phase: -(-marked // 2**20) for phase, marked in self._marks.items() if phase}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLING_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        phase = self._phase
        used_bytes = sum(anonymous_bytes(pid) for pid in process_tree(os.getpid()))
        self._marks[phase] = max(self._marks.get(phase, 0), used_bytes)


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
            children = " ".join((thread / "children").read_text() for thread in threads)
        except OSError:  # the process has just ended
            continue
        found += map(int, children.split())
    return found


def anonymous_bytes(pid: int) -> int:
    """Return a process's resident bytes without file-backed pages; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
