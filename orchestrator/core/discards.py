"""What was dropped, of which length and of which tasks, and did dropping favour short rollouts?

Every policy that discards is a filter on what is trained; this says what it filtered. Whole numbers
in bounded memory, the same for the same calls; it decides nothing and knows no policy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import Rollout

LENGTH_BUCKETS = 32
"""0 tokens, 1, 2 to 3, 4 to 7, … in doublings; the last holds what has 2^30 tokens or more."""

TASKS_COUNTED = 32
"""Per reason, tasks that are counted one by one: 3 KB, and exact for as many as that."""

TASKS_TOLD = 3
"""Of those, how many a snapshot names."""

WINDOW_ROLLOUTS = 1024
"""The length bias is of the last one to two times so many: a ratio good to about 0.02 at the spread
of lengths that is usual, and yet of this hour rather than of the whole run."""

NOBODYS_CHOICE = frozenset({"run_ended"})
"""Reasons that are no bias of a policy: the end of a run cuts off whatever runs then."""


@dataclass(frozen=True, slots=True)
class TaskDiscards:
    """How many of one task's rollouts were discarded for one reason."""

    offer: int
    """Which of the user's iterators gave the task, from 0."""
    index: int
    """The task's place in it, from 0."""
    rollouts: int
    """At most so many; few tasks are counted one by one, see ``at_least``."""
    at_least: int
    """At least so many: it is not known what happened before this task came to be counted."""


@dataclass(frozen=True, slots=True)
class DiscardStatistics:
    """What was discarded for one reason: how much, how long, and of which tasks."""

    rollouts: int
    tokens: int
    """Sampled by the time they were discarded."""
    mean_tokens: float
    share_of_generated: float
    """Of all tokens sampled for training."""
    lengths: Mapping[int, int]
    """Rollouts by length: at the key n, those of n to 2n - 1 tokens; at 0, those without any."""
    tasks: tuple[TaskDiscards, ...] = ()
    """The few hit most, the most first."""


@dataclass(frozen=True, slots=True)
class LengthBiasStatistics:
    """Whether what was trained lately is as long as what was generated.

    A rollout that was discarded counts with what it had by then, which for one that was given up
    on its way is less than it would have had: the true bias is larger.
    """

    rollouts: int
    """Trained or discarded, the latest."""
    mean_generated_tokens: float
    mean_trained_tokens: float
    ratio: float
    """Trained over generated; 1 is unbiased, below it short rollouts were favoured."""
    survival: Mapping[int, float]
    """Share that was trained, by length as in :class:`DiscardStatistics`. Unbiased: all equal."""


class SavedTally(msgspec.Struct, array_like=True):
    """What was discarded for one reason."""

    reason: str
    rollouts: int
    tokens: int
    lengths: list[int]
    tasks: list[tuple[int, int, int, int]]
    """(offer, index, rollouts, of them perhaps another task's), in the order of their arrival."""


class SavedLengths(msgspec.Struct, array_like=True):
    """One block of rollouts, by length."""

    generated: list[int]
    trained: list[int]
    generated_tokens: int
    trained_tokens: int


class SavedDiscards(msgspec.Struct, array_like=True):
    """All of it."""

    tallies: list[SavedTally]
    blocks: list[SavedLengths]


def length_bucket(tokens: int) -> int:
    """Which of the buckets a rollout of so many tokens is in."""
    return min(tokens.bit_length(), LENGTH_BUCKETS - 1)


class _Tally:
    """One reason's."""

    __slots__ = ("lengths", "rollouts", "tasks", "tokens")

    def __init__(self) -> None:
        self.rollouts = 0
        self.tokens = 0
        self.lengths = [0] * LENGTH_BUCKETS
        self.tasks: dict[TaskKey, tuple[int, int]] = {}
        """(rollouts, of them perhaps another task's)"""

    def count(self, tokens: int, task: TaskKey | None) -> None:
        """Space-saving (Metwally et al. 2005): a new task takes the place of the least hit one and
        its count with it, so that a task hit often can't be missed, only counted too high."""
        self.rollouts += 1
        self.tokens += tokens
        self.lengths[length_bucket(tokens)] += 1
        if task is None:
            return
        rollouts, unsure = self.tasks.get(task, (0, 0))
        if not rollouts and len(self.tasks) >= TASKS_COUNTED:
            counts = [count for count, _ in self.tasks.values()]
            at = counts.index(min(counts))  # of equals, the oldest
            least = next(islice(self.tasks, at, None))
            rollouts = unsure = self.tasks.pop(least)[0]
        self.tasks[task] = (rollouts + 1, unsure)

    def take_back(self, tokens: int, task: TaskKey | None) -> None:
        """One that was counted is not discarded after all."""
        self.rollouts -= 1
        self.tokens -= tokens
        self.lengths[length_bucket(tokens)] -= 1
        if task is None or task not in self.tasks:  # others have taken its place
            return
        rollouts, unsure = self.tasks[task]
        if rollouts > 1:
            self.tasks[task] = (rollouts - 1, min(unsure, rollouts - 1))
        else:
            del self.tasks[task]

    def snapshot(self, generated_tokens: int) -> DiscardStatistics:
        most = sorted(self.tasks.items(), key=lambda item: -item[1][0])[:TASKS_TOLD]
        return DiscardStatistics(
            rollouts=self.rollouts,
            tokens=self.tokens,
            mean_tokens=self.tokens / max(1, self.rollouts),
            share_of_generated=self.tokens / max(1, generated_tokens),
            lengths={_shortest(b): n for b, n in enumerate(self.lengths) if n},
            tasks=tuple(
                TaskDiscards(key.offer, key.index, rollouts, rollouts - unsure)
                for key, (rollouts, unsure) in most
            ),
        )


