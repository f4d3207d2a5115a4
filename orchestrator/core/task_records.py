"""Draws from the user's curricula, their weights, and the outcome statistics of each task.

:class:`Core` owns :class:`TaskRecords`; :class:`GroupTracker` records outcomes. The draws and
weights come in events, so a resumed run has the same ones. A task is identified by its curriculum's
name and its position in it (``item``). Runs without a curriculum record nothing.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from tidegate.orchestrator.core.group import Group, TaskKey


class TaskStatistics(Struct, frozen=True, gc=False):
    """Outcomes of one task of a curriculum so far, over all its groups."""

    draws: int = 0
    """Number of times that the curriculum gave the task, replays included. A group that is
    discarded and retried is not drawn again."""
    replays: int = 0
    """Number of draws that were replays."""
    groups: int = 0
    """Number of groups that ended with a reward, those that a filter dropped included."""
    rollouts: int = 0
    """Number of rollouts with a reward."""
    reward_sum: float = 0.0
    recent_reward: float | None = None
    """Mean reward of the newest group that ended; None before the first."""
    recent_version: int = 0
    """Weight version that was live when that group ended."""
    tokens: int = 0
    """Sampled tokens of the rollouts with a reward."""
    trained_groups: int = 0
    """Number of groups handed to the trainer."""
    staleness_sum: int = 0
    """Sum of the staleness of the groups handed over, in versions."""
    discards: dict[str, int] = {}
    """Number of discarded groups by reason: ``zero_variance``, ``stale``, …"""
    failures: dict[str, int] = {}
    """Number of failed episodes by ``cause/reason``, retried ones included."""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward over all rollouts: the pass rate if rewards are 0 or 1. None without any."""
        return self.reward_sum / self.rollouts if self.rollouts else None

    @property
    def mean_tokens(self) -> float | None:
        """Mean number of sampled tokens of a rollout with a reward; None without any."""
        return self.tokens / self.rollouts if self.rollouts else None

    @property
    def mean_staleness(self) -> float | None:
        """Mean staleness of the groups handed over, in versions; None without any."""
        return self.staleness_sum / self.trained_groups if self.trained_groups else None


NO_OUTCOME = TaskStatistics()
"""Statistics of a task that was never drawn."""


class SavedCurriculum(Struct, array_like=True):
    """Saved form of :class:`CurriculumRecord`."""

    name: str
    num_draws: int
    weights: list[tuple[int, float]]
    statistics: list[tuple[int, TaskStatistics]]


class SavedTaskRecords(Struct, array_like=True, frozen=True):
    """Saved form of :class:`TaskRecords`."""

    curricula: list[SavedCurriculum] = []
    draws: list[tuple[int, str, bytes]] = []
    """(iterator, its curriculum, items drawn)"""


class CurriculumRecord:
    """Draws, weights and statistics of one curriculum."""

    def __init__(self) -> None:
        self.num_draws = 0
        """Number of draws; also the number of the next draw."""
        self.num_replays = 0
        """Number of draws that were replays."""
        self.weights: dict[int, float] = {}
        """Weights set by the user, by item; others are 1."""
        self.statistics: dict[int, TaskStatistics] = {}
        """Statistics by item, for the items drawn at least once."""
        self.running: Counter[int] = Counter()
        """Number of running groups by item."""
        self.changed: set[int] = set()
        """Items changed since the curriculum read them last. Not part of the state."""

    def change(self, item: int, **values: object) -> None:
        """Replace fields of an item's statistics."""
        self.statistics[item] = replace(self.statistics.get(item, NO_OUTCOME), **values)
        self.changed.add(item)


