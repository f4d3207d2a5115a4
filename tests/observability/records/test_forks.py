"""Counts of forked rollouts, by row of a recorded run and by row of a running one."""

from tidegate.observability.records.forks import NO_REASON, ForkCounter, ForkCounts, count_forks
from tidegate.observability.reports.report import fork_lines
from tidegate.orchestrator.core.rollout import Rollout


def test_a_rollout_with_several_branches_forked_once() -> None:
    rows = [
        (0, None, ""),
        (1, None, ""),
        (2, 0, "compaction"),
        (3, 2, "compaction"),
        (4, 0, ""),
    ]
    expected = ForkCounts(2, 1, {"compaction": 2, NO_REASON: 1})
    assert count_forks(rows) == expected
    assert (expected.share, ForkCounts().share) == (0.5, None)


def test_a_running_run_counts_the_same_and_leaves_evaluations_out() -> None:
    root, other, evaluated = Rollout(0, 0, 0), Rollout(1, 0, 1), Rollout(5, -1, 0)
    branch = Rollout(2, 0, 0)
    branch.branch_of, branch.fork_reason = root, "compaction"
    root.branches = (branch,)
    counter = ForkCounter()
    for row in (root, branch, other, evaluated):
        counter.count(row)
    assert counter.counts() == ForkCounts(2, 1, {"compaction": 1})


def test_a_report_names_the_share_and_the_reasons_of_forks() -> None:
    assert fork_lines(ForkCounts()) == []
    assert fork_lines(ForkCounts(4, 4, {"compaction": 5}))[0] == (
        "4 of 4 rollouts (100.0%) forked, into 5 branches: 5 compaction."
    )
