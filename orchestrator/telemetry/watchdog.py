"""What has not got on for too long? Names it, says where it is, and for how long.

It is told now and then how far everything is, and remembers since when that has not changed. It
knows nothing of what it watches; time is an argument.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

What = Literal["engine", "turn", "episode", "publish", "trainer", "tasks", "loop", "memory"]

STUCK_MAX = 100
"""Named at once, those that wait longest; where so many are stuck, the others are so alike."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """One thing that has not got on for longer than it should take."""

    what: What
    """``engine``: it makes no step. ``turn``: it gets no token. ``episode``: the user's code
    neither asks for a turn nor returns. ``publish``: engines don't take new weights. ``trainer``:
    all wait for it to publish. ``tasks``: the user's iterator gives none. ``loop``: the user's code
    keeps the run's event loop to itself. ``memory``: what should be gone by now is not."""
    who: str
    where: str
    waited_s: float

    def __str__(self) -> str:
        return f"{self.who} ({self.what}) has not got on for {self.waited_s:.0f} s: {self.where}"


class _Seen:
    """Since when a thing has been as far as it is."""

    __slots__ = ("progress", "since_s")

    def __init__(self, progress: Hashable, since_s: float) -> None:
        self.progress = progress
        self.since_s = since_s


_Key = tuple[What, int | str]


class Watchdog:
    """Looks at everything in rounds: :meth:`begin`, :meth:`is_stuck` of each, :meth:`end`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._now_s = 0.0
        """When this round began."""
        self._before: dict[_Key, _Seen] = {}
        """What the last round saw."""
        self._seen: dict[_Key, _Seen] = {}
        """What this one has seen so far."""
        self._found: dict[_Key, Stuck] = {}
        """And found to be stuck."""
        self._named: set[_Key] = set()
        """What the last whole round found."""
        self.stuck: tuple[Stuck, ...] = ()
        """All of that, as of then; what has waited longest first."""

    def begin(self, now_s: float) -> None:
        """A new round; what is not looked at in it is there no more."""
        self._now_s = now_s
        self._before, self._seen, self._found = self._seen, {}, {}

    def is_stuck(
        self, what: What, who: int | str, progress: Hashable, patience: float = 1.0
    ) -> bool:
        """Take in how far one thing is; if it is stuck, say so by :meth:`name`.

        ``who`` is unique among its kind; a rollout's is its number. ``progress`` differs from what
        it was whenever the thing has got on. It may take ``patience`` times as long as others.

        Run once per rollout and round, and there may be a hundred thousand of those.
        """
        key = (what, who)
        seen = self._before.get(key)
        if seen is None or seen.progress != progress:
            seen = _Seen(progress, self._now_s)
        self._seen[key] = seen
        return self._now_s - seen.since_s >= self._patience_s * patience

    def name(self, what: What, who: int | str, where: str) -> None:
        """This is stuck, and there is so much to say of it."""
        waited_s = self._now_s - self._seen[what, who].since_s
        name = who if isinstance(who, str) else f"rollout {who}"
        self._found[what, who] = Stuck(what, name, where, waited_s)

    def end(self) -> list[Stuck]:
        """What this round has found to be stuck, and the one before had not."""
        news = [stuck for key, stuck in self._found.items() if key not in self._named]
        self._named = set(self._found)
        by_time = sorted(self._found.values(), key=lambda stuck: -stuck.waited_s)
        self.stuck = tuple(by_time[:STUCK_MAX])
        return news
