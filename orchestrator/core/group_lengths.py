"""How long are a run's groups, and how long does order make them wait? In bounded memory.

It knows tokens, not seconds.
"""

import bisect
import itertools
import math
from collections import Counter

from tidegate.orchestrator.core.group import Group
from tidegate.policies import predictions

BUCKETS_PER_DOUBLING = 4
"""Of lengths, for the share of groups that are done by some time: 120 of them reach 2^30 tokens."""


class GroupLengths:
    """How long groups are: their longest rollout, in tokens."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.rollouts = 0
        self.groups = 0
        self.tokens = 0
        self._longest_tokens = 0
        """Of each group's longest rollout, added up."""
        self._most_tokens = 0

    def note(self, group: Group) -> None:
        """A group has ended."""
        lengths = [rollout.sampled_tokens for rollout in group.rollouts]
        longest = max(lengths, default=0)
        self.groups += 1
        self.rollouts += len(lengths)
        self.tokens += sum(lengths)
        self._longest_tokens += longest
        self._most_tokens = max(self._most_tokens, longest)
        self._buckets[int(BUCKETS_PER_DOUBLING * math.log2(max(1, longest)))] += 1

    @property
    def tail_factor(self) -> float:
        """As :func:`tidegate.policies.predictions.tail_factor`, of all groups so far."""
        if not self.tokens:
            return 1.0
        return (self._longest_tokens / self.groups) / (self.tokens / self.rollouts)

    def staleness_in_order(
        self, versions_per_token: float, *, groups_per_batch: int, window_groups: int | None
    ) -> float:
        """As :func:`tidegate.policies.predictions.staleness_in_order`, with these lengths."""
        most = self._most_tokens
        kept = sorted(self._buckets)
        ends = [min(most, 2 ** ((bucket + 1) / BUCKETS_PER_DOUBLING)) for bucket in kept]
        starts = [min(most, 2 ** (bucket / BUCKETS_PER_DOUBLING)) for bucket in kept]
        before = [0, *itertools.accumulate(self._buckets[bucket] for bucket in kept)]

        def share_done(versions: float) -> float:
            tokens = versions / versions_per_token
            at = bisect.bisect_right(ends, tokens)
            if at == len(ends):
                return 1.0
            part = max(0.0, tokens - starts[at]) / max(1e-9, ends[at] - starts[at])
            return (before[at] + part * (before[at + 1] - before[at])) / self.groups

        return predictions.staleness_in_order(
            share_done,
            most * versions_per_token,
            groups_per_batch=groups_per_batch,
            window_groups=window_groups,
        )
