"""Counters of discarded rollouts by reason, length and task, and of the resulting length bias.

:class:`GroupTracker` counts each discard; :class:`RunStatistics` shows the counters. Memory is
bounded, all numbers are integers, and equal calls give equal states, because the counters are saved
with the core.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import Rollout

LENGTH_BUCKETS = 32
"""Buckets by doubling: 0 tokens, 1, 2 to 3, 4 to 7, …; the last holds 2^30 tokens or more."""

TASKS_COUNTED = 32
"""Tasks counted one by one for each reason: 3 KB, and exact for up to this many tasks."""

TASKS_REPORTED_MAX = 3
"""Tasks that a snapshot names for each reason."""

WINDOW_ROLLOUTS = 1024
"""Block of rollouts; the length bias is computed over the last one to two blocks. The ratio is good
to about 0.02 at the usual spread of lengths, and yet recent."""

UNBIASED_REASONS = frozenset({"run_ended"})
"""Reasons that show no bias of a policy: the end of a run discards all running rollouts."""


@dataclass(frozen=True, slots=True)
class TaskDiscards:
    """Number of one task's rollouts that were discarded for one reason."""

    offer: int
    """Number of the user's iterator that gave the task, from 0."""
    index: int
    """Position of the task in that iterator, from 0."""
    rollouts: int
    """Upper bound of the count; see ``at_least``."""
    at_least: int
    """Lower bound of the count. The two differ if the task replaced another one in the table,
    because only ``TASKS_COUNTED`` tasks are counted."""


@dataclass(frozen=True, slots=True)
class DiscardStatistics:
    """Rollouts discarded for one reason: number, lengths and tasks."""

    rollouts: int
    """Number of rollouts that were discarded for the reason."""
    tokens: int
    """Tokens that these rollouts had when they were discarded."""
    mean_tokens: float
    """Mean number of sampled tokens of these rollouts."""
    share_of_generated: float
    """``tokens`` as a share of all tokens sampled for training."""
    lengths: Mapping[int, int]
    """Rollouts by length: key n counts those of n to 2n - 1 tokens, key 0 those without tokens."""
    tasks: tuple[TaskDiscards, ...] = ()
    """The tasks with the most discards, most first."""


@dataclass(frozen=True, slots=True)
class LengthBiasStatistics:
    """Lengths of recently trained rollouts compared with all recently generated ones.

    A discarded rollout counts with the tokens that it had when it was discarded. A rollout stopped
    halfway would have been longer, so the true bias is larger.
    """

    rollouts: int
    """Number of recent rollouts, trained or discarded, that the figures cover."""
    mean_generated_tokens: float
    """Mean number of sampled tokens of recently generated rollouts."""
    mean_trained_tokens: float
    """Mean number of sampled tokens of recently trained rollouts."""
    ratio: float
    """Mean trained over mean generated length. 1 is unbiased; below 1, short ones are favoured."""
    survival: Mapping[int, float]
    """Share that was trained, by length as in :class:`DiscardStatistics`. Equal if unbiased."""


class SavedTally(msgspec.Struct, array_like=True):
    """Saved form of one reason's counters."""

    reason: str
    rollouts: int
    tokens: int
    lengths: list[int]
    tasks: list[tuple[int, int, int, int]]
    """Counted tasks in order of arrival: (offer, index, rollouts, how many of these may be another
    task's)."""


def length_bucket(tokens: int) -> int:
    """Return the histogram bucket of a rollout's length."""
    return min(tokens.bit_length(), LENGTH_BUCKETS - 1)


