"""Reward history of each task, by its digest, for group filters that use it.

:class:`GroupTracker` records rewards; :class:`Core` calls :meth:`Prompts.skip` at admission. The
history is part of the core's saved state.
"""

from collections.abc import Sequence

from tidegate.policies.filters import GroupFilter, PromptHistory


class Prompts:
    """Reward histories of all tasks of a run, kept only if its filter uses them."""

    def __init__(self, group_filter: GroupFilter) -> None:
        self.filter = group_filter
        self.histories: dict[bytes, PromptHistory] = {}
        """Histories by the task's digest."""
        self.skipped = 0
        """Number of tasks skipped before anything was generated."""
        self.drops_since_batch = 0
        """Number of groups that the filter has rejected since the last batch."""
        self.kept_at_limit = 0
        """Number of groups that the filter rejected, but that were kept at its limit."""

    def may_drop(self, *, is_ended: bool) -> bool:
        """Return whether a group that the filter rejects may be dropped, and count it.

        ``is_ended``: whether its rollouts have all ended, so that it is not judged again.
        """
        limit = self.filter.drops_limit
        if limit is not None and self.drops_since_batch >= limit:
            self.kept_at_limit += is_ended
            return False
        self.drops_since_batch += 1
        return True

    def record(self, digest: bytes, rewards: Sequence[float]) -> None:
        """Add the rewards of a task's group that has ended."""
        if digest and self.filter.uses_history:
            self.histories[digest] = self.histories.get(digest, PromptHistory()).after(rewards)

    def skip(self, digest: bytes) -> bool:
        """Return whether to skip a task, and count it if so."""
        history = self.histories.get(digest)
        is_passed_over = history is not None and self.filter.skip(history)
        self.skipped += is_passed_over
        return is_passed_over
