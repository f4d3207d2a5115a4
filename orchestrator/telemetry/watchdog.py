"""Watchdog: remembers how far things have come, and names those without progress for too long.

:class:`RunWatch` feeds it, and :class:`RunStatistics` shows its findings, as well as those of
:class:`LoopWatch`. Time is an argument.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

What = Literal["engine", "turn", "episode", "publish", "trainer", "tasks", "loop", "memory"]

STUCK_MAX = 100
"""Findings kept at a time, the longest first; further ones are alike."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """One thing that has made no progress for longer than it should take."""

    what: What
    """Kind. ``engine``: it makes no step. ``turn``: it gets no token. ``episode``: the user's code
    neither asks for a turn nor returns. ``publish``: engines don't take new weights. ``trainer``:
    everything waits for it to publish. ``tasks``: the user's iterator gives none. ``loop``: the
    user's code blocks the run's event loop. ``memory``: ended episodes are still referenced."""
    who: str
    where: str
    waited_s: float

    def __str__(self) -> str:
        return f"{self.who} ({self.what}) has not got on for {self.waited_s:.0f} s: {self.where}"


class _Seen:
    """Progress of a thing, and since when it has not changed."""

    __slots__ = ("progress", "since_s")

    def __init__(self, progress: Hashable, since_s: float) -> None:
        self.progress = progress
        self.since_s = since_s


_Key = tuple[What, int | str]


class Watchdog:
    """Checks things in rounds: :meth:`begin`, :meth:`is_stuck` for each, :meth:`end`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._now_s = 0.0
        """When this round began."""
        self._before: dict[_Key, _Seen] = {}
        """Progress as of the last round."""
        self._seen: dict[_Key, _Seen] = {}
        """Progress as of this round, so far."""
        self._found: dict[_Key, Stuck] = {}
        """Things found stuck in this round."""
        self._named: set[_Key] = set()
        """Things found stuck in the last complete round."""
        self.stuck: tuple[Stuck, ...] = ()
        """Findings of the last complete round, the longest first."""

    def begin(self, now_s: float) -> None:
        """Begin a round; things not checked in it are forgotten."""
        self._now_s = now_s
        self._before, self._seen, self._found = self._seen, {}, {}

    def is_stuck(
        self, what: What, who: int | str, progress: Hashable, patience: float = 1.0
    ) -> bool:
        """Note one thing's progress; return whether it is stuck. If so, call :meth:`name`.

        ``who`` is unique within its kind; a rollout's is its number. ``progress`` is a value that
        differs whenever the thing has advanced. ``patience`` is a factor of the allowed time.

        Called once per rollout and round, of which there may be a hundred thousand.
        """
        key = (what, who)
        seen = self._before.get(key)
        if seen is None or seen.progress != progress:
            seen = _Seen(progress, self._now_s)
        self._seen[key] = seen
        return self._now_s - seen.since_s >= self._patience_s * patience

    def name(self, what: What, who: int | str, where: str) -> None:
        """Add a finding to this round."""
        waited_s = self._now_s - self._seen[what, who].since_s
        name = who if isinstance(who, str) else f"rollout {who}"
        self._found[what, who] = Stuck(what, name, where, waited_s)

    def end(self) -> list[Stuck]:
        """End the round; return the findings that the round before did not have."""
        news = [stuck for key, stuck in self._found.items() if key not in self._named]
        self._named = set(self._found)
        by_time = sorted(self._found.values(), key=lambda stuck: -stuck.waited_s)
        self.stuck = tuple(by_time[:STUCK_MAX])
        return news
