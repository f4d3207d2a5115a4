"""Watchdog: records the progress of turns, engines and episodes, and names the stuck ones.

:class:`RunWatch` feeds it, and :class:`RunStatistics` shows its findings, as well as those of
:class:`LoopWatch`, and :class:`RunWatch`'s own of batches without anything to learn from. The time
is an argument.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

StuckKind = Literal[
    "engine", "turn", "episode", "publish", "trainer", "tasks", "loop", "memory", "learning"
]

STUCK_MAX = 100
"""Findings kept at a time, the longest first; further findings are not kept."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """An engine, turn, episode or other thing that has made no progress for ``stuck_after_s``, or a
    trainer whose batches have nothing to learn from."""

    kind: StuckKind
    """``engine``: makes no step. ``turn``: gets no token. ``episode``: the user's code neither asks
    for a turn nor returns. ``publish``: engines don't take the new weights. ``trainer``: everything
    waits for its publish. ``tasks``: the user's iterator gives none. ``loop``: the user's code
    blocks the run's event loop. ``memory``: ended episodes are still referenced. ``learning``: the
    batches have no token or reward to learn from, or no group is left to make a batch of."""
    name: str
    """Name of the engine, rollout or task, such as ``rollout 7``; unique within its kind."""
    where: str
    """Last known state of the thing, such as the line of code that an episode waits in."""
    waited_s: float
    """Seconds since the thing last made progress."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): no progress for {self.waited_s:.0f} s: {self.where}"


class _Progress:
    """Progress of a thing, and since when it has not changed."""

    __slots__ = ("since_s", "value")

    def __init__(self, value: Hashable, since_s: float) -> None:
        self.value = value
        self.since_s = since_s


_Key = tuple[StuckKind, int | str]


class Watchdog:
    """Checks things in rounds: :meth:`begin`, :meth:`is_stuck` for each, :meth:`end`."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._now_s = 0.0
        """Time at which this round began."""
        self._previous: dict[_Key, _Progress] = {}
        """Progress as of the previous round."""
        self._current: dict[_Key, _Progress] = {}
        """Progress as of this round, so far."""
        self._found: dict[_Key, Stuck] = {}
        """Things found stuck in this round."""
        self._reported: set[_Key] = set()
        """Things found stuck in the last complete round."""
        self.stuck: tuple[Stuck, ...] = ()
        """Findings of the last complete round, the longest first."""

    def begin(self, now_s: float) -> None:
        """Begin a round; things not checked in it are forgotten."""
        self._now_s = now_s
        self._previous, self._current, self._found = self._current, {}, {}

    def is_stuck(
        self, kind: StuckKind, name: int | str, progress: Hashable, time_factor: float = 1.0
    ) -> bool:
        """Record one thing's progress; return whether it is stuck. If so, call :meth:`report`.

        ``name`` is unique within its kind; a rollout's is its number. ``progress`` is a value that
        differs whenever the thing has advanced. ``time_factor`` multiplies the allowed time.

        Called once per rollout and round, of which there may be a hundred thousand.
        """
        key = (kind, name)
        last = self._previous.get(key)
        if last is None or last.value != progress:
            last = _Progress(progress, self._now_s)
        self._current[key] = last
        return self._now_s - last.since_s >= self._stuck_after_s * time_factor

    def report(self, kind: StuckKind, name: int | str, where: str) -> None:
        """Add a finding to this round."""
        waited_s = self._now_s - self._current[kind, name].since_s
        full_name = name if isinstance(name, str) else f"rollout {name}"
        self._found[kind, name] = Stuck(kind, full_name, where, waited_s)

    def end(self) -> list[Stuck]:
        """End the round; return the findings that the round before did not have."""
        news = [stuck for key, stuck in self._found.items() if key not in self._reported]
        self._reported = set(self._found)
        by_time = sorted(self._found.values(), key=lambda stuck: -stuck.waited_s)
        self.stuck = tuple(by_time[:STUCK_MAX])
        return news
