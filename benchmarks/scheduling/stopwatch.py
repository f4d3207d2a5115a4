"""How much of a process's time goes to what it only simulates? The rest is the orchestrator's own.

By the wall clock, which costs nothing to read; so other work on the machine makes all of it longer.
"""

import time


class Stopwatch:
    """Adds up the time of everything run ``with`` it. It can't be entered twice at once."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._since_s
