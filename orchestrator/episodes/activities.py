"""Seconds that all episodes of a run spent in named activities: environments, tools, scoring.

The episode runner counts them; :class:`RunStatistics` shows them as ``episode_activity_s``.
Generation is not counted here. The clock is an argument.
"""

from collections import Counter
from collections.abc import Callable

ENVIRONMENT = "environment"
SCORE = "score"
TOOL = "tool"
"""Prefix of a tool's own name."""

NAMES_MAX = 64
"""Most distinct names, because each is a metric series; further names count as ``others``."""
OTHER_ACTIVITIES = "others"


class Activities:
    """Seconds by activity. Several episodes in one activity at once each count their own time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        """Seconds of ended activities, minus the start times of running ones."""

    def begin(self, name: str) -> str:
        """Start an activity of one episode; return the name to pass to :meth:`end`.

        Raises:
            TypeError: the name is not a string.
        """
        if not isinstance(name, str):  # names are sorted in seconds()
            raise TypeError(f"an activity's name must be a str such as 'reward', got {name!r:.80}")
        if name not in self._seconds and len(self._seconds) >= NAMES_MAX:
            name = OTHER_ACTIVITIES
        self._seconds[name] = self._seconds.get(name, 0.0) - self._now_s()
        self._running[name] += 1
        return name

    def end(self, name: str) -> None:
        """End an activity of one episode."""
        self._seconds[name] += self._now_s()
        self._running[name] -= 1

    def seconds(self) -> dict[str, float]:
        """Return the seconds by activity up to now, running activities included."""
        # After the run no activity is running, and the loop's clock is gone.
        now_s = self._now_s() if any(self._running.values()) else 0.0
        return {
            name: max(0.0, seconds + self._running[name] * now_s)
            for name, seconds in sorted(self._seconds.items())
        }
