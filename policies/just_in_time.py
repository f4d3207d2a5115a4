"""Just-in-time admission: how many groups must be outstanding for the trainer not to wait.

The orchestrator's core keeps one :class:`AdmissionPace` for each trainer and tells it, whenever the
trainer needs a batch, how many ended groups are left beside the batch. Groups that are always left
could have started later.

No clock is needed. A group's staleness counts publishes, so a start matters only by the version
that it is under, and by Little's law the mean staleness of trained groups is ``O / (k·B) - 1`` with
O groups outstanding at each publish: the freshest run is that with the fewest.

Symbols: B groups per batch, k batches per version.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

PATIENCE_MAX = 32
"""Largest multiple of the first number of versions that is observed before groups start later."""


@dataclass(frozen=True, slots=True)
class AdmissionPace:
    """Limit of outstanding groups, learned from what is left when the trainer needs a batch.

    The limit is lowered by the groups that were left at every need of a number of versions, but for
    a margin. Whenever the trainer finds no batch, the limit is lifted: admission is as early as the
    staleness policy allows until as many versions have passed without a wait. If the limit was low
    then, the number of versions is doubled, so that all waits of a steady run together take a share
    of its time that vanishes. A trainer that often waits is never paced.

    The same observations give the same limit, so a run can be replayed.
    """

    limit: int | None = None
    """Largest number of outstanding groups; None: that of the staleness policy."""
    needs: int = 0
    """Number of the trainer's needs observed under this limit. Negative while it may still need
    groups that were admitted under another one."""
    left: int = 0
    """Smallest number of ended groups left at those needs."""
    patience: int = 1
    """Number of versions before a new limit, as a multiple of the policy's setting."""

    def lifted(self) -> Self:
        """Return the pace after a change that may make groups take longer."""
        return replace(self, limit=None, needs=0, left=0)

    def after_wait(self) -> Self:
        """Return the pace after the trainer needed a batch and none was ready."""
        if self.limit is None:
            return self.lifted()
        return replace(self.lifted(), patience=min(PATIENCE_MAX, 2 * self.patience))

    def after_need(
        self,
        left: int,
        *,
        most: int,
        groups_per_batch: int,
        batches_per_version: int,
        versions: int,
    ) -> Self:
        """Return the pace after the trainer needed a batch and one was ready.

        Args:
            left: ended groups left beside the batch.
            most: the staleness policy's limit of outstanding groups.
            groups_per_batch: B.
            batches_per_version: k.
            versions: number of versions without a wait after which groups start later.
        """
        needs = self.needs + 1
        left = left if needs <= 1 else min(left, self.left)
        if needs < versions * self.patience * batches_per_version:
            return replace(self, needs=needs, left=left)
        now = most if self.limit is None else min(most, self.limit)
        # A version's batches are outstanding until it is live, and the next batch must be ready.
        least = (batches_per_version + 1) * groups_per_batch
        # If nothing ran when the one batch of a version was needed, a margin had ended, too.
        is_idle = batches_per_version == 1 and now - left <= least
        # The number of groups that end in a version varies by about its square root.
        margin = 0 if is_idle else math.ceil(math.sqrt(groups_per_batch))
        limit = min(most, max(least, now - left + margin))
        if limit == now:
            patience = self.patience if self.limit is None else max(1, self.patience // 2)
            return replace(self, needs=0, patience=patience)
        skipped = math.ceil(now / groups_per_batch)
        return replace(self, limit=None if limit == most else limit, needs=-skipped)
