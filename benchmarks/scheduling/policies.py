"""Which policies are compared? Each by the name that the table shows.

A line more here is a policy more in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.policies.asynchrony import (
    BoundedStaleness,
    OnDeadline,
    OneStepOffPolicy,
    Order,
    Unbounded,
)
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.staleness import StalenessPolicy

Make = Callable[[int, int], StalenessPolicy]
"""From groups per batch and η."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to bound staleness, for any η."""

    make: Make
    etas: tuple[int, ...]
    """What the table shows."""
    is_colocated: bool = False
    """Whether all machines roll out and train by turns."""
    is_barrier: bool = False
    """Whether nothing runs while weights change, so that all pause modes are one."""
    takes_eta: bool = True
    """Whether η is its own to choose."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its η."""

    name: str
    policy: Policy
    eta: int

    @property
    def is_colocated(self) -> bool:
        """As its policy says."""
        return self.policy.is_colocated

    @property
    def is_barrier(self) -> bool:
        """As its policy says."""
        return self.policy.is_barrier

    def staleness_policy(self, groups_per_batch: int) -> StalenessPolicy:
        """What the run is told."""
        return self.policy.make(groups_per_batch, self.eta)


SYNC = "sync-colocated"
"""What speed-ups are against: the strongest of the simple ones."""


def _bounded(order: Order = "admission", on_deadline: OnDeadline = "wait") -> Make:
    return lambda batch, eta: BoundedStaleness(
        max_staleness=eta,
        groups_per_batch=batch,
        order=order,
        on_deadline=on_deadline,
    )


def _window(batches: int) -> Make:
    return lambda batch, eta: BoundedStaleness(
        max_staleness=eta, groups_per_batch=batch, order=Window(batches * batch)
    )


POLICIES: dict[str, Policy] = {
    SYNC: Policy(
        lambda batch, _: Synchronous(groups_per_batch=batch),
        (0,),
        is_colocated=True,
        is_barrier=True,
        takes_eta=False,
    ),
    "sync": Policy(
        lambda batch, _: Synchronous(groups_per_batch=batch), (0,), is_barrier=True, takes_eta=False
    ),
    "one-step": Policy(
        lambda batch, _: OneStepOffPolicy(groups_per_batch=batch), (1,), takes_eta=False
    ),
    "april": Policy(
        lambda batch, _: OverSampling(groups_per_batch=batch),
        (0,),
        is_colocated=True,
        is_barrier=True,
        takes_eta=False,
    ),
    "tail-packing": Policy(
        lambda batch, _: TailPacking(groups_per_batch=batch),
        (0,),
        is_colocated=True,
        is_barrier=True,
        takes_eta=False,
    ),
    "admission": Policy(_bounded(), (1, 2, 4, 8)),
    "window-B": Policy(_window(1), (3, 4)),
    "window-2B": Policy(_window(2), (2, 4)),
    "deadline": Policy(_bounded("completion"), (2, 4, 8)),
    "mask": Policy(_bounded("completion", "mask"), (4,)),
    "split": Policy(_bounded("completion", "split"), (2, 4, 8)),
    "drop": Policy(_bounded("completion", "drop"), (4,)),
    "completion": Policy(
        lambda batch, eta: Unbounded(
            groups_per_batch=batch, outstanding_groups_limit=(eta + 1) * batch
        ),
        (1, 2, 4),
    ),
}
"""In the order of the table. ``completion`` has admission's bound and none on age."""


def variants(names: list[str], etas: list[int] | None) -> list[Variant]:
    """The policies of these names, each with all its η, or with these where it takes any."""
    found = []
    for name in names:
        policy = POLICIES[name]
        chosen = etas if etas is not None and policy.takes_eta else policy.etas
        found += [Variant(name, policy, eta) for eta in chosen]
    return found
