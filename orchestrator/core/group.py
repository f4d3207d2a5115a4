"""What is a group? The rollouts of one prompt, and where it stands among the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from tidegate.orchestrator.core.rollout import Rollout, RolloutState


class TaskKey(Struct, frozen=True, order=True, gc=False):
    """Where a task stands among all that the user gives: the same after a crash."""

    offer: int
    """Which of the user's iterators gave it, from 0."""
    index: int
    """Place in that iterator, from 0."""


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt, whose rewards are compared with each other."""

    group_id: int
    """Counts groups in the order of admission; an evaluation's lie below 0."""
    task: object
    """What the user's iterator gave; passed to the episode, never looked into."""
    key: TaskKey | None = None
    """Of the task; None for an evaluation's."""
    digest: bytes = b""
    """Of the task, to know it again after a crash."""
    body: bytes = b""
    """The task as bytes, where a journal keeps it: then a resume needs no iterator to give it."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Its ``group_size`` rollouts, then their branches."""
    running: int = 0
    """Rollouts of it whose episode is going on; branches are not counted."""
    version_floor: int = 0
    """No token of it is older, nor will be."""
    is_retaken: bool = False
    """Whether its task was taken before, by a group that was given up."""
    split_from: int | None = None
    """Of a rest: the group that it belonged to."""
    sibling_rewards: Sequence[float] = ()
    """Of a rest: what the others of its group were rewarded with."""

    is_evaluation: bool = False
    """Whether it only measures, and is never trained."""

    @property
    def is_rest(self) -> bool:
        """Whether the others of its group have been trained before it."""
        return self.split_from is not None

    @property
    def priority(self) -> int:
        """In engines' queues: a rest is as urgent as its group was."""
        return self.group_id if self.split_from is None else self.split_from

    @property
    def finished(self) -> int:
        """Rollouts that have their reward."""
        return sum(r.state is RolloutState.FINISHED for r in self.rollouts if r.branch_of is None)

    @property
    def kept(self) -> list[Rollout]:
        """The rollouts that were not discarded, and their branches."""
        return [r for r in self.rollouts if r.state is not RolloutState.DISCARDED]

    @property
    def kept_rewards(self) -> list[float]:
        """One for each rollout that has one; a branch has its rollout's."""
        return [
            rollout.reward
            for rollout in self.rollouts
            if rollout.reward is not None
            and rollout.branch_of is None
            and rollout.state is not RolloutState.DISCARDED
        ]

    @property
    def num_kept(self) -> int:
        """Rollouts that were not discarded, whatever their branches."""
        return self.kept_and_oldest()[0]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled one of its kept tokens."""
        return self.kept_and_oldest()[1]

    def kept_and_oldest(self) -> tuple[int, int | None]:
        """:attr:`num_kept` and :attr:`oldest_version`, in one pass: each group is asked for both at
        its end, and for one at each publish until then."""
        kept, oldest = 0, None
        for rollout in self.rollouts:
            if rollout.state is RolloutState.DISCARDED:
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
        """The newest weights that sampled one of its tokens; 0 if there are none."""
        return max((v for r in self.rollouts if (v := r.newest_version) is not None), default=0)

    def untie(self) -> None:
        """Have its rollouts forget their branches, which know them: nobody asks for its tokens any
        more, and else each would keep the other until garbage is collected."""
        for rollout in self.rollouts:
            # Of what was discarded, sessions may yet have to be closed, each branch's own.
            if rollout.branches and rollout.state is not RolloutState.DISCARDED:
                rollout.branches = ()


def kept_rows(groups: Sequence[Group]) -> list[tuple[Rollout, Group]]:
    """What a batch of these groups is made of, those of a group side by side."""
    return [
        (row, group)
        for group in groups
        for row in group.rollouts
        if row.state is not RolloutState.DISCARDED
    ]