class _ReasonCounters:
    """Counters of one discard reason."""

    __slots__ = ("lengths", "rollouts", "tasks", "tokens")

    def __init__(self) -> None:
        self.rollouts = 0
        self.tokens = 0
        self.lengths = [0] * LENGTH_BUCKETS
        self.tasks: dict[TaskKey, tuple[int, int]] = {}
        """Rollouts of each counted task, and how many of these may be another task's."""

    def count(self, tokens: int, task: TaskKey | None) -> None:
        """Count one rollout, and its task with the Space-Saving algorithm (Metwally et al. 2005).

        A new task replaces the least counted one and inherits its count, so a task hit often can't
        be missed, only counted too high.
        """
        self.rollouts += 1
        self.tokens += tokens
        self.lengths[length_bucket(tokens)] += 1
        if task is None:
            return
        rollouts, overcount = self.tasks.get(task, (0, 0))
        if not rollouts and len(self.tasks) >= TASKS_COUNTED:
            counts = [count for count, _ in self.tasks.values()]
            at = counts.index(min(counts))  # of equals, the oldest
            least = next(islice(self.tasks, at, None))
            rollouts = overcount = self.tasks.pop(least)[0]
        self.tasks[task] = (rollouts + 1, overcount)

    def uncount(self, tokens: int, task: TaskKey | None) -> None:
        """Undo :meth:`count`, for a rollout that a resumed run trains after all."""
        self.rollouts -= 1
        self.tokens -= tokens
        self.lengths[length_bucket(tokens)] -= 1
        if task is None or task not in self.tasks:  # other tasks have replaced it in the table
            return
        rollouts, overcount = self.tasks[task]
        if rollouts > 1:
            self.tasks[task] = (rollouts - 1, min(overcount, rollouts - 1))
        else:
            del self.tasks[task]

    def snapshot(self, generated_tokens: int) -> DiscardStatistics:
        most = sorted(self.tasks.items(), key=lambda item: -item[1][0])[:TASKS_REPORTED_MAX]
        return DiscardStatistics(
            rollouts=self.rollouts,
            tokens=self.tokens,
            mean_tokens=self.tokens / max(1, self.rollouts),
            share_of_generated=self.tokens / max(1, generated_tokens),
            lengths={_shortest(b): n for b, n in enumerate(self.lengths) if n},
            tasks=tuple(
                TaskDiscards(key.offer, key.index, rollouts, rollouts - overcount)
                for key, (rollouts, overcount) in most
            ),
        )


def _no_lengths() -> list[int]:
    return [0] * LENGTH_BUCKETS


class LengthBlock(msgspec.Struct, array_like=True):
    """Lengths of up to ``WINDOW_ROLLOUTS`` consecutive trained or discarded rollouts."""

    generated: list[int] = msgspec.field(default_factory=_no_lengths)
    """Number of rollouts, by length bucket."""
    trained: list[int] = msgspec.field(default_factory=_no_lengths)
    """Number of trained rollouts, by length bucket."""
    generated_tokens: int = 0
    trained_tokens: int = 0

    @property
    def rollouts(self) -> int:
        """Number of rollouts."""
        return sum(self.generated)

    def count(self, lengths: list[int], *, is_trained: bool) -> None:
        """Count rollouts of these lengths."""
        tokens = sum(lengths)
        self.generated_tokens += tokens
        self.trained_tokens += tokens * is_trained
        for bucket, rollouts in Counter(map(int.bit_length, lengths)).items():
            bucket = min(bucket, LENGTH_BUCKETS - 1)
            self.generated[bucket] += rollouts
            self.trained[bucket] += rollouts * is_trained

    def uncount_trained(self, tokens: int) -> bool:
        """Count a trained rollout as not trained; False if this block has none of its length."""
        bucket = length_bucket(tokens)
        if not self.trained[bucket]:
            return False
        self.trained[bucket] -= 1
        self.trained_tokens = max(0, self.trained_tokens - tokens)
        return True

    def recount_trained(self, tokens: int) -> bool:
        """Undo :meth:`uncount_trained`; False if all of its length in this block count as
        trained."""
        bucket = length_bucket(tokens)
        if self.trained[bucket] == self.generated[bucket]:
            return False
        self.trained[bucket] += 1
        self.trained_tokens += tokens
        return True


class SavedDiscards(msgspec.Struct, array_like=True):
    """Saved form of :class:`Discards`, part of the core's state."""

    tallies: list[SavedTally]
    blocks: list[LengthBlock]


