"""How much of a process's time goes to what it only simulates? The rest is the orchestrator's own.

Both by the wall clock: to ask for CPU time is a system call, and costs more than what is timed
here. So other work on the machine makes both longer, and neither looks better than it is.
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
