"""Interface of staleness policies: which groups to admit, select for a batch, and expire.

The orchestrator's core calls a policy when groups, batches or versions change, not at each turn or
step. A policy sees only counts and versions, not a group's contents or engine, and it is immutable,
so the same history gives the same decisions and a run can be replayed.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from tidegate.errors import ConfigError, PolicyBroken


class OutstandingGroup(Protocol):
    """A policy's view of a group that was admitted and not yet handed to the trainer."""

    group_id: int
    """Number of the group in the order of admission."""
    running: int
    """Number of rollouts still generating; 0: the group has ended and may be trained on."""
    oldest_possible_version: int
    """Lower bound on the version of any of the group's tokens, present and future."""
    is_retaken: bool
    """Whether the group's task was discarded before with another group, and taken again."""

    @property
    def is_split_remainder(self) -> bool:
        """Whether this is a split remainder: the group's other rollouts were trained. It takes
        no admission slot."""

    @property
    def finished(self) -> int:
        """Number of rollouts that have their reward."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that sampled one of the group's tokens; None before the first token."""


G = TypeVar("G", bound=OutstandingGroup)
G_co = TypeVar("G_co", bound=OutstandingGroup, covariant=True)


class OutstandingGroups(Protocol[G_co]):
    """The groups that are running or buffered, indexed for a policy's queries."""

    @property
    def in_order(self) -> Collection[G_co]:
        """All waiting groups, in the order of admission."""

    @property
    def ended(self) -> Collection[G_co]:
        """Groups that have ended and may be trained on, in the order in which they ended."""

    @property
    def oldest_running(self) -> G_co | None:
        """The running group that was admitted first, or None."""

    @property
    def ended_ahead(self) -> int:
        """Number of groups admitted before ``oldest_running``; all ended groups if none is
        running."""

    @property
    def counts_by_version(self) -> Mapping[int, int]:
        """Number of groups by :attr:`~OutstandingGroup.oldest_possible_version`."""

    @property
    def ended_counts_by_version(self) -> Mapping[int, int]:
        """Number of ended groups by :attr:`~OutstandingGroup.oldest_possible_version`."""

    @property
    def admission_slots(self) -> int:
        """Number of groups that count for admission: all but split remainders."""

    @property
    def returned_tasks(self) -> int:
        """Number of tasks that were returned from discarded groups and wait to be taken again."""