class Discards:
    """Counters of discarded rollouts, and of lengths of trained ones."""

    def __init__(self) -> None:
        self._tallies: dict[str, _ReasonCounters] = {}
        self._blocks = [LengthBlock()]
        """The last full block, if there is one, and the block being filled."""

    def count_discarded(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """Count a rollout that will never be trained, with the tokens that it has now."""
        tokens = rollout.tokens_of_all_rows
        self._tally(reason).count(tokens, task)
        if reason not in UNBIASED_REASONS:
            self._ended([tokens], is_trained=False)

    def count_untrained(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """Count a rollout that was handed over, and counted as trained, but not trained on."""
        tokens = rollout.tokens_of_all_rows
        self._tally(reason).count(tokens, task)
        for block in self._blocks:
            if block.uncount_trained(tokens):
                return

    def uncount_untrained(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """Undo :meth:`count_untrained`, because a resume hands over the rollout's batch again."""
        tokens = rollout.tokens_of_all_rows
        tally = self._tally(reason)
        tally.uncount(tokens, task)
        if not tally.rollouts:
            del self._tallies[reason]
        for block in self._blocks:
            if block.recount_trained(tokens):
                return

    def _tally(self, reason: str) -> _ReasonCounters:
        return self._tallies.setdefault(reason, _ReasonCounters())

    def count_trained(self, lengths: list[int]) -> None:
        """Count handed-over rollouts by their lengths; again after a resume undid that."""
        self._ended(lengths, is_trained=True)

    def _ended(self, lengths: list[int], *, is_trained: bool) -> None:
        start = 0
        while start < len(lengths):
            if self._blocks[-1].rollouts >= WINDOW_ROLLOUTS:
                self._blocks = [self._blocks[-1], LengthBlock()]
            free = WINDOW_ROLLOUTS - self._blocks[-1].rollouts
            self._blocks[-1].count(lengths[start : start + free], is_trained=is_trained)
            start += free

    # ------------------------------------------------------------ statistics

    def by_reason(self, *, generated_tokens: int) -> dict[str, DiscardStatistics]:
        """Return discards by reason. ``generated_tokens``: the ledger's count, for the share."""
        return {
            reason: tally.snapshot(generated_tokens)
            for reason, tally in sorted(self._tallies.items())
        }

    def length_bias(self) -> LengthBiasStatistics | None:
        """Compare recent trained with generated lengths; None before anything was trained."""
        generated, trained = (
            [sum(counts) for counts in zip(*lists, strict=True)]
            for lists in (
                [block.generated for block in self._blocks],
                [block.trained for block in self._blocks],
            )
        )
        rollouts, kept = sum(generated), sum(trained)
        if not kept:
            return None
        mean = sum(block.generated_tokens for block in self._blocks) / rollouts
        mean_trained = sum(block.trained_tokens for block in self._blocks) / kept
        return LengthBiasStatistics(
            rollouts=rollouts,
            mean_generated_tokens=mean,
            mean_trained_tokens=mean_trained,
            ratio=mean_trained / mean if mean else 1.0,
            survival={_shortest(b): trained[b] / n for b, n in enumerate(generated) if n},
        )

    # ------------------------------------------------------------ over a crash

    def saved(self) -> SavedDiscards:
        """Return the whole state; equal histories give equal states."""
        return SavedDiscards(
            tallies=[
                SavedTally(
                    reason,
                    tally.rollouts,
                    tally.tokens,
                    list(tally.lengths),
                    [(k.offer, k.index, *counts) for k, counts in tally.tasks.items()],
                )
                for reason, tally in sorted(self._tallies.items())
            ],
            blocks=self._blocks,
        )

    def load(self, saved: SavedDiscards) -> None:
        """Restore a saved state."""
        self._tallies = {}
        for each in saved.tallies:
            tally = self._tallies[each.reason] = _ReasonCounters()
            tally.rollouts, tally.tokens = each.rollouts, each.tokens
            tally.lengths = list(each.lengths)
            tally.tasks = {TaskKey(o, i): (n, overcount) for o, i, n, overcount in each.tasks}
        self._blocks = saved.blocks


def _shortest(bucket: int) -> int:
    return 1 << (bucket - 1) if bucket else 0
