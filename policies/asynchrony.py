"""Which policies of staleness are there? From synchronous to unbounded, each with what it promises.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

from tidegate.errors import ConfigError
from tidegate.policies.consumption import (
    Window,
    by_deadline,
    in_admission_order,
    in_completion_order,
    in_window,
)
from tidegate.policies.staleness import G, OffPolicyness, StalenessPolicy, Waiting

Order = Literal["admission", "completion"] | Window
OnDeadline = Literal["wait", "mask", "drop"]


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(StalenessPolicy):
    """No token older than η versions is trained on, and none need be wasted to keep it so.

    Two gates, not one. **Admission** counts what is outstanding: groups running, buffered, or in
    training until the version made from them is live on every engine. That never exceeds
    ``(η + 1)·B``. Alone it bounds no sample's age: in the order of completion the oldest get about
    twice as old. **Consumption** completes it, by what is done about a group whose tokens come of
    age before it has ended (``on_deadline``):

    * ``wait``: the batch waits for it. In the order of admission that is each straggler; in the
      order of completion only one that could not be trained in time after this batch
      (:func:`~tidegate.policies.consumption.by_deadline`); in a window, each that others may not
      overtake any more, and the bound is ``η + 1 + ⌊(W - 2)/B⌋``.
    * ``mask``: others overtake it, and of its tokens just those that are too old are masked.
    * ``drop``: it is given up as soon as it is too old, and its task is taken anew. That wastes
      what it had, and biases training to short answers.

    Why admission's order keeps η: group n (counting those not dropped) is trained in batch
    ``n // B``, that is at version ``n // B``. It was admitted when fewer than ``(η + 1)·B`` groups
    were outstanding, so at least ``n + 1 - (η + 1)·B`` groups had been released by a live version:
    that version was at least ``n // B - η``, and no token of the group is older. A dropped group
    gives its place back and moves later ones forward, which only makes them fresher. A trainer that
    publishes without having had a batch in between ages what waits; then the second gate, asked of
    every group before it is handed over, drops or masks what has become too old.

    η = 0 is synchronous training. Peers count ``accepted + running <= (η + v + 1)·B`` (AReaL,
    arXiv:2505.24298), which drifts when a filter rejects.
    """

    max_staleness: int
    """η, in weight versions."""
    order: Order = "admission"
    """In which groups are handed over: ``admission``, ``completion``, or within a window."""
    on_deadline: OnDeadline = "wait"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness counts weight versions and must be >= 0 (0 is synchronous), "
                f"got {self.max_staleness}"
            )
        if self.order not in ("admission", "completion") and not isinstance(self.order, Window):
            raise ConfigError(
                f"order must be 'admission', 'completion' or Window(groups), got {self.order!r}"
            )
        if self.on_deadline not in ("wait", "mask", "drop"):
            raise ConfigError(
                f"on_deadline must be 'wait', 'mask' or 'drop', got {self.on_deadline!r}"
            )

    @property
    def guaranteed_bound(self) -> int:
        """η; or what the window allows, if it waits rather than masks or drops."""
        if isinstance(self.order, Window) and self.on_deadline == "wait":
            return self.order.staleness_bound(
                max_staleness=self.max_staleness, groups_per_batch=self.groups_per_batch
            )
        return self.max_staleness

    @property
    def allowed_groups(self) -> int:
        """``(η + 1)·B``."""
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def masks_old_tokens(self) -> bool:
        """As ``on_deadline`` says."""
        return self.on_deadline == "mask"

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """As ``order`` says; see the class."""
        if isinstance(self.order, Window):
            return in_window(waiting, groups, self.order)
        if self.order == "admission":
            return in_admission_order(waiting, groups)
        if self.on_deadline == "wait":
            return by_deadline(
                waiting,
                groups,
                groups_per_batch=self.groups_per_batch,
                due_floor=trainer_version - self.max_staleness,
            )
        return in_completion_order(waiting, groups)

    def expire(self, waiting: Waiting[G], *, trainer_version: int) -> list[G]:
        """What has become too old, where that is dropped."""
        if self.on_deadline != "drop":
            return []
        oldest = self.oldest_trainable(trainer_version)
        return [g for g in waiting.in_order if (v := g.oldest_version) is not None and v < oldest]


@dataclass(frozen=True, kw_only=True)
class Synchronous(StalenessPolicy):
    """Every token is sampled by the weights that are trained on it: generate, then train."""

    @property
    def guaranteed_bound(self) -> int:
        """0."""
        return 0

    @property
    def allowed_groups(self) -> int:
        """One batch."""
        return self.groups_per_batch

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """All there are."""
        return in_admission_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class OneStepOffPolicy(StalenessPolicy):
    """Train on one batch while the next one is generated, whole, by the weights before.

    The pipeline of one step: a batch's generation starts when the batch before it is handed over.
    :class:`BoundedStaleness` with η = 1 keeps the same bound and starts earlier.
    """

    @property
    def guaranteed_bound(self) -> int:
        """1."""
        return 1

    @property
    def allowed_groups(self) -> int:
        """One batch in training and one being generated."""
        return 2 * self.groups_per_batch

    def admit(self, *, waiting_groups: int, training_groups: int) -> int:
        """A whole batch, once the one before is handed over."""
        free = self.outstanding_groups_max - waiting_groups - training_groups
        return max(0, min(free, self.groups_per_batch - waiting_groups))

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """All there are."""
        return in_admission_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class Unbounded(StalenessPolicy):
    """Whatever ends first is trained on first, however old: fully asynchronous, no promise.

    What it admits is bounded all the same, by ``outstanding_groups_limit``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outstanding_groups_limit is None:
            raise ConfigError(
                f"{type(self).__name__} bounds no age, so it needs outstanding_groups_limit: how "
                f"many groups may be running, buffered or in training at once"
            )

    @property
    def allowed_groups(self) -> int:
        """As many as ``outstanding_groups_limit`` says."""
        assert self.outstanding_groups_limit is not None
        return self.outstanding_groups_limit

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """Those that ended first."""
        return in_completion_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class OverSampling(StalenessPolicy):
    """More groups are started than a batch takes; those left over are carried to the next.

    Active partial rollouts (APRIL, arXiv:2509.18521): when B groups have ended, generation pauses,
    running turns are aborted, and they go on from their tokens under the next version, before any
    new group. Made for engines and trainer that share their devices. It bounds no age: a group
    that never is among the first is carried on.
    """

    factor: float = 2.0
    """Groups outstanding, in batches."""

    @property
    def pauses_generation(self) -> bool:
        """They do."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ConfigError(f"factor must be >= 1, or no batch ever fills; got {self.factor}")

    @property
    def allowed_groups(self) -> int:
        """``factor·B``."""
        return round(self.factor * self.groups_per_batch)

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """Those that ended first."""
        return in_completion_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class AdaptiveStaleness(BoundedStaleness):
    """Moves η between two limits, so that samples are no further off-policy than they should be.

    The trainer reports what it measures; a report that misses the target lowers η by one, and one
    that leaves ``slack`` raises it by one. What it guarantees is the upper limit.
    """

    max_staleness: int = 1
    """η, to begin with."""
    lowest: int = 0
    highest: int = 8
    effective_sample_size_min: float | None = None
    """The target, a share in (0, 1)."""
    mismatch_kl_max: float | None = None
    """The target, in nats per token."""
    slack: float = 0.1
    """η is raised only while what was measured is better than the target by this share of the
    target's distance from on-policy, so that it doesn't swing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lowest <= self.max_staleness <= self.highest:
            raise ConfigError(
                f"lowest <= max_staleness <= highest must hold, got {self.lowest}, "
                f"{self.max_staleness} and {self.highest}"
            )
        ess, kl = self.effective_sample_size_min, self.mismatch_kl_max
        if (ess is None) == (kl is None):
            raise ConfigError(
                "AdaptiveStaleness holds one target: give effective_sample_size_min or "
                "mismatch_kl_max"
            )
        if ess is not None and not 0 < ess < 1:
            raise ConfigError(f"effective_sample_size_min is a share in (0, 1), got {ess}")
        if kl is not None and kl <= 0:
            raise ConfigError(f"mismatch_kl_max must be > 0 nats per token, got {kl}")

    @property
    def guaranteed_bound(self) -> int:
        """That of the highest η."""
        highest = replace(self, max_staleness=self.highest)
        return super(AdaptiveStaleness, highest).guaranteed_bound

    @property
    def outstanding_groups_ceiling(self) -> int:
        """Under the highest η: lowering η takes back no group that has started."""
        return replace(self, max_staleness=self.highest).outstanding_groups_max

    @property
    def adaptation(self) -> int:
        """η."""
        return self.max_staleness

    def adapted(self, adaptation: int) -> Self:
        """With this η, or the nearest within the limits."""
        eta = min(self.highest, max(self.lowest, adaptation))
        return self if eta == self.max_staleness else replace(self, max_staleness=eta)

    def observed(self, measured: OffPolicyness) -> Self:
        """One step towards the target."""
        return self.adapted(self.max_staleness + self._step(measured))

    def _step(self, measured: OffPolicyness) -> int:
        if self.effective_sample_size_min is not None:
            if measured.effective_sample_size is None:
                return 0
            used = (1 - measured.effective_sample_size) / (1 - self.effective_sample_size_min)
        else:
            assert self.mismatch_kl_max is not None
            if measured.mismatch_kl is None:
                return 0
            used = measured.mismatch_kl / self.mismatch_kl_max
        if used > 1:
            return -1
        return 1 if used < 1 - self.slack else 0
