"""How asynchronous may a run be? From one batch in advance to no bound, each with what it promises.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

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
from tidegate.policies.staleness import G, StalenessPolicy, Waiting, WaitingGroup

Order = Literal["admission", "completion"] | Window
OnDeadline = Literal["wait", "mask", "split", "drop"]


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
    * ``mask``: others overtake it (in a window, the next few), and of its tokens just those that
      are too old are masked.
    * ``split``: what has ended of it, if that is half or more, is trained in time; the rest when it
      has ended, compared with all of the group, its tokens that are too old masked. It costs the
      least (docs/scheduling.md): stragglers hold up neither engines nor siblings.
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
        if self.on_deadline not in get_args(OnDeadline):
            raise ConfigError(
                f"on_deadline must be 'wait', 'mask', 'split' or 'drop', got {self.on_deadline!r}"
            )
        if self.on_deadline in ("mask", "drop") and self.order == "admission":
            raise ConfigError(
                f"in the order of admission each straggler is waited for, so "
                f"on_deadline={self.on_deadline!r} would never happen; give order='completion' or "
                f"a Window"
            )
        if self.on_deadline == "split" and self.order != "completion":
            raise ConfigError(
                f"on_deadline='split' has stragglers overtaken, which order={self.order!r} "
                f"forbids; give order='completion'"
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
        return self.on_deadline in ("mask", "split")

    @property
    def splits_groups(self) -> bool:
        """As ``on_deadline`` says."""
        return self.on_deadline == "split"

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """As ``order`` says; see the class."""
        if isinstance(self.order, Window):
            return in_window(waiting, groups, self.order)
        if self.order == "admission":
            return in_admission_order(waiting, groups)
        if self.on_deadline == "split":
            due_floor = trainer_version - self.max_staleness
            return split_at_deadline(waiting, groups, due_floor=due_floor)
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

    def admit(self, waiting: Waiting[WaitingGroup], *, training_groups: int) -> int:
        """A whole batch, once the one before is handed over."""
        free = super().admit(waiting, training_groups=training_groups)
        return max(0, min(free, self.groups_per_batch - waiting.places))

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
