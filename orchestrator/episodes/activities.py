"""How much of all episodes' time went to what isn't generating: environments, tools, rewards?

Added up by name, over the episodes of a run; it knows clocks and names, and no episode.
"""

from collections import Counter
from collections.abc import Callable

ENVIRONMENT = "environment"
SCORE = "score"
TOOL = "tool"
"""Before a tool's own name."""

NAMES_MAX = 64
"""Told apart: each is a series to whoever watches. What has another name counts as ``others``."""
OTHERS = "others"


class Activities:
    """Seconds by name. What goes on in several episodes at once counts for each of them."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._going_on: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        """Of what has ended; less the beginnings of what goes on."""

    def begin(self, name: str) -> str:
        """An episode is at it from now on; the name that :meth:`end` is to be given.

        Raises:
            TypeError: the name is no text.
        """
        if not isinstance(name, str):  # it would be sorted among others' at each look
            raise TypeError(f"what an episode does has a name, such as 'reward', not {name!r:.80}")
        if name not in self._seconds and len(self._seconds) >= NAMES_MAX:
            name = OTHERS
        self._seconds[name] = self._seconds.get(name, 0.0) - self._now_s()
        self._going_on[name] += 1
        return name

    def end(self, name: str) -> None:
        """It is at it no more."""
        self._seconds[name] += self._now_s()
        self._going_on[name] -= 1

    def seconds(self) -> dict[str, float]:
        """Up to now, what goes on included."""
        # A run that is over has no clock any more, and nothing that goes on.
        now_s = self._now_s() if any(self._going_on.values()) else 0.0
        return {
            name: max(0.0, seconds + self._going_on[name] * now_s)
            for name, seconds in sorted(self._seconds.items())
        }
