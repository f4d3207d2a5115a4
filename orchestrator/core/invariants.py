"""What may no sequence of events break? Checked after each of them in tests, and by simulations.

It looks at a core, and changes nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.orchestrator.core.core import Core


def check(core: "Core") -> None:
    """Verify all of them.

    Raises:
        AssertionError: one is broken; a bug of ours, never of the user's.
    """
    for ledger in (core.ledger, core.evaluation_ledger):
        snapshot = ledger.snapshot()
        assert snapshot.error == 0, f"ledger is off by {snapshot.error} tokens: {snapshot}"
    limit = core.policy.outstanding_groups_ceiling
    assert core.outstanding_groups <= limit, f"{core.outstanding_groups} groups > {limit}"
    oldest, bound = max(core.trained.staleness, default=0), core.policy.guaranteed_bound
    assert bound is None or oldest <= bound, f"trained at staleness {oldest}, not {bound}"
    running = (r for r, g in core.groups.running.values() if not g.is_evaluation)
    in_flight = sum(rollout.sampled_tokens for rollout in running)
    assert in_flight == core.ledger.in_flight, f"{in_flight} != {core.ledger.in_flight}"