class _Block:
    """Rollouts that were trained or discarded one after the other."""

    __slots__ = ("generated", "generated_tokens", "rollouts", "trained", "trained_tokens")

    def __init__(self) -> None:
        self.rollouts = 0
        """In all; the sum of ``generated``."""
        self.generated = [0] * LENGTH_BUCKETS
        self.trained = [0] * LENGTH_BUCKETS
        self.generated_tokens = 0
        self.trained_tokens = 0

    def count(self, lengths: list[int], *, is_trained: bool) -> None:
        tokens = sum(lengths)
        self.rollouts += len(lengths)
        self.generated_tokens += tokens
        self.trained_tokens += tokens * is_trained
        for bucket, rollouts in Counter(map(int.bit_length, lengths)).items():
            bucket = min(bucket, LENGTH_BUCKETS - 1)
            self.generated[bucket] += rollouts
            self.trained[bucket] += rollouts * is_trained

    def leave_out(self, tokens: int) -> bool:
        """One that was counted here as trained is not; False if none of its length was."""
        bucket = length_bucket(tokens)
        if not self.trained[bucket]:
            return False
        self.trained[bucket] -= 1
        self.trained_tokens = max(0, self.trained_tokens - tokens)
        return True

    def put_back(self, tokens: int) -> bool:
        """That was undone; False if all of its length that are counted here count as trained."""
        bucket = length_bucket(tokens)
        if self.trained[bucket] == self.generated[bucket]:
            return False
        self.trained[bucket] += 1
        self.trained_tokens += tokens
        return True


class Discards:
    """The books of what was discarded, and of the lengths of what was trained beside it."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self._blocks = [_Block()]
        """The last that is full, if there is one, and the one that is filling."""

    def note_discarded(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """A rollout will never be trained. Its tokens are counted as they are now."""
        tokens = rollout.tokens_of_all_rows
        self._tally(reason).count(tokens, task)
        if reason not in NOBODYS_CHOICE:
            self._ended([tokens], is_trained=False)

    def note_left_out(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """A rollout that was handed to the trainer was not trained on; once more, as above."""
        tokens = rollout.tokens_of_all_rows
        self._tally(reason).count(tokens, task)
        for block in self._blocks:
            if block.leave_out(tokens):
                return

    def take_back(self, rollout: Rollout, reason: str, task: TaskKey | None) -> None:
        """One that was left out comes to the trainer again: a crash has undone its batch."""
        tokens = rollout.tokens_of_all_rows
        tally = self._tally(reason)
        tally.take_back(tokens, task)
        if not tally.rollouts:
            del self._tallies[reason]
        for block in self._blocks:
            if block.put_back(tokens):
                return

    def _tally(self, reason: str) -> _Tally:
        return self._tallies.setdefault(reason, _Tally())

    def note_trained(self, lengths: list[int]) -> None:
        """Rollouts of so many tokens were handed to the trainer; once more, if that was undone by a
        crash."""
        self._ended(lengths, is_trained=True)

    def _ended(self, lengths: list[int], *, is_trained: bool) -> None:
        start = 0
        while start < len(lengths):
            if self._blocks[-1].rollouts >= WINDOW_ROLLOUTS:
                self._blocks = [self._blocks[-1], _Block()]
            room = WINDOW_ROLLOUTS - self._blocks[-1].rollouts
            self._blocks[-1].count(lengths[start : start + room], is_trained=is_trained)
            start += room

    # ------------------------------------------------------------ looking

    def by_reason(self, *, generated_tokens: int) -> dict[str, DiscardStatistics]:
        """What was discarded, by reason; ``generated_tokens`` as in the ledger."""
        return {
            reason: tally.snapshot(generated_tokens)
            for reason, tally in sorted(self._tallies.items())
        }

    def length_bias(self) -> LengthBiasStatistics | None:
        """Trained against generated lengths, lately; None before anything was trained."""
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
        """The whole state; equal for equal histories."""
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
            blocks=[
                SavedLengths(
                    list(block.generated),
                    list(block.trained),
                    block.generated_tokens,
                    block.trained_tokens,
                )
                for block in self._blocks
            ],
        )

    def load(self, saved: SavedDiscards) -> None:
        """Go back to a saved state."""
        self._tallies = {}
        for each in saved.tallies:
            tally = self._tallies[each.reason] = _Tally()
            tally.rollouts, tally.tokens = each.rollouts, each.tokens
            tally.lengths = list(each.lengths)
            tally.tasks = {TaskKey(o, i): (n, unsure) for o, i, n, unsure in each.tasks}
        self._blocks = []
        for lengths in saved.blocks:
            block = _Block()
            block.generated, block.trained = list(lengths.generated), list(lengths.trained)
            block.rollouts = sum(block.generated)
            block.generated_tokens = lengths.generated_tokens
            block.trained_tokens = lengths.trained_tokens
            self._blocks.append(block)


def _shortest(bucket: int) -> int:
    """The least number of tokens in a bucket."""
    return 1 << (bucket - 1) if bucket else 0
