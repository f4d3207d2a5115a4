"""Thresholds of Python's garbage collector while runs are active, restored afterwards.

A run holds :data:`GC_TUNING` for its duration. Python has one collector per process, so the last
run to end restores the thresholds that the first one found. Rollouts leave no reference cycles
behind, except the rows of a forked rollout, which refer to each other. So frequent collections find
little: with Python's defaults a run does 0.59 of the rollouts per CPU-second in process, and 0.60
over the wire (``benchmarks.orchestrator``, medians of 5 pairs). What keeps something large, such as
a request's body, must not be in a cycle: ``tests/reference_cycles.py`` finds those.
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
"""Threshold per rollout that may be outstanding, if larger in total: half of the rollouts have as
many objects. At 100,000 rollouts collections took an eighth of the CPU time, up to 0.3 s each."""

YOUNG_OBJECTS_CEILING = 2_000_000
"""Maximum threshold, so that cycles made by users' code are collected eventually."""


class GcTuning:
    """Raises Python's GC thresholds while runs are active, and restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_thresholds: list[int] = []
        """Threshold of each active run."""
        self._found = gc.get_threshold()
        """Thresholds before the first run."""
        self._set = self._found
        """Thresholds that this object set last."""

    @contextlib.contextmanager
    def during(self, young_objects: int) -> Iterator[None]:
        """Raise the youngest generation's threshold while a run is active; the highest of all runs
        holds.

        A full collection visits all objects of imported modules: with torch some 100 ms, in which
        no rollout advances. Objects that exist when a run begins hardly ever become garbage, so
        they are frozen until the last run ends.
        """
        with self._lock:
            if not self._run_thresholds:
                self._found = self._set = gc.get_threshold()
            self._run_thresholds.append(young_objects)
            gc.freeze()
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._run_thresholds.remove(young_objects)
                self._apply()
                if not self._run_thresholds:
                    gc.unfreeze()

    def _apply(self) -> None:
        """Set the threshold, unless other code has changed it, or collection is off (0)."""
        if gc.get_threshold() != self._set or not self._found[0]:
            return
        gc.set_threshold(max([self._found[0], *self._run_thresholds]), *self._found[1:])
        self._set = gc.get_threshold()


GC_TUNING = GcTuning()
"""The only instance, because there is one collector per process."""


def young_objects_max(rollouts: int) -> int:
    """Return the threshold for a run with so many outstanding rollouts."""
    threshold = YOUNG_OBJECTS_PER_ROLLOUT * rollouts
    return min(max(YOUNG_OBJECTS_MIN, threshold), YOUNG_OBJECTS_CEILING)
