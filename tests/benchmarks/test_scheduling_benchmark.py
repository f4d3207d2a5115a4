"""Tests that the table of policies reports real runs. They check no figure's size."""

from dataclasses import astuple, replace
from functools import partial

import pytest

from benchmarks.scheduling import experiments
from benchmarks.scheduling.bounds import SPREAD_PHASES, efficiency_bound
from benchmarks.scheduling.experiments import (
    EXPERIMENTS,
    Drafting,
    experiment_rows,
    prediction_error,
    trajectory_rows,
)
from benchmarks.scheduling.policies import POLICIES, SYNC, Variant
from benchmarks.scheduling.rows import NAMES, rows
from benchmarks.scheduling.run import Outcome, run_once
from benchmarks.scheduling.workloads import WORKLOADS, Workload
from tidegate.simulation.engine.spec import EngineCosts

TINY = Workload(
    "tiny",
    median_tokens=60,
    sigma=1.0,
    cap_tokens=600,
    mean_tokens=95,
    groups_per_batch=4,
    versions=6,
    warm_up_versions=2,
    costs=EngineCosts(slots=2, swap_s=0.2, group_size=4),
)

AGENT = replace(TINY, name="tiny agent", turns=3, tool_median_s=0.5)


def variant(name: str, eta: int) -> Variant:
    return Variant(name, POLICIES[name], eta)


def reported(outcome: Outcome) -> tuple[object, ...]:
    """All but what the machine's clock says."""
    return astuple(
        replace(outcome, tally=replace(outcome.tally, cpu_s=0.0, wall_s=0.0, simulated_s=0.0))
    )


def test_a_run_has_every_row_of_the_table() -> None:
    sync = run_once(TINY, variant(SYNC, 0), mode="keep")
    table = rows(replace(TINY, name="math-8k"), variant("admission", 2), "keep", sync, sync)
    assert [row.name for row in table] == list(NAMES)
    assert {(row.workload, row.policy, row.eta, row.mode) for row in table} == {
        ("math-8k", "admission", 2, "keep")
    }


