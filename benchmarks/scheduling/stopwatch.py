"""Stopwatch of the time spent in simulated parts; the rest is the orchestrator's.

``run.py`` uses it. It reads the wall clock, which is cheap, so other work on the machine lengthens
everything.
"""

import time


class Stopwatch:
    """Adds up the time spent in ``with`` blocks; not reentrant."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._since_s
