"""Group filters: which groups are worth training on, decided from their rewards (dynamic sampling).

The orchestrator's core calls a filter after each reward. A filter is immutable: the history of a
prompt is passed to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """Number and sum of the rewards that a prompt's rollouts got so far in this run."""

    rollouts: int = 0
    total_reward: float = 0.0

    @property
    def mean_reward(self) -> float:
        """Mean reward over the prompt's rollouts; 0 before the first."""
        return self.total_reward / max(1, self.rollouts)

    def after(self, rewards: Sequence[float]) -> "PromptHistory":
        """Return the history with these rewards added."""
        return PromptHistory(self.rollouts + len(rewards), self.total_reward + sum(rewards))


@dataclass(frozen=True, kw_only=True)
class GroupFilter:
    """Base class of group filters, which keeps every group. Override the methods that should
    differ."""

    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        """Return the reason why a group will not be trained, or None to keep it so far.

        Called whenever one of the group's rollouts gets its reward. ``running`` is the number of
        rollouts that are still generating; they are cancelled if the group is rejected.
        """
        return None

    @property
    def drops_limit(self) -> int | None:
        """Number of groups that may be rejected between two batches; further ones are kept. None:
        no limit."""
        return None

    @property
    def uses_history(self) -> bool:
        """Whether :meth:`skip` needs the rewards of a prompt's earlier rollouts."""
        return False

    def skip(self, history: PromptHistory) -> bool:
        """Return whether to skip a task before anything is generated for it."""
        return False


@dataclass(frozen=True, kw_only=True)
class DynamicSampling(GroupFilter):
    """Drops groups whose rewards are all equal, because their advantages are 0.

    Other prompts replace them, so batches stay full (DAPO, arXiv:2503.14476). ``decide_after``
    drops a group before its last rollout has ended, which saves generating its stragglers but loses
    the few groups whose later rewards would have differed. ``solved_at`` skips prompts that are
    solved (ScaleRL, arXiv:2510.13786, skips those with a mean reward of 0.9).
    """

    decide_after: int | None = None
    """Number of equal rewards after which a group is dropped, >= 2; None waits for all rollouts."""
    solved_at: float | None = None
    """Mean reward from which a prompt is skipped; None skips no prompt."""
    rollouts_min: int = 8
    """Number of a prompt's rollouts before it can count as solved."""
    drops_per_batch_max: int | None = None
    """Number of groups that may be dropped between two batches; further ones are trained, so that
    a batch always fills. None: no limit."""

    def __post_init__(self) -> None:
        if self.decide_after is not None and self.decide_after < 2:
            raise ConfigError(
                f"one reward has no variance: decide_after must be >= 2, got {self.decide_after}"
            )
        if self.drops_per_batch_max is not None and self.drops_per_batch_max < 0:
            raise ConfigError(
                f"drops_per_batch_max counts groups and must be >= 0, or None for no limit; got "
                f"{self.drops_per_batch_max}"
            )
        if self.rollouts_min < 1:
            raise ConfigError(f"rollouts_min must be >= 1, got {self.rollouts_min}")

    def reject(self, rewards: Sequence[float], *, running: int) -> str | None:
        """Return ``zero_variance`` if all rewards are equal and enough rollouts have ended."""
        is_enough = self.decide_after is not None and len(rewards) >= self.decide_after
        if (is_enough or not running) and len(set(rewards)) == 1:
            return "zero_variance"
        return None

    @property
    def drops_limit(self) -> int | None:
        """``drops_per_batch_max``."""
        return self.drops_per_batch_max

    @property
    def uses_history(self) -> bool:
        """Whether ``solved_at`` is set."""
        return self.solved_at is not None

    def skip(self, history: PromptHistory) -> bool:
        """Return whether the prompt counts as solved."""
        is_known = self.solved_at is not None and history.rollouts >= self.rollouts_min
        return is_known and history.mean_reward >= (self.solved_at or 0.0)
