"""How often is garbage looked for while runs go on? Rarely, for rollouts leave none behind.

Without it a run does .59 of the rollouts per CPU-second in process, and .60 over the wire
(``benchmarks.orchestrator``, medians of 5 pairs).

Python has one collector per process, which the trainer and other runs use too: what the first run
finds is what the last one leaves. It knows nothing of what is done meanwhile.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

YOUNG_OBJECTS_MIN = 50_000
"""More objects made than let go, and garbage is looked for: 2 ms of looking. Rollouts are let go
without it, so what is looked at in vain, each time that a batch of them begins, are those that run.
Python's own 700 made that a sixth of all that a rollout cost."""

YOUNG_OBJECTS_PER_ROLLOUT = 10
"""Or so many for each rollout that may be outstanding, if that is more: as many as are made of half
of them. With 100,000 that took an eighth of what they cost, and 0.3 s at a time now and then."""

YOUNG_OBJECTS_CEILING = 2_000_000
"""However many those are: what users' code leaves behind in cycles is to be found at some time."""


class RareLooks:
    """What the runs of a process want of its collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        """By each run that goes on: objects more made than let go before garbage is looked for."""
        self._found = gc.get_threshold()
        """Before the first of them."""
        self._set = self._found
        """By them, last."""

    @contextlib.contextmanager
    def during(self, young_objects: int) -> Iterator[None]:
        """Look no sooner than that; with several runs at once, as the one that wants most.

        A full collection looks at all that torch brought, some 100 ms in which no rollout gets on.
        What there is by now hardly ever becomes garbage; so it is set aside till the end.
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
        """Change nothing that somebody else has set meanwhile, nor where none is looked for (0)."""
        if gc.get_threshold() != self._set or not self._found[0]:
            return
        gc.set_threshold(max([self._found[0], *self._wanted]), *self._found[1:])
        self._set = gc.get_threshold()


RARE_LOOKS = RareLooks()
"""One, as there is one collector."""


def young_objects_max(rollouts: int) -> int:
    """How many objects more may be made than let go, where so many rollouts may be outstanding."""
    wanted = YOUNG_OBJECTS_PER_ROLLOUT * rollouts
    return min(max(YOUNG_OBJECTS_MIN, wanted), YOUNG_OBJECTS_CEILING)
