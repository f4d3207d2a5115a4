"""Thresholds of Python's garbage collector while runs are active, restored afterwards.

Without it a run does .59 of the rollouts per CPU-second in process, and .60 over the wire
(``benchmarks.orchestrator``, medians of 5 pairs).

A run enters :data:`RARE_LOOKS` for its duration. Python has one collector per process, which the
trainer and other runs use too: the thresholds that the first run found are set again by the last.
Rollouts leave no cycles behind, so frequent collections would be in vain.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

YOUNG_OBJECTS_MIN = 50_000
"""Smallest threshold of the youngest generation (allocations minus deallocations); one collection
then takes 2 ms. Rollouts are freed without the collector, so each collection only visits running
ones. With Python's default of 700, collecting was a sixth of all CPU time that a rollout cost."""

YOUNG_OBJECTS_PER_ROLLOUT = 10
"""Threshold for each rollout that may be outstanding, if that is more: half of them have as many
objects. At 100,000 rollouts collecting took an eighth of their CPU time, and up to 0.3 s at a
time."""

YOUNG_OBJECTS_CEILING = 2_000_000
"""Maximum of the threshold, so that cycles of users' code are found at some time."""


class GcTuning:
    """GC thresholds of a process, while runs are active in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        """Threshold wanted by each active run."""
        self._found = gc.get_threshold()
        """Thresholds before the first run."""
        self._set = self._found
        """Thresholds that this object set last."""

    @contextlib.contextmanager
    def during(self, young_objects: int) -> Iterator[None]:
        """Raise the youngest generation's threshold while a run is active; the highest of all runs
        holds.

        A full collection visits all objects that torch brought, some 100 ms in which no rollout
        advances. Objects that exist by now hardly ever become garbage, so they are frozen until the
        last run ends.
        """
        with self._lock:
            if not self._wanted:
                self._found = self._set = gc.get_threshold()
            self._wanted.append(young_objects)
            gc.freeze()
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(young_objects)
                self._apply()
                if not self._wanted:
                    gc.unfreeze()

    def _apply(self) -> None:
        """Set the threshold, unless other code has changed it, or collection is off (0)."""
        if gc.get_threshold() != self._set or not self._found[0]:
            return
        gc.set_threshold(max([self._found[0], *self._wanted]), *self._found[1:])
        self._set = gc.get_threshold()


RARE_LOOKS = GcTuning()
"""The only instance, because there is one collector per process."""


def young_objects_max(rollouts: int) -> int:
    """Return the threshold for a run with so many outstanding rollouts."""
    wanted = YOUNG_OBJECTS_PER_ROLLOUT * rollouts
    return min(max(YOUNG_OBJECTS_MIN, wanted), YOUNG_OBJECTS_CEILING)