class TaskRecords:
    """Records of all curricula of a run."""

    def __init__(self) -> None:
        self.curricula: dict[str, CurriculumRecord] = {}
        """Curricula by name. Empty in most runs, which record no outcome then."""
        self._names: dict[int, str] = {}
        """Name of the curriculum of each iterator that is one."""
        self._draws: dict[int, array[int]] = {}
        """Items drawn by each of these iterators, in order: a task's place is its key's index."""

    @property
    def all(self) -> Collection[CurriculumRecord]:
        """The records of all curricula."""
        return self.curricula.values()

    # ------------------------------------------------------------ draws and weights

    def begin(self, offer: int, name: str) -> None:
        """Record that iterator ``offer`` is the curriculum ``name``, or no curriculum if ``name``
        is empty."""
        if name:
            self.curricula.setdefault(name, CurriculumRecord())
            self._names[offer] = name
            self._draws.setdefault(offer, array("I"))

    def name_of(self, offer: int) -> str:
        """Return the name of the curriculum that an iterator is; empty if it is none."""
        return self._names.get(offer, "")

    def item_of(self, key: TaskKey) -> int:
        """Return the item of a task that a curriculum gave."""
        return self._draws[key.offer][key.index]

    def draw(self, key: TaskKey, item: int, *, is_replay: bool) -> None:
        """Record the next draw of the iterator in use."""
        self._draws[key.offer].append(item)
        record = self.curricula[self._names[key.offer]]
        record.num_draws += 1
        record.num_replays += is_replay
        before = record.statistics.get(item, NO_OUTCOME)
        record.change(item, draws=before.draws + 1, replays=before.replays + is_replay)

    def set_weights(self, name: str, weights: Iterable[tuple[int, float]]) -> None:
        """Set the user's weights of some items."""
        record = self.curricula.setdefault(name, CurriculumRecord())
        for item, weight in weights:
            record.weights[item] = weight
            record.changed.add(item)

    def resume(self, offer: int) -> None:
        """Forget the draws of iterators after the checkpoint's, which are drawn again."""
        self._draws = {o: items for o, items in self._draws.items() if o <= offer}
        self._names = {o: name for o, name in self._names.items() if o <= offer}

    # ------------------------------------------------------------ outcomes

    def _find(self, group: Group) -> tuple[CurriculumRecord, int] | None:
        key = group.key
        if not self._draws or key is None or key.offer not in self._draws:
            return None
        return self.curricula[self._names[key.offer]], self._draws[key.offer][key.index]

    def began(self, group: Group) -> None:
        """Record that a group began to run."""
        if (found := self._find(group)) is not None:
            record, item = found
            record.running[item] += 1
            record.changed.add(item)

    def stopped(self, group: Group) -> None:
        """Record that a group runs no longer, because it has ended or was discarded."""
        if (found := self._find(group)) is not None:
            record, item = found
            record.running[item] -= 1
            if not record.running[item]:
                del record.running[item]
            record.changed.add(item)

    def ended(self, group: Group, rewards: Sequence[float], tokens: int, version: int) -> None:
        """Record the rewards of a group that ended, or of the part of a split group that is trained
        first.

        ``tokens``: sampled tokens of the rollouts with a reward. ``version``: the live version.
        """
        if rewards and (found := self._find(group)) is not None:
            record, item = found
            before = record.statistics.get(item, NO_OUTCOME)
            record.change(
                item,
                groups=before.groups + (not group.is_split_remainder),
                rollouts=before.rollouts + len(rewards),
                reward_sum=before.reward_sum + sum(rewards),
                recent_reward=sum(rewards) / len(rewards),
                recent_version=version,
                tokens=before.tokens + tokens,
            )

    def discarded(self, group: Group, reason: str) -> None:
        """Record that a group was discarded."""
        if (found := self._find(group)) is not None:
            record, item = found
            counts = record.statistics.get(item, NO_OUTCOME).discards
            record.change(item, discards={**counts, reason: counts.get(reason, 0) + 1})

    def failed(self, group: Group, failure: str) -> None:
        """Record that an episode failed by ``cause/reason``."""
        if (found := self._find(group)) is not None:
            record, item = found
            counts = record.statistics.get(item, NO_OUTCOME).failures
            record.change(item, failures={**counts, failure: counts.get(failure, 0) + 1})

    def trained(self, groups: Sequence[Group], trainer_version: int, times: int) -> None:
        """Record that groups were handed to the trainer (``times`` = 1), or that a hand-over was
        undone (-1)."""
        if not self._draws:
            return
        for group in groups:
            if (found := self._find(group)) is not None:
                record, item = found
                before = record.statistics.get(item, NO_OUTCOME)
                record.change(
                    item,
                    trained_groups=before.trained_groups + times,
                    staleness_sum=before.staleness_sum + times * _staleness(group, trainer_version),
                )

    # ------------------------------------------------------------ state

    def saved(self) -> SavedTaskRecords:
        """Return the saved form."""
        curricula = [
            SavedCurriculum(
                name,
                record.num_draws,
                sorted(record.weights.items()),
                sorted(record.statistics.items(), key=lambda each: each[0]),
            )
            for name, record in sorted(self.curricula.items())
        ]
        draws = [(o, self._names[o], items.tobytes()) for o, items in sorted(self._draws.items())]
        return SavedTaskRecords(curricula, draws)

    def load(self, saved: SavedTaskRecords, running: Iterable[Group]) -> None:
        """Restore the saved form; ``running`` are the groups that run."""
        for each in saved.curricula:
            record = self.curricula[each.name] = CurriculumRecord()
            record.num_draws, record.weights = each.num_draws, dict(each.weights)
            record.statistics = dict(each.statistics)
            record.num_replays = sum(seen.replays for _, seen in each.statistics)
        for offer, name, items in saved.draws:
            self._names[offer] = name
            self._draws[offer] = array("I")
            self._draws[offer].frombytes(items)
        for group in running:
            self.began(group)


def _staleness(group: Group, trainer_version: int) -> int:
    """Return the staleness of a group's oldest trained token, in versions; 0 without tokens."""
    versions = [v for row in group.kept if (v := row.oldest_trained_version) is not None]
    return trainer_version - min(versions) if versions else 0
