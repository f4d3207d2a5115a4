"""What were the rollouts of each prompt rewarded with? Known by the task's digest, for a filter."""

from collections.abc import Sequence

from tidegate.policies.filters import GroupFilter, PromptHistory


class Prompts:
    """The history of every prompt of a run, where its filter asks for it."""

    def __init__(self, group_filter: GroupFilter) -> None:
        self.filter = group_filter
        self.histories: dict[bytes, PromptHistory] = {}
        """By the task's digest."""
        self.passed_over = 0
        """Tasks for which nothing was generated."""

    def note(self, digest: bytes, rewards: Sequence[float]) -> None:
        """A group of this prompt has ended."""
        if digest and self.filter.uses_history:
            self.histories[digest] = self.histories.get(digest, PromptHistory()).after(rewards)

    def pass_over(self, digest: bytes) -> bool:
        """Whether a task is passed over; that is counted."""
        history = self.histories.get(digest)
        is_passed_over = history is not None and self.filter.skip(history)
        self.passed_over += is_passed_over
        return is_passed_over
