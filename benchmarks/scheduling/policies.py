"""Which policies are compared? Settings of a run, by the name that the table shows.

A line more here is a policy more in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.scheduling.workloads import Workload

Settings = Callable[[Workload, int], dict[str, Any]]
"""From a workload and η to what :class:`~tidegate.RunSettings` is told."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to bound staleness, for any η."""

    settings: Settings
    etas: tuple[int, ...]
    """What the table shows."""
    is_colocated: bool = False
    """Whether all machines roll out and train by turns."""
    is_barrier: bool = False
    """Whether nothing runs while weights change, so that all pause modes are one."""


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

    def settings(self, workload: Workload) -> dict[str, Any]:
        """What the run is told of staleness."""
        return self.policy.settings(workload, self.eta)


SYNC = "sync-colocated"
"""What speed-ups are against: the strongest of the simple ones."""


def _admission(workload: Workload, eta: int) -> dict[str, Any]:
    return {"max_staleness": eta}


POLICIES: dict[str, Policy] = {
    SYNC: Policy(_admission, (0,), is_colocated=True, is_barrier=True),
    "sync": Policy(_admission, (0,), is_barrier=True),
    "admission": Policy(_admission, (1, 2, 4, 8)),
}
"""In the order of the table."""


def variants(names: list[str], etas: list[int] | None) -> list[Variant]:
    """The policies of these names, each with all its η, or with these."""
    return [
        Variant(name, POLICIES[name], eta)
        for name in names
        for eta in (POLICIES[name].etas if etas is None else etas)
    ]
