"""What is a group? The rollouts of one prompt, and where it stands among the others."""

from dataclasses import dataclass, field

from msgspec import Struct

from tidegate.orchestrator.core.rollout import DISCARDED, FINISHED, Rollout


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
    sibling_rewards: list[float] = field(default_factory=list)
    """Of a rest: what the others of its group were rewarded with."""

    is_evaluation: bool = field(init=False)
    """Whether it only measures, and is never trained."""

    def __post_init__(self) -> None:
        self.is_evaluation = self.group_id < 0

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
        return sum(r.state is FINISHED for r in self.rollouts if r.branch_of is None)

    @property
    def kept(self) -> list[Rollout]:
        """The rollouts that were not discarded, and their branches."""
        return [r for r in self.rollouts if r.state is not DISCARDED]

    @property
    def kept_rewards(self) -> list[float]:
        """One for each rollout that has one; a branch has its rollout's."""
        return [
            rollout.reward
            for rollout in self.rollouts
            if rollout.reward is not None
            and rollout.branch_of is None
            and rollout.state is not DISCARDED
        ]

    @property
    def num_kept(self) -> int:
        """Rollouts that were not discarded, whatever their branches."""
        kept = 0
        for rollout in self.rollouts:
            if rollout.branch_of is None and rollout.state is not DISCARDED:
                kept += 1
        return kept

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled one of its kept tokens."""
        oldest = None  # in one pass: it is asked of every running group at each publish
        for rollout in self.rollouts:
            if rollout.state is not DISCARDED:
                for turn in rollout.turns:
                    for run in turn.runs:
                        if oldest is None or run.version < oldest:
                            oldest = run.version
        return oldest

    @property
    def newest_version(self) -> int:
        """The newest weights that sampled one of its tokens; 0 if there are none."""
        return max((v for r in self.rollouts if (v := r.newest_version) is not None), default=0)
