"""How many trajectories does an agent's run need beside its engines' slots? Rows, in virtual time.

A trajectory that waits for its tool leaves its slot to another, so engines are busy only if there
are more trajectories than slots. The peer is the published model of the same machines, lengths and
tools at the same bound (twelve engines of 64 slots, 20 turns, tools of 4 s in the median with a
long tail), which has a figure for each share of trajectories to slots; the last row has as many as
admission lets in.
"""

from collections.abc import Iterator

from benchmarks.scheduling.policies import POLICIES, Variant
from benchmarks.scheduling.run import run_once
from benchmarks.scheduling.workloads import ROLLOUT_MACHINES, WORKLOADS
from benchmarks.table import Row, compared

WORKLOAD = WORKLOADS["agentic"]
MODEL = {1.0: 0.52, 1.5: 0.71, 2.0: 0.88, 3.0: 0.95}
"""Efficiency by trajectories over slots, at a bound of 4 versions."""
ETA = 4
POLICY = "admission"
"""The default: consumed in the order of admission, which is stricter than the model's."""


def rows() -> Iterator[Row]:
    """``efficiency_AT_ONCEx``: trained tokens per second over those of machines never idle."""
    slots = ROLLOUT_MACHINES * WORKLOAD.costs.slots
    for share, theirs in MODEL.items():
        ours = efficiency(round(share * slots))
        yield compared(f"efficiency_{share:g}x", "of 1", ours, theirs)
    yield Row("efficiency_unlimited", efficiency(None), "of 1")


def efficiency(trajectories: int | None) -> float:
    """Of one run; the same each time."""
    variant = Variant(POLICY, POLICIES[POLICY], ETA)
    tally = run_once(WORKLOAD, variant, mode="keep", trajectories=trajectories).tally
    return tally.trained_tokens / tally.at_s / WORKLOAD.bound_tokens_per_s
