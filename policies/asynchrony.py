"""Asynchronous staleness policies: bounded staleness, one-step off-policy, and unbounded.

Users choose one in ``tidegate.serve``; the orchestrator's core asks it which groups to admit, hand
over and drop.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

from tidegate.errors import ConfigError
from tidegate.policies.consumption import (
    Window,
    by_deadline,
    in_admission_order,
    in_completion_order,
    in_window,
    split_at_deadline,
)
from tidegate.policies.staleness import G, OutstandingGroup, OutstandingGroups, StalenessPolicy

Order = Literal["admission", "completion"] | Window
DeadlinePolicy = Literal["wait", "mask", "split", "drop"]


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(StalenessPolicy):
    """Hard bound: no token older than η versions is trained on.

    Two gates keep the bound. **Admission** limits outstanding groups: groups running, buffered, or
    in training until the version made from them is live on every engine. Their number never exceeds
    ``(η + 1)·B``. Admission alone does not bound age: in completion order the oldest samples get
    about twice as old. **Consumption** completes the bound by what it does with a group whose
    tokens reach the staleness bound before the group has ended (``deadline_policy``):

    * ``wait``: the batch waits for the group. In admission order every straggler is waited for; in
      completion order only a group that could not be trained in time after this batch
      (:func:`~tidegate.policies.consumption.by_deadline`); in a window, a group that others may no
      longer overtake, and the bound is ``η + 1 + ⌊(W - 2)/B⌋``.
    * ``mask``: other groups overtake it (in a window, the next few), and those of its tokens that
      are too old are masked in the loss.
    * ``split``: if at least a quarter of its rollouts have ended, and at least two, they are
      trained in time. Each other rollout is trained in the first batch after its end, with its
      too-old tokens masked and an advantage relative to the rollouts that were trained first. This
      costs the least (docs/scheduling.md): stragglers hold up neither engines nor other rollouts of
      their group.
    * ``drop``: the group is discarded as soon as it is too old, and its task is returned to the
      queue. This wastes the group's tokens and biases training towards short answers.

    Within the bound, groups start as late as they can (``just_in_time_after_versions``). That only
    ever lowers the number of outstanding groups, so the bound holds whatever is expected.

    Why admission order keeps η: group n (counting those not dropped) is trained in batch ``n //
    B``, that is at version ``n // B``. It was admitted when fewer than ``(η + 1)·B`` groups were
    outstanding, so at least ``n + 1 - (η + 1)·B`` groups had been released by a live version: that
    version was at least ``n // B - η``, and no token of the group is older. A dropped group frees
    its place and moves later ones forward, which only makes them fresher. A trainer that publishes
    without consuming a batch in between ages the waiting groups; the second gate, checked for every
    group at hand-over, then drops or masks those that have become too old.

    If a version is made from k batches (``batches_per_version``), the same holds with k·B for B,
    and each of the k is trained at the same version: batch number ``n // B`` is trained at version
    ``n // (k·B)``.

    A group may be trained up to n times (``max_uses``), each time within η. Fresh groups come
    first: a used group only completes a batch that the trainer would have to wait for, and only if
    all groups that wait on can still be trained in time after that batch. Further uses take their
    versions out of the same η, so admission leaves room for them: if each group is used n times and
    O are outstanding, a group waits ``n·O/(k·B) - 1`` versions for its first use, and n - 1 more
    for its last. So O is ``(η + 2 - n)·k·B/n``, and at least ``k·B``.

    η = 0 is synchronous training. Peers count ``accepted + running <= (η + v + 1)·B`` (AReaL,
    arXiv:2505.24298), which drifts when a filter rejects groups.
    """

    max_staleness: int
    """Staleness bound η, in weight versions, >= 0."""
    consumption_order: Order = "admission"
    """Consumption order: ``admission``, ``completion``, or a :class:`Window` of admission order."""
    deadline_policy: DeadlinePolicy = "wait"
    split_rollouts_limit: int | None = None
    """Number of running rollouts of split groups, >= 1, above which the next batch waits for some
    of them to end. None: no limit. With a small η, an eighth of a batch's rollouts evens the time
    between batches, so that fewer tokens are masked (docs/scheduling.md)."""
    batches_per_version: int = 1
    """Number of batches that the trainer trains on before each publish, k >= 1, as with gradient
    accumulation. All k are trained at the same version, so a rollout that ends while the trainer
    trains on the first of them need not wait for the next version: fewer tokens are masked, and
    engines and trainer wait less (docs/scheduling.md). The number plans at which version the next
    batch will be trained; what a version is made from is what its publish names. If a
    trainer publishes more often, waiting groups age, and some may become too old."""
    max_uses: int = 1
    """Number of times that a group may be trained on, n >= 1. With more than 1, a trainer that
    would have to wait for generation trains on used groups again, and fewer groups are outstanding
    (docs/scheduling.md). Needs ``max_staleness >= n - 1`` and ``deadline_policy="wait"``."""
    just_in_time_after_versions: int | None = 8
    """Number of versions without a wait of the trainer, >= 1, after which groups start as late as
    they can without the trainer waiting for them
    (:class:`~tidegate.policies.just_in_time.AdmissionPace`); after a wait they start as early as
    the bound allows again. None: always as early as the bound allows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches_per_version < 1:
            raise ConfigError(
                "batches_per_version counts the batches before each publish and must be >= 1, got "
                f"{self.batches_per_version}"
            )
        limit = self.outstanding_groups_limit
        if limit is not None and limit < self.groups_per_version:
            raise ConfigError(
                f"a version of {self.batches_per_version} batches needs {self.groups_per_version} "
                f"outstanding groups; raise outstanding_groups_limit={limit}, or make batches "
                "smaller"
            )
        if self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness counts weight versions and must be >= 0 (0 is synchronous), "
                f"got {self.max_staleness}"
            )
        self._check_uses()
        versions = self.just_in_time_after_versions
        if versions is not None and versions < 1:
            raise ConfigError(
                "just_in_time_after_versions counts weight versions and must be >= 1, or None for "
                f"admission as early as the bound allows; got {versions}"
            )
        if self.consumption_order not in ("admission", "completion") and not isinstance(
            self.consumption_order, Window
        ):
            raise ConfigError(
                f"consumption_order must be 'admission', 'completion' or Window(groups), got "
                f"{self.consumption_order!r}"
            )
        if self.deadline_policy not in get_args(DeadlinePolicy):
            raise ConfigError(
                f"deadline_policy must be 'wait', 'mask', 'split' or 'drop', got "
                f"{self.deadline_policy!r}"
            )
        if self.deadline_policy in ("mask", "drop") and self.consumption_order == "admission":
            raise ConfigError(
                "consumption_order='admission' waits for each straggler, so "
                f"deadline_policy={self.deadline_policy!r} would never apply; set "
                "consumption_order='completion' or a Window"
            )
        limit = self.split_rollouts_limit
        if limit is not None and (limit < 1 or self.deadline_policy != "split"):
            raise ConfigError(
                "split_rollouts_limit counts running rollouts of split groups, so it must be >= 1 "
                f"and needs deadline_policy='split'; got {limit} with {self.deadline_policy!r}"
            )
        if self.deadline_policy == "split" and self.consumption_order != "completion":
            raise ConfigError(
                "deadline_policy='split' lets other groups overtake stragglers, which "
                f"consumption_order={self.consumption_order!r} forbids; set "
                "consumption_order='completion'"
            )

    def _check_uses(self) -> None:
        uses = self.max_uses
        if uses < 1:
            raise ConfigError(f"max_uses counts the uses of a group and must be >= 1, got {uses}")
        if uses > self.max_staleness + 1:
            raise ConfigError(
                f"max_uses={uses} needs max_staleness >= {uses - 1}, got {self.max_staleness}: a "
                "group's next use is at least one version after its last; raise max_staleness, or "
                "lower max_uses"
            )
        if uses > 1 and self.deadline_policy != "wait":
            raise ConfigError(
                f"max_uses={uses} can't be combined with deadline_policy={self.deadline_policy!r}: "
                "each further use ages stragglers by a version, and their tokens would be lost; "
                'set deadline_policy="wait", or max_uses=1'
            )

    @property
    def guaranteed_bound(self) -> int:
        """Bound on staleness: η, or :meth:`Window.staleness_bound` if a window waits for
        stragglers."""
        if isinstance(self.consumption_order, Window) and self.deadline_policy == "wait":
            return self.consumption_order.staleness_bound(
                max_staleness=self.max_staleness, groups_per_batch=self.groups_per_version
            )
        return self.max_staleness

    @property
    def groups_per_version(self) -> int:
        """Number of groups that a version is made from, ``k·B``."""
        return self.batches_per_version * self.groups_per_batch

    @property
    def allowed_groups(self) -> int:
        """Number of groups that may be outstanding, ``(η + 1)·k·B``; fewer with ``max_uses``."""
        versions = self.max_staleness + 2 - self.max_uses
        return max(self.groups_per_version, versions * self.groups_per_version // self.max_uses)

    @property
    def masks_old_tokens(self) -> bool:
        """Whether ``deadline_policy`` is ``mask`` or ``split``."""
        return self.deadline_policy in ("mask", "split")

    @property
    def splits_groups(self) -> bool:
        """Whether ``deadline_policy`` is ``split``."""
        return self.deadline_policy == "split"

    def ready_groups(self, waiting: OutstandingGroups[OutstandingGroup]) -> int:
        """Return the ended groups; in the order of admission, only those before the oldest running
        group."""
        is_ordered = self.consumption_order == "admission"
        return waiting.ended_ahead if is_ordered else len(waiting.ended)

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the next batch according to ``consumption_order`` and ``deadline_policy``, or
        None."""
        if isinstance(self.consumption_order, Window):
            return in_window(waiting, groups, self.consumption_order)
        if self.consumption_order == "admission":
            return in_admission_order(waiting, groups)
        if self.deadline_policy == "split":
            due_version = trainer_version - self.max_staleness
            limit = self.split_rollouts_limit
            return split_at_deadline(
                waiting, groups, due_version=due_version, split_rollouts_limit=limit
            )
        if self.deadline_policy == "wait":
            return by_deadline(
                waiting,
                groups,
                groups_per_version=self.groups_per_version,
                due_version=trainer_version - self.max_staleness,
            )
        return in_completion_order(waiting, groups)

    def refill(
        self,
        waiting: OutstandingGroups[G],
        used: Collection[G],
        *,
        groups: int,
        trainer_version: int,
    ) -> list[G] | None:
        """Return the ended groups that may be trained now, completed by used ones, or None."""
        fresh = self._ended_in_order(waiting, groups)
        oldest = self.oldest_trainable(trainer_version)
        young = (group for group in used if group.oldest_possible_version >= oldest)
        again = list(itertools.islice(young, groups - len(fresh)))
        if not again or len(fresh) + len(again) < groups:
            return None
        return [*fresh, *again] if self._can_wait(waiting, fresh, trainer_version) else None

    def _ended_in_order(self, waiting: OutstandingGroups[G], groups: int) -> list[G]:
        """Return the ended groups that ``consumption_order`` lets be trained now, at most
        ``groups``."""
        if self.consumption_order == "completion":
            return list(itertools.islice(waiting.ended, groups))
        oldest = waiting.oldest_running
        window = 1 if self.consumption_order == "admission" else self.consumption_order.groups
        ended: list[G] = []
        for group in waiting.in_order:
            is_beyond = oldest is not None and group.group_id >= oldest.group_id + window
            if is_beyond or len(ended) == groups:
                break
            if not group.running:
                ended.append(group)
        return ended

    def _can_wait(
        self, waiting: OutstandingGroups[G], trained: Collection[G], trainer_version: int
    ) -> bool:
        """Return whether the groups that are not in ``trained`` can all be trained in time after a
        batch at ``trainer_version`` without them, in any order."""
        left = Counter(waiting.counts_by_version)
        left.subtract([group.oldest_possible_version for group in trained])
        left = +left
        if not left:
            return True
        versions = 1 + (left.total() - 1) // self.groups_per_version
        return trainer_version + versions <= min(left) + self.max_staleness

    def expire(self, waiting: OutstandingGroups[G], *, trainer_version: int) -> list[G]:
        """Return the groups that are too old, if ``deadline_policy`` is ``drop``."""
        if self.deadline_policy != "drop":
            return []
        oldest = self.oldest_trainable(trainer_version)
        return [g for g in waiting.in_order if (v := g.oldest_version) is not None and v < oldest]


@dataclass(frozen=True, kw_only=True)
class OneStepOffPolicy(StalenessPolicy):
    """Trains on one batch while the next is generated entirely by the previous weights.

    A batch's generation starts when the batch before it is handed over. :class:`BoundedStaleness`
    with η = 1 keeps the same bound and starts generation earlier.
    """

    @property
    def guaranteed_bound(self) -> int:
        """Bound on staleness: 1 version."""
        return 1

    @property
    def allowed_groups(self) -> int:
        """Two batches of groups: one in training and one being generated."""
        return 2 * self.groups_per_batch

    def admit(self, waiting: OutstandingGroups[OutstandingGroup], *, training_groups: int) -> int:
        """Return the free admission slots of one batch, once the batch before it is handed over."""
        free = super().admit(waiting, training_groups=training_groups)
        return max(0, min(free, self.groups_per_batch - waiting.admission_slots))

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the whole batch in admission order once all of it has ended, or None."""
        return in_admission_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class Unbounded(StalenessPolicy):
    """Fully asynchronous: trains on groups in completion order, however old their tokens are.

    Only ``outstanding_groups_limit``, which is required, limits how far generation runs ahead. With
    a limit of N groups and B per batch, a group is handed over about ``N/B - 1`` versions after its
    start on average (Little's law), and a straggler much later; its loss needs a correction
    (docs/losses.md). :class:`BoundedStaleness` with ``consumption_order="completion"`` has a bound
    too.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outstanding_groups_limit is None:
            raise ConfigError(
                f"{type(self).__name__} bounds no staleness, so it needs outstanding_groups_limit, "
                "the number of groups that may be running, buffered or in training at once, got "
                f"None; {2 * self.groups_per_batch} (two batches) overlap generation and training"
            )

    @property
    def allowed_groups(self) -> int:
        """Number of groups that may run, be buffered or be in training:
        ``outstanding_groups_limit``."""
        assert self.outstanding_groups_limit is not None
        return self.outstanding_groups_limit

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the groups that ended first, or None if too few have ended."""
        return in_completion_order(waiting, groups)
