"""Which groups are worth training on? Judged by their rewards, as soon as those say enough.

A filter holds no state that changes: what is known of a prompt is given to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """What a prompt's rollouts were rewarded with so far, in this run."""

    rollouts: int = 0
    total_reward: float = 0.0

    @property
    def mean_reward(self) -> float:
        """0 before the first."""
        return self.total_reward / max(1, self.rollouts)

    def after(self, rewards: Sequence[float]) -> "PromptHistory":
        """The history with these added."""
        return PromptHistory(self.rollouts + len(rewards), self.total_reward + sum(rewards))


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Keeps everything; override what should be different."""

    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        """Why a group will not be trained; None: it may be, as far as can be told.

        It is asked whenever one of its rollouts has got its reward. ``running`` others go on: they
        are stopped if it is rejected.
        """
        return None

    @property
    def uses_history(self) -> bool:
        """Whether :meth:`skip` wants to know what a prompt's rollouts were rewarded with."""
        return False

    def skip(self, history: PromptHistory) -> bool:
        """Whether a task is passed over, before anything is generated for it."""
        return False


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(GroupFilter):
    """Drops groups whose rewards are all the same: their advantages are 0, and teach nothing.

    Other prompts take their places, so batches stay full (DAPO, arXiv:2503.14476). A group may be
    given up before its last rollout has ended (``decide_after``), which saves its stragglers, and
    loses the few that would have differed. Prompts that are solved may be left out from then on
    (``solved_at``; ScaleRL, arXiv:2510.13786, leaves out those with a mean reward of 0.9).
    """

    decide_after: int | None = None
    """Rollouts with equal rewards that are enough; None waits for all."""
    solved_at: float | None = None
    """The mean reward from which on a prompt is passed over; None passes over none."""
    rollouts_min: int = 8
    """Of a prompt, before it can count as solved."""

    def __post_init__(self) -> None:
        if self.decide_after is not None and self.decide_after < 2:
            raise ConfigError(
                f"one reward has no variance: decide_after must be >= 2, got {self.decide_after}"
            )
        if self.rollouts_min < 1:
            raise ConfigError(f"rollouts_min must be >= 1, got {self.rollouts_min}")

    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        """``zero_variance``, once that is certain or likely enough."""
        is_enough = self.decide_after is not None and len(rewards) >= self.decide_after
        if (is_enough or not running) and len(set(rewards)) == 1:
            return "zero_variance"
        return None

    @property
    def uses_history(self) -> bool:
        """For ``solved_at``."""
        return self.solved_at is not None

    def skip(self, history: PromptHistory) -> bool:
        """Whether it is solved."""
        is_known = self.solved_at is not None and history.rollouts >= self.rollouts_min
        return is_known and history.mean_reward >= (self.solved_at or 0.0)
