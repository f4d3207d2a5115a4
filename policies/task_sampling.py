"""Weighted random draws from a list of tasks, with a share of draws that replay hard tasks.

:class:`~tidegate.Curriculum` owns a :class:`TaskSampler`. A draw depends only on the seed, the
draw's number and the present weights, so a resumed run draws as the killed one would have. Weights
are integers internally: sums are exact, whatever the order of their changes.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.errors import ConfigError

WEIGHT_UNIT = 1_000_000
"""Integer weight of a weight of 1; a smaller positive weight than 1e-6 counts as 1e-6."""

WEIGHT_MAX = 1e9
"""Largest weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardTaskReplay:
    """Replays hard tasks: those whose newest group had a mean reward of at most ``reward_max``.

    Replays are extra to a task's ordinary draws, within both limits.
    """

    share: float = 0.25
    """Probability that a draw is a replay if a hard task is available, in [0, 1]."""
    reward_max: float = 0.5
    """Mean reward of a task's newest group up to which the task is hard."""
    times_max: int = 4
    """Number of replays of one task in the whole run."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is a probability in [0, 1], got {self.share}")
        if not math.isfinite(self.reward_max):
            raise ConfigError(f"reward_max must be a finite number, got {self.reward_max}")
        if self.times_max < 0:
            raise ConfigError(f"times_max counts replays and must be >= 0, got {self.times_max}")


def checked_weight(item: int, weight: float) -> float:
    """Return a task's weight.

    Raises:
        ConfigError: the weight is negative, too large or not a number.
    """
    if not 0 <= weight <= WEIGHT_MAX:  # NaN fails too
        raise ConfigError(
            f"the weight of task {item} must be a number from 0 to {WEIGHT_MAX:g}, got {weight!r}"
        )
    return weight


class PrefixSums:
    """Integer weights of items 0 … n-1, drawn from in O(log n) (a Fenwick tree)."""

    def __init__(self, weights: Iterable[int]) -> None:
        self._weights = list(weights)
        self._sums = [0, *self._weights]
        for i in range(1, len(self._sums)):
            parent = i + (i & -i)
            if parent < len(self._sums):
                self._sums[parent] += self._sums[i]
        self.total = sum(self._weights)
        """Sum of all weights."""

    def __getitem__(self, item: int) -> int:
        return self._weights[item]

    def __setitem__(self, item: int, weight: int) -> None:
        difference = weight - self._weights[item]
        self._weights[item] = weight
        self.total += difference
        i = item + 1
        while difference and i < len(self._sums):
            self._sums[i] += difference
            i += i & -i

    def item_at(self, position: int) -> int:
        """Return the item whose weight covers ``position``, 0 <= position < :attr:`total`."""
        i, step = 0, 1 << (len(self._sums).bit_length() - 1)
        while step:
            if i + step < len(self._sums) and self._sums[i + step] <= position:
                i += step
                position -= self._sums[i]
            step >>= 1
        return i


class TaskSampler:
    """Weights of tasks 0 … n-1 and random draws from them.

    A task that runs is drawn only if no other task has a positive weight, because its outcome is
    not known yet.
    """

    def __init__(self, size: int, *, seed: int, replay: HardTaskReplay | None = None) -> None:
        self._seed = seed
        self._replay = replay
        self._weights = [0] * size
        self._idle = PrefixSums([0] * size)
        """Weights of the tasks that don't run."""
        self._hard = PrefixSums([0] * size if replay is not None else ())
        """1 for each hard task that doesn't run and may be replayed."""
        self._running: set[int] = set()

    def update(
        self,
        item: int,
        weight: float,
        *,
        is_running: bool,
        recent_reward: float | None = None,
        replays: int = 0,
    ) -> None:
        """Set a task's weight and what replays depend on: the mean reward of the task's newest
        group (None before the first) and its number of replays.

        Raises:
            ConfigError: the weight is negative, too large or not a number.
        """
        units = math.ceil(checked_weight(item, weight) * WEIGHT_UNIT)
        self._weights[item] = units
        self._idle[item] = 0 if is_running else units
        if is_running:
            self._running.add(item)
        else:
            self._running.discard(item)
        if (replay := self._replay) is not None:
            is_hard = recent_reward is not None and recent_reward <= replay.reward_max
            may_replay = is_hard and units and not is_running and replays < replay.times_max
            self._hard[item] = int(may_replay)

    def draw(self, number: int) -> tuple[int, bool] | None:
        """Return the item of draw ``number``, and whether it is a replay; None if all weights
        are 0."""
        chance = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=16).digest()
        coin, place = int.from_bytes(chance[:8], "little"), int.from_bytes(chance[8:], "little")
        if self._replay is not None and self._hard.total and coin < self._replay.share * 2**64:
            return self._hard.item_at(place * self._hard.total >> 64), True
        if self._idle.total:
            return self._idle.item_at(place * self._idle.total >> 64), False
        running = sorted(self._running)
        total = sum(self._weights[item] for item in running)
        position = place * total >> 64
        for item in running:
            if position < self._weights[item]:
                return item, False
            position -= self._weights[item]
        return None
