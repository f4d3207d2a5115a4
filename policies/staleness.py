"""How old may a sample be? The contract of a policy that bounds it: admit, select, expire.

A policy knows counts and versions only: not what a group is made of, nor where it runs. It holds no
state that changes, so the same history gives the same decisions, which is what makes a run
replayable.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self, TypeVar

from tidegate.errors import ConfigError, PolicyBroken


class WaitingGroup(Protocol):
    """What a policy sees of a group that the trainer has not had."""

    group_id: int
    """Counts groups in the order of admission."""
    running: int
    """Rollouts that are going on; 0: it has ended, and may be trained on."""
    version_floor: int
    """No token of it is older, nor will be."""
    is_retaken: bool
    """Whether its task was taken before, by a group that was given up."""

    @property
    def is_rest(self) -> bool:
        """Whether the others of its rollouts have been trained: then it holds no place."""

    @property
    def finished(self) -> int:
        """Rollouts that have their reward."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled one of its tokens; None before the first."""


G = TypeVar("G", bound=WaitingGroup)
G_co = TypeVar("G_co", bound=WaitingGroup, covariant=True)


class Waiting(Protocol[G_co]):
    """Groups that are running or buffered."""

    @property
    def in_order(self) -> Collection[G_co]:
        """All of them, in the order of admission."""

    @property
    def ended(self) -> Collection[G_co]:
        """Those that may be trained on, in the order in which they ended."""

    @property
    def oldest_running(self) -> G_co | None:
        """Of those that have not ended, the one admitted first."""

    @property
    def ended_ahead(self) -> int:
        """How many were admitted before that one; all that have ended if none is running."""

    @property
    def floors(self) -> Mapping[int, int]:
        """Versions, and of how many groups each is the :attr:`~WaitingGroup.version_floor`."""

    @property
    def ended_floors(self) -> Mapping[int, int]:
        """The same of those that have ended."""

    @property
    def places(self) -> int:
        """Groups that admission counts: all but rests."""

    @property
    def returned_tasks(self) -> int:
        """Tasks of groups that were given up, to be taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyness:
    """How far from its samples the policy in training was, as the trainer measured it."""

    effective_sample_size: float | None = None
    """A share, in (0, 1]."""
    mismatch_kl: float | None = None
    """In nats per token, >= 0."""

    def __post_init__(self) -> None:
        ess, kl = self.effective_sample_size, self.mismatch_kl
        if ess is not None and not 0 < ess <= 1:
            raise ConfigError(f"effective_sample_size is a share, in (0, 1]; got {ess}")
        if kl is not None and not kl >= 0:
            raise ConfigError(f"mismatch_kl is in nats per token, >= 0; got {kl}")


@dataclass(frozen=True, kw_only=True)
class StalenessPolicy:
    """Who may start, what is trained on next, and what becomes too old.

    To write one, say how many groups may be outstanding, and override what should be different:
    :meth:`select` must; the others need not. What a policy promises is checked after every event of
    a simulated run, and before every batch of a real one.
    """

    groups_per_batch: int
    """B."""
    outstanding_groups_limit: int | None = None
    """Fewer groups at once than the policy would allow, where environments or memory ask for it."""

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

    # ------------------------------------------------------------ what it promises

    @property
    def guaranteed_bound(self) -> int | None:
        """The staleness that no trained token exceeds; None: it promises none."""
        return None

    @property
    def allowed_groups(self) -> int:
        """How many groups may be outstanding, but for ``outstanding_groups_limit``."""
        raise NotImplementedError(f"{type(self).__name__} must say how many groups it allows")

    @cached_property
    def outstanding_groups_max(self) -> int:
        """Groups that may be running, buffered or in training at once; never more than so many.

        Worked out once: it is asked for after every event.
        """
        return min(self.allowed_groups, self.outstanding_groups_limit or self.allowed_groups)

    @property
    def outstanding_groups_ceiling(self) -> int:
        """What ``outstanding_groups_max`` never rises above, if the policy adapts."""
        return self.outstanding_groups_max

    @property
    def pauses_generation(self) -> bool:
        """Whether engines stand still from a batch's hand-over until the version made from it."""
        return False

    # ------------------------------------------------------------ admit

    def admit(self, waiting: Waiting[WaitingGroup], *, training_groups: int) -> int:
        """How many more groups may start now.

        ``training_groups`` were handed over, and the version made from them isn't live on every
        engine yet. It is asked again when a group has come, ended or gone, not for each rollout of
        one that goes on.
        """
        return max(0, self.outstanding_groups_max - waiting.places - training_groups)

    def prefers_returned(self, waiting: Waiting[WaitingGroup]) -> bool:
        """Whether the next group takes a task that was given up rather than a new one."""
        return True

    def can_fill_batch(self, *, unpublished_groups: int) -> bool:
        """Whether a batch can still fill while ``unpublished_groups`` wait for a publish.

        Groups handed to the trainer hold their places until then; once fewer than B places are
        left, asking for another batch would wait for ever.
        """
        return self.outstanding_groups_max - unpublished_groups >= self.groups_per_batch

    # ------------------------------------------------------------ select

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """The next batch: so many groups that have ended, and any rests that have; None: not yet.

        It is asked whenever what it could see has changed, so it should say no quickly.
        """
        raise NotImplementedError(f"{type(self).__name__} must select a batch")

    # ------------------------------------------------------------ expire

    def oldest_trainable(self, trainer_version: int) -> int:
        """Tokens of older versions are not trained on: the second gate, queue time included."""
        bound = self.guaranteed_bound
        return 0 if bound is None else trainer_version - bound

    @property
    def splits_groups(self) -> bool:
        """Whether it may select a group that goes on: then its rollouts that have ended are trained
        now, and the rest when they have, compared with all of the group."""
        return False

    @property
    def masks_old_tokens(self) -> bool:
        """Whether tokens that are too old are masked; else their whole group is dropped."""
        return False

    def expire(self, waiting: Waiting[G], *, trainer_version: int) -> list[G]:
        """Groups to be given up, after a hand-over or a new version; their tasks are taken anew."""
        return []

    @property
    def expiry_reason(self) -> str:
        """What the ledger calls them."""
        return "stale"

    # ------------------------------------------------------------ adapt

    @property
    def adaptation(self) -> int | None:
        """What :meth:`observed` has changed, for a run that goes on after a crash."""
        return None

    def adapted(self, adaptation: int) -> Self:
        """The policy with :attr:`adaptation` as it was."""
        return self

    def observed(self, measured: OffPolicyness) -> Self:
        """The policy from now on, after what the trainer has measured."""
        return self


def refuse_selection(policy: StalenessPolicy, batch: Sequence[WaitingGroup], wanted: int) -> None:
    """Check what a policy has selected, before anything is done: a user's may be wrong.

    Raises:
        PolicyBroken: these are too few, too many, or go on.
    """
    name = type(policy).__name__
    places = len(batch) - sum([group.is_rest for group in batch])
    if places != wanted or len({group.group_id for group in batch}) != len(batch):
        raise PolicyBroken(
            f"{name}.select() returned {places} groups, asked for {wanted} different ones; "
            f"return exactly so many, or None to wait"
        )
    for group in batch:
        if not group.running:
            continue
        if not policy.splits_groups or not group.finished or group.is_rest:
            raise PolicyBroken(
                f"{name}.select() chose group {group.group_id}, {group.running} of whose rollouts "
                f"go on; choose from waiting.ended"
            )
