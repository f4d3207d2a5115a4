"""How long are a run's groups, and how long does order make them wait? In bounded memory.

It knows tokens, not seconds.
"""

import bisect
import itertools
from collections import Counter

import numpy as np
import numpy.typing as npt

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

    def note(self, tokens: npt.NDArray[np.int64], group_ids: npt.NDArray[np.int64]) -> None:
        """These groups have ended: the sampled tokens of each rollout, those of a group together.

        Both [R]; in numpy, for there are thousands a second.
        """
        begins = np.flatnonzero(np.diff(group_ids, prepend=-1))
        longest = np.maximum.reduceat(tokens, begins)
        self.groups += len(begins)
        self.rollouts += len(tokens)
        self.tokens += int(tokens.sum())
        self._longest_tokens += int(longest.sum())
        self._most_tokens = max(self._most_tokens, int(longest.max()))
        buckets = (BUCKETS_PER_DOUBLING * np.log2(np.maximum(1, longest))).astype(np.int64)
        self._buckets.update(buckets.tolist())

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
