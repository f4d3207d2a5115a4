"""Efficiency of an agentic run by the ratio of trajectories to engine slots, in virtual time.

A trajectory that waits for its tool frees its slot, so engines are busy only if there are more
trajectories than slots. The peer is the published model of the same machines, lengths and tools at
the same bound (twelve engines of 64 slots, 20 turns, tools of 4 s in the median with a long tail),
which has a figure for each ratio; the last row has as many trajectories as admission allows.
``benchmarks.agents`` imports it. Built on the simulated run of :mod:`run`.
"""

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.scheduling.policies import POLICIES, Variant
from benchmarks.scheduling.run import run_once
from benchmarks.scheduling.workloads import ROLLOUT_MACHINES, WORKLOADS
from benchmarks.table import Row, compared, show

WORKLOAD = WORKLOADS["agentic"]
MODEL = {1.0: 0.52, 1.5: 0.71, 2.0: 0.88, 3.0: 0.95}
"""The model's efficiency by trajectories over slots, at a bound of 4 versions."""
ETA = 4
POLICY = "admission"
"""Default policy: admission order, which is stricter than the model's order."""
STRICT = (POLICY, "deadline", "window-B", "window-2B")
"""Policies that bound the age of every token. ``deadline`` is ``order="completion"`` with the same
bound; windows may exceed it, see docs/scheduling.md."""


def rows(
    policy: str = POLICY, seed: int = 0, shares: Sequence[float] = tuple(MODEL)
) -> Iterator[Row]:
    """Return ``efficiency_AT_ONCEx``: trained tokens per second over those of machines never
    idle."""
    slots = ROLLOUT_MACHINES * WORKLOAD.costs.slots
    for share in shares:
        ours = efficiency(round(share * slots), policy, seed)
        yield compared(f"efficiency_{share:g}x", "of 1", ours, MODEL[share])
    if len(shares) == len(MODEL):
        yield Row("efficiency_unlimited", efficiency(None, policy, seed), "of 1")


def efficiency(trajectories: int | None, policy: str = POLICY, seed: int = 0) -> float:
    """Return the efficiency of one run, which is deterministic."""
    variant = Variant(policy, POLICIES[policy], ETA)
    tally = run_once(WORKLOAD, variant, mode="keep", seed=seed, trajectories=trajectories).tally
    return tally.trained_tokens / tally.at_s / WORKLOAD.bound_tokens_per_s


def main() -> None:
    """Parse the options, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=STRICT, default=POLICY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", type=float, nargs="+", choices=tuple(MODEL), default=[*MODEL])
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    found = rows(arguments.policy, arguments.seed, arguments.shares)
    show(list(found), as_json=arguments.json)


if __name__ == "__main__":
    main()
