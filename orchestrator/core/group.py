"""A group: the ``group_size`` rollouts of one task, whose rewards are compared (GRPO).

:class:`GroupTracker` creates and changes groups; batches and policies read them. A group refers to
its :class:`Rollout` objects.
"""

from collections.abc import Sequence
from copy import copy

from msgspec import Struct, field
from msgspec.structs import replace

from tidegate.orchestrator.core.rollout import DISCARDED, Rollout, RolloutState


class TaskKey(Struct, frozen=True, order=True, gc=False):
    """Identity of a task by its place in the user's iterators; the same after a crash."""

    offer: int
    """Number of the iterator that gave the task, from 0."""
    index: int
    """Position in that iterator, from 0."""


class Group(Struct):
    """The rollouts of one task, whose rewards are compared with each other."""

    group_id: int
    """Number in the order of admission; negative for an evaluation's group."""
    task: object
    """Object that the user's iterator gave; passed to the episode, never inspected."""
    key: TaskKey | None = None
    """Identity of the task; None for a task of an evaluation."""
    digest: bytes = b""
    """Digest by which the task is recognised after a crash."""
    body: bytes = b""
    """The task as bytes, if a journal keeps it; then a resume needs no iterator for it."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The group's ``group_size`` rollouts, then their branches."""
    running: int = 0
    """Number of rollouts whose episode runs; branches are not counted."""
    oldest_possible_version: int = 0
    """Lower bound on the versions of the group's tokens, present and future."""
    is_retaken: bool = False
    """Whether an earlier group of the same task was discarded."""
    split_from: int | None = None
    """Id of the group that a split remainder was split from; None for other groups."""
    sibling_rewards: Sequence[float] = ()
    """Rewards of the rollouts that were trained when a split remainder's group was first split;
    empty for other groups."""

    is_evaluation: bool = False
    """Whether the group is for measuring only, and is never trained."""
    agents: "dict[str, Group]" = field(default_factory=dict)
    """Groups of other adapters that the group's episodes sample too, by adapter."""
    is_agents: bool = False
    """Whether the group is one of the ``agents`` of another group, its home. Its rollouts begin and
    end with the home group's rollouts. Only the home group's task can be put back to be started
    again."""
    home: "tuple[str, Group] | None" = None
    """The home group's adapter, and the home group itself, whose episodes sample this group. None
    for a group that is not ``is_agents``, and once the home group has been removed."""

    @property
    def use(self) -> int:
        """Number of the use that the group is for, from 1."""
        return self.rollouts[0].use

    @property
    def is_split_remainder(self) -> bool:
        """Whether the group is the remainder of a split group, whose other rollouts were trained
        before."""
        return self.split_from is not None

    @property
    def priority(self) -> int:
        """Priority of its turns in engines' queues; a remainder keeps that of its original
        group."""
        return self.group_id if self.split_from is None else self.split_from

    @property
    def finished(self) -> int:
        """Number of rollouts that have a reward, not counting branches."""
        return sum(r.state is RolloutState.FINISHED for r in self.rollouts if r.branch_of is None)

    @property
    def kept(self) -> list[Rollout]:
        """Rollouts that were not discarded, and their branches."""
        return [r for r in self.rollouts if r.state is not DISCARDED]

    @property
    def kept_rewards(self) -> list[float]:
        """One reward for each kept rollout that has one; branches are not counted."""
        return [
            rollout.reward
            for rollout in self.rollouts
            if rollout.reward is not None
            and rollout.branch_of is None
            and rollout.state is not DISCARDED
        ]

    @property
    def num_kept(self) -> int:
        """Number of rollouts that were not discarded, not counting branches."""
        return self.kept_and_oldest()[0]

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that sampled a token of a kept rollout; None without tokens."""
        return self.kept_and_oldest()[1]

    def kept_and_oldest(self) -> tuple[int, int | None]:
        """Return :attr:`num_kept` and :attr:`oldest_version` from one pass over the rollouts. Both
        are needed when a group ends; the oldest version is also needed at each publish while the
        group runs."""
        kept, oldest = 0, None
        for rollout in self.rollouts:
            if rollout.state is DISCARDED:
                continue
            if rollout.branch_of is None:
                kept += 1
            for turn in rollout.turns:
                for run in turn.runs:
                    version = run.version
                    if oldest is None or version < oldest:
                        oldest = version
        return kept, oldest

    @property
    def newest_version(self) -> int:
        """Newest version that sampled one of its tokens; 0 without tokens."""
        return max((v for r in self.rollouts if (v := r.newest_version) is not None), default=0)

    @property
    def has_discarded_rows(self) -> bool:
        """Whether the trainer has discarded a row of this use of the group."""
        return any(row.discard_reason is not None for row in self.kept)

    def for_next_use(self) -> "Group":
        """Return a copy for another use of a trained group. It has rows of its own on the same
        tokens, because the trainer discards rows of one use."""
        copies = {row.rollout_id: copy(row) for row in self.kept}
        for row in copies.values():
            row.use += 1
            row.branch_of = copies[row.branch_of.rollout_id] if row.branch_of is not None else None
            row.branches = tuple(
                copies[each.rollout_id] for each in row.branches if each.rollout_id in copies
            )
        return replace(self, rollouts=list(copies.values()), agents={}, home=None)

    def untie(self) -> None:
        """Break the reference cycles between rollouts and branches, so that their memory is freed
        without the garbage collector. Call it once the tokens are no longer needed."""
        for rollout in self.rollouts:
            # Each branch of a discarded rollout may still have a session to close.
            if rollout.branches and rollout.state is not DISCARDED:
                rollout.branches = ()


def kept_rows(groups: Sequence[Group]) -> list[tuple[Rollout, Group]]:
    """Return the rows of a batch of these groups; rows of a group are adjacent."""
    return [
        (row, group) for group in groups for row in group.rollouts if row.state is not DISCARDED
    ]
