"""The compared staleness policies, by the name that the table shows.

To add a policy to the table, add an entry to :data:`POLICIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.policies.asynchrony import (
    BoundedStaleness,
    DeadlinePolicy,
    OneStepOffPolicy,
    Order,
    Unbounded,
)
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.staleness import StalenessPolicy

Make = Callable[[int, int], StalenessPolicy]
"""Creates a policy from groups per batch and η."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A family of staleness policies, parametrised by η."""

    make: Make
    etas: tuple[int, ...]
    """Values of η that the table shows."""
    is_colocated: bool = False
    """Whether all machines alternate between rollout and training."""
    is_barrier: bool = False
    """Whether nothing runs while weights change, so that all pause modes are equal."""
    takes_eta: bool = True
    """Whether the policy has a free parameter η."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with a value of η."""

    name: str
    policy: Policy
    eta: int
    is_eager: bool = False
    """Whether groups start as early as the bound allows, rather than just in time."""

    def staleness_policy(self, groups_per_batch: int) -> StalenessPolicy:
        """Create the policy for a run."""
        policy = self.policy.make(groups_per_batch, self.eta)
        if self.is_eager and isinstance(policy, BoundedStaleness):
            return replace(policy, just_in_time_after_versions=None)
        return policy


SYNC = "sync-colocated"
"""Baseline of the speed-ups: the fastest of the simple policies."""


def _bounded(order: Order = "admission", deadline_policy: DeadlinePolicy = "wait") -> Make:
    return lambda batch, eta: BoundedStaleness(
        max_staleness=eta,
        groups_per_batch=batch,
        consumption_order=order,
        deadline_policy=deadline_policy,
    )


def _colocated(make: Make) -> Policy:
    return Policy(make, (0,), is_colocated=True, is_barrier=True, takes_eta=False)


def _window(batches: int) -> Make:
    return lambda batch, eta: BoundedStaleness(
        max_staleness=eta, groups_per_batch=batch, consumption_order=Window(batches * batch)
    )


POLICIES: dict[str, Policy] = {
    SYNC: _colocated(lambda batch, _: Synchronous(groups_per_batch=batch)),
    "sync": Policy(
        lambda batch, _: Synchronous(groups_per_batch=batch), (0,), is_barrier=True, takes_eta=False
    ),
    "one-step": Policy(
        lambda batch, _: OneStepOffPolicy(groups_per_batch=batch), (1,), takes_eta=False
    ),
    "april": _colocated(lambda batch, _: OverSampling(groups_per_batch=batch)),
    "tail-packing": _colocated(lambda batch, _: TailPacking(groups_per_batch=batch)),
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
"""Policies in the order of the table. ``completion`` has the admission bound, but no bound on
staleness."""


def variants(names: list[str], etas: list[int] | None, *, is_eager: bool) -> list[Variant]:
    """Return the named policies with each of their η, or with ``etas`` where η is free."""
    found = []
    for name in names:
        policy = POLICIES[name]
        chosen = etas if etas is not None and policy.takes_eta else policy.etas
        found += [Variant(name, policy, eta, is_eager) for eta in chosen]
    return found