def test_a_benchmark_run_depends_on_its_seed_only() -> None:
    first, again, other = (
        reported(run_once(TINY, variant("admission", 2), mode="keep", seed=seed))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def check(name: str, workload: Workload, mode: str) -> None:
    outcome = run_once(workload, variant(name, POLICIES[name].etas[0]), mode=mode)
    versions = workload.versions - workload.warm_up_versions
    batch = workload.groups_per_batch * workload.group_size
    parted = batch if name == "split" else 0  # at the end, a few are in no batch yet
    assert abs(outcome.tally.rollouts - versions * batch) <= parted
    if outcome.bound is not None:
        assert outcome.oldest_ever <= outcome.bound


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_trains_on_tokens_older_than_its_bound(name: str) -> None:
    check(name, TINY, "keep")


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
@pytest.mark.parametrize("name", ["admission", "mask"])
def test_agent_workloads_keep_the_bound_for_every_pause_mode(name: str, mode: str) -> None:
    check(name, AGENT, mode)


def test_an_engine_takes_as_long_as_its_steps_one_by_one() -> None:
    """One turn at a time on each engine: then time is tokens, prompts and swaps, and no more."""
    alone = replace(TINY, groups_per_batch=1, versions=2, warm_up_versions=0)
    outcome = run_once(alone, variant(SYNC, 0), mode="keep")
    costs = alone.costs
    longest_s = [
        max(task.lengths) * costs.token_s(1) + costs.prompt_tokens / costs.group_size / 25_000
        for task in (alone.task(0, 0), alone.task(0, 1))
    ]
    trained = sum(sum(alone.task(0, index).lengths) for index in (0, 1))
    train_s = 2 * 4.0 + trained * alone.training_machine_s / 16 / alone.batch_tokens
    assert outcome.tally.trained_tokens == trained
    assert outcome.tally.at_s == pytest.approx(sum(longest_s) + train_s, abs=0.05)


def test_no_tokens_are_impossible_if_the_longest_rollout_fits_into_the_window() -> None:
    workload = WORKLOADS["math-8k"]
    bound, spread = (efficiency_bound(workload, 8, phases=n) for n in (1, SPREAD_PHASES))
    busy_s = workload.rollout_machine_s / 12 + workload.costs.swap_s
    assert bound.masked_share == spread.masked_share == 0.0
    ideal = workload.batch_tokens / busy_s / workload.bound_tokens_per_s
    assert bound.efficiency == pytest.approx(ideal, rel=0.02)


@pytest.mark.parametrize("batches_per_version", [1, 4])
def test_the_bound_masks_what_one_engine_can_not_decode_in_its_window(
    batches_per_version: int,
) -> None:
    """With one slot, no rate can be chosen, so the masked share is a sum over the lengths."""
    workload = replace(TINY, costs=EngineCosts(slots=1, swap_s=0.2, group_size=4))
    bound = efficiency_bound(workload, 1, batches_per_version=batches_per_version)
    token_s = workload.costs.token_s(1)
    training_s = workload.training_machine_s / 4
    window_s = 2 * (bound.step_s - 0.2) - training_s / batches_per_version
    tasks = [workload.task(0, index) for index in range(4000)]
    lengths = [length for task in tasks for length in task.lengths]
    too_long = sum(max(0.0, length - window_s / token_s) for length in lengths)
    assert 0.01 < bound.masked_share == pytest.approx(too_long / sum(lengths), abs=0.01)


def test_a_run_stays_below_what_is_possible() -> None:
    workload = replace(TINY, versions=40)
    outcome = run_once(workload, variant("split", 4), mode="keep")
    used = outcome.tally.trained_tokens - outcome.tally.masked_tokens
    efficiency = used / outcome.tally.at_s / workload.bound_tokens_per_s
    assert efficiency < efficiency_bound(workload, 4).efficiency


def test_drafts_change_nothing_before_a_turn_is_a_straggler_and_save_time_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = variant("split", 2)
    plain = run_once(TINY, split, mode="keep")
    drafting = partial(Drafting, acceptance=0.9)
    assert reported(run_once(TINY, split, mode="keep", engine=drafting)) == reported(plain)
    monkeypatch.setattr(experiments, "STRAGGLER_TOKENS", 100)
    faster = run_once(TINY, split, mode="keep", engine=drafting)
    assert faster.tally.at_s < 0.9 * plain.tally.at_s
    assert faster.oldest_ever <= 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_keeps_the_bound(name: str) -> None:
    idea = EXPERIMENTS[name]
    outcome = run_once(
        TINY,
        replace(variant("split", 2), policy=replace(POLICIES["split"], make=idea.make)),
        mode="keep",
        engine=idea.engine(TINY),
        migration_policy=idea.migration_policy,
    )
    assert outcome.oldest_ever <= 2


def test_an_experiments_rows_compare_medians_with_plain_splits() -> None:
    rows_ = list(experiment_rows(["early splits"], [2], 2, TINY))
    plain, early = (row for row in rows_ if row.name.endswith("/efficiency"))
    assert (plain.ratio, early.peer) == (1.0, plain.value)
    lowest, highest = (row.value for row in rows_[7:9])
    assert lowest <= early.value <= highest


def test_engines_are_busier_with_more_trajectories_than_slots_while_agents_wait_for_tools() -> None:
    agents = replace(AGENT, tool_median_s=5.0, groups_per_batch=16)
    found = {row.name: row.value for row in trajectory_rows(agents, seed=0)}
    ratios = ("1x", "1.5x", "2x", "3x", "unlimited")
    assert list(found) == [f"efficiency_{ratio}" for ratio in ratios]
    assert list(found.values()) == sorted(found.values())


def test_lengths_of_siblings_predict_a_rollouts_length_as_far_as_they_are_correlated() -> None:
    assert prediction_error(0.0, 15) == 1.0
    assert prediction_error(1.0, 1) == 0.0
    assert prediction_error(0.5, 15) == pytest.approx(0.729, abs=1e-3)
    assert prediction_error(0.5, None) < prediction_error(0.5, 15)
