"""Which engine gets the next turn? The least loaded, found without looking at all of them.

It knows names and loads; not what an engine is, nor what a load is made of.
"""

import heapq

ENTRIES_PER_NAME = 4
"""The heap keeps outdated entries until they come up; beyond this many it is made anew, which so
costs a constant per change."""


class LeastLoaded:
    """Names by load. Of equal loads the first by name, so that the same history routes the same."""

    def __init__(self) -> None:
        self._loads: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """An entry counts while its load is the name's; each name has at least one that does."""

    def set(self, name: str, load: float) -> None:
        """This name may be chosen, and has this load now."""
        self._loads[name] = load
        heapq.heappush(self._heap, (load, name))
        if len(self._heap) > ENTRIES_PER_NAME * len(self._loads) + 16:
            self._heap = [(load, name) for name, load in self._loads.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        """This name may not be chosen any more; nothing happens if it couldn't be."""
        self._loads.pop(name, None)

    def least(self) -> str | None:
        """The least loaded name; None if there is none."""
        heap = self._heap
        while heap:
            load, name = heap[0]
            if self._loads.get(name) == load:
                return name
            heapq.heappop(heap)
        return None