@dataclass(frozen=True, kw_only=True)
class StalenessPolicy:
    """Base class of staleness policies: decides which groups start, are trained next, and expire.

    To write one, override :attr:`allowed_groups` and :meth:`select`, and any other method that
    should differ. The promises of a policy are checked after every event of a simulated run; a real
    one refuses only a selection that no batch can be made of.
    """

    groups_per_batch: int
    """Number of groups per batch, B, >= 1."""
    outstanding_groups_limit: int | None = None
    """Largest number of groups that may be outstanding (running, buffered, or in training until
    their version is live), >= B, where environments or memory hold fewer than the policy allows.
    None: as many as the policy allows."""

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1:
            raise ConfigError(f"groups_per_batch must be >= 1, got {self.groups_per_batch}")
        limit = self.outstanding_groups_limit
        if limit is not None and limit < self.groups_per_batch:
            raise ConfigError(
                f"a batch of {self.groups_per_batch} groups can never fill when only {limit} may "
                f"be outstanding; raise outstanding_groups_limit to at least groups_per_batch "
                f"({self.groups_per_batch}), or make batches smaller"
            )

    # ------------------------------------------------------------ bounds

    @property
    def guaranteed_bound(self) -> int | None:
        """Largest staleness of any trained token, in versions; None if the policy has no bound."""
        return None

    @property
    def allowed_groups(self) -> int:
        """Number of groups that may be outstanding, before ``outstanding_groups_limit`` applies."""
        raise NotImplementedError(f"{type(self).__name__} must define allowed_groups")

    @cached_property
    def outstanding_groups_max(self) -> int:
        """Maximum number of groups running, buffered or in training at once.

        Cached, because it is read with every change of groups.
        """
        return min(self.allowed_groups, self.outstanding_groups_limit or self.allowed_groups)

    @property
    def batches_per_version(self) -> int:
        """Number of batches that the trainer trains on before each publish."""
        return 1

    @property
    def max_uses(self) -> int:
        """Number of times that a group may be trained on, its first use included."""
        return 1

    @property
    def pauses_generation(self) -> bool:
        """Whether engines pause from a batch's hand-over until the version made from it is live."""
        return False

    # ------------------------------------------------------------ admit

    def admit(self, waiting: OutstandingGroups[OutstandingGroup], *, training_groups: int) -> int:
        """Return how many more groups may start now.

        ``training_groups`` were handed over, and the version made from them is not yet live on
        every engine. Called when a group starts, ends or is discarded, not for each rollout of a
        running group.
        """
        return max(0, self.outstanding_groups_max - waiting.admission_slots - training_groups)

    def prefers_returned(self, waiting: OutstandingGroups[OutstandingGroup]) -> bool:
        """Return whether the next group takes a returned task rather than a new one."""
        return True

    def can_fill_batch(self, *, unpublished_groups: int) -> bool:
        """Return whether a batch can still fill while ``unpublished_groups`` wait for a publish.

        Groups handed to the trainer hold their admission slots until then. Once fewer than B slots
        are free, a request for another batch would wait forever.
        """
        return self.outstanding_groups_max - unpublished_groups >= self.groups_per_batch

    @property
    def just_in_time_after_versions(self) -> int | None:
        """Number of versions without a wait of the trainer after which groups start later, see
        :class:`~tidegate.policies.just_in_time.AdmissionPace`; None: as early as :meth:`admit`
        says."""
        return None

    def ready_groups(self, waiting: OutstandingGroups[OutstandingGroup]) -> int:
        """Return the number of ended groups that the next batches could take now."""
        return len(waiting.ended)

    # ------------------------------------------------------------ select

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the next batch: ``groups`` ended groups and any ended remainders; None to wait.

        Called whenever its inputs have changed, so it should return None quickly.
        """
        raise NotImplementedError(f"{type(self).__name__} must select a batch")

    def refill(
        self,
        waiting: OutstandingGroups[G],
        used: Collection[G],
        *,
        groups: int,
        trainer_version: int,
    ) -> list[G] | None:
        """Return a batch of ``groups`` groups that ``used`` groups complete; None to wait.

        Called while the trainer waits and :meth:`select` has found no batch. ``used``: groups that
        were trained on and may be again, in the order of their last use; not empty.
        """
        return None

    # ------------------------------------------------------------ expire

    def oldest_trainable(self, trainer_version: int) -> int:
        """Return the oldest version that may be trained on. Checked at hand-over, queue time
        included."""
        bound = self.guaranteed_bound
        return 0 if bound is None else trainer_version - bound

    @property
    def splits_groups(self) -> bool:
        """Whether :meth:`select` may return a running group with an ended rollout: its ended
        rollouts are trained now, and the remainder later, with advantages relative to those that
        were trained first."""
        return False

    @property
    def masks_old_tokens(self) -> bool:
        """Whether tokens that are too old are masked; otherwise their whole group is dropped."""
        return False

    def expire(self, waiting: OutstandingGroups[G], *, trainer_version: int) -> list[G]:
        """Return groups to discard after a hand-over or a new version; their tasks are taken
        again."""
        return []

    @property
    def expiry_reason(self) -> str:
        """Ledger reason of groups that :meth:`expire` discards."""
        return "stale"


def refuse_selection(
    policy: StalenessPolicy, batch: Sequence[OutstandingGroup], groups_expected: int
) -> None:
    """Validate a policy's selection before it takes effect, because users write policies too.

    Raises:
        PolicyBroken: the batch has too few, too many or duplicate groups, or a running group.
    """
    name = type(policy).__name__
    selected = len(batch) - sum([group.is_split_remainder for group in batch])
    if selected != groups_expected or len({group.group_id for group in batch}) != len(batch):
        raise PolicyBroken(
            f"{name}.select() returned {selected} groups; return exactly {groups_expected} "
            "distinct groups, or None to wait"
        )
    for group in batch:
        if not group.running:
            continue
        if not policy.splits_groups or not group.finished:
            raise PolicyBroken(
                f"{name}.select() chose group {group.group_id}, {group.running} of whose rollouts "
                f"are running; choose from waiting.ended"
            )
