"""Forked rollouts: each branch is a row, and all rows share one reward."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.core.driver import Driver
from tidegate.errors import RunClosed, TurnTimeout
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.trajectories import read_trajectories
from tidegate.orchestrator.batches.batches import build_batch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.rollout import Rollout, RolloutState
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.telemetry.timekeeping import Usage
from tidegate.orchestrator.trainer.batch_metrics import batch_metrics
from tidegate.transport.messages import STOP

pytestmark = pytest.mark.wire

SMALL: dict[str, Any] = {
    "engines": 1,
    "group_size": 2,
    "groups_per_batch": 2,
    "max_running_turns": 8,
}


def forked(driver: Driver, rollout: Rollout) -> Rollout:
    (command,) = driver.do(ev.RolloutForked(rollout.rollout_id, "asked"))
    assert isinstance(command, ev.StartBranch)
    return command.rollout


def take_turn(driver: Driver, row: Rollout, tokens: int) -> None:
    driver.ask_turn(row)
    where = driver.where(row)
    assert where is not None
    driver.sample(*where, tokens, STOP)


def a_group_that_forks(driver: Driver) -> tuple[Rollout, Rollout, Rollout]:
    """Run group 0 with a branch of its first rollout: rows of 3, 2 and 4 tokens."""
    driver.join("a")
    driver.fill()
    first, second = list(driver.running.values())[:2]
    take_turn(driver, first, 3)
    branch = forked(driver, first)
    take_turn(driver, branch, 4)
    take_turn(driver, second, 2)
    return first, second, branch


def test_a_branch_ends_with_its_rollout_and_has_its_reward() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, second, branch = a_group_that_forks(driver)
    assert driver.core.ledger.in_flight == 9
    driver.return_reward(first, 0.5)
    assert (branch.state, branch.reward) == (RolloutState.FINISHED, 0.5)
    assert driver.core.ledger.buffered == 7
    group = next(iter(driver.core.groups.in_order))
    assert (group.finished, group.running, group.num_kept) == (1, 1, 2)
    driver.return_reward(second, 0.0)
    driver.do(ev.BatchRequested())
    assert driver.core.ledger.trained == 9


def test_what_counts_rollouts_counts_one_that_forked_once() -> None:
    driver = Driver(group_size=2, groups_per_batch=1, max_staleness=1)
    first, second, branch = a_group_that_forks(driver)
    driver.publish_and_swap()
    take_turn(driver, branch, 1)  # under newer weights than its rollout's other row
    driver.return_reward(first, 0.5)
    driver.return_reward(second, 0.0)
    driver.do(ev.BatchRequested())
    trained = driver.core.trained
    assert (trained.rollouts, trained.mixed_version, trained.staleness) == (2, 1, {1: 2})
    bias = driver.core.groups.discards.length_bias()
    assert bias is not None
    assert (bias.rollouts, bias.mean_trained_tokens) == (2, 5.0)
    [batch] = driver.batches
    reported = batch_metrics(build_batch(batch.groups, 1), Usage())
    assert (reported["rollouts"], reported["reward"], reported["rollout_tokens_mean"]) == (
        2,
        0.25,
        5.0,
    )
    assert (reported["mixed_version_share"], reported["staleness_max"]) == (0.5, 1.0)

    forks_again = next(iter(driver.running.values()))
    take_turn(driver, forks_again, 3)
    take_turn(driver, forked(driver, forks_again), 2)
    driver.fail(forks_again)
    assert driver.core.discarded_rollouts == {"episode_error": 1}
    [reported_of] = driver.core.groups.discards.by_reason(generated_tokens=100).values()
    assert (reported_of.rollouts, reported_of.tokens) == (1, 5)


def test_a_failed_episode_takes_its_branches_with_it() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, _, branch = a_group_that_forks(driver)
    driver.fail(first)
    assert branch.state is RolloutState.DISCARDED
    assert driver.core.ledger.discarded["episode_error"] == 7


def test_a_branch_in_which_nothing_was_sampled_is_no_row_but_those_forked_from_it_are() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, _, _ = a_group_that_forks(driver)
    empty = forked(driver, first)
    inner = forked(driver, empty)
    take_turn(driver, inner, 5)
    driver.return_reward(first)
    group = next(iter(driver.core.groups.in_order))
    assert empty not in group.rollouts
    assert inner in group.rollouts
    assert inner.branch_of is first
    load(save(driver.core), driver.new_core())


def test_a_branch_has_its_rollouts_advantage_and_weighs_nothing_in_it() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, second, branch = a_group_that_forks(driver)
    driver.do(ev.TurnsRewarded(branch.rollout_id, ((0, 0.25),)))
    driver.return_reward(first, 1.0)
    driver.return_reward(second, 0.0)
    (group,) = [g for g in driver.core.groups.in_order if not g.running]
    batch = build_batch([group], 0)
    assert batch.rollout_ids.tolist() == [first.rollout_id, second.rollout_id, first.rollout_id]
    advantages = batch.advantages.tolist()
    assert advantages[0] == advantages[2] == -advantages[1] > 0
    assert batch.sampled_tokens == 9
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.nonzero().tolist() == [[2, len(branch.token_ids) - 1]]


def test_a_split_group_takes_branches_along() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, second, branch = a_group_that_forks(driver)
    driver.return_reward(second)
    group = next(iter(driver.core.groups.in_order))
    part = driver.core.groups.split(group)
    assert part.rollouts == [second]
    assert group.rollouts == [first, branch]
    assert branch.group_id == first.group_id == group.group_id


def test_a_journal_knows_branches_and_the_rewards_of_turns() -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, second, branch = a_group_that_forks(driver)
    forked(driver, branch)
    branch.extend([1, 2])  # an observation that nothing is sampled from: the journal misses it
    driver.do(ev.TurnsRewarded(first.rollout_id, ((0, 0.25),)))
    for state in ("running", "finished"):
        core = driver.new_core()
        for record in driver.records:
            replay(record, core)
        assert digest(core) == digest(driver.core), state
        loaded = driver.new_core()
        load(save(driver.core), loaded)
        assert digest(loaded) == digest(driver.core), state
        if state == "running":
            driver.return_reward(first)
            driver.return_reward(second)


@pytest.mark.parametrize("snapshot", [True, False])
def test_after_a_crash_rollouts_begin_again_and_find_their_branches(snapshot: bool) -> None:
    driver = Driver(group_size=2, groups_per_batch=1)
    first, _, branch = a_group_that_forks(driver)
    roots = set(driver.running)
    driver.die_and_resume(0, snapshot=snapshot)
    assert set(driver.running) == roots
    resumed = driver.running[first.rollout_id]
    (again,) = resumed.branches
    assert (again.rollout_id, again.token_ids) == (branch.rollout_id, branch.token_ids)
    driver.do(ev.RolloutCut(again.rollout_id, 0, 0, "went_another_way"))  # not forked again
    driver.return_reward(resumed)
    assert driver.core.ledger.discarded["went_another_way"] == 4


async def explore(episode: tidegate.Episode, task: int) -> float:
    """Run two branches side by side, then one more turn on the trunk."""
    import asyncio

    episode.append([10 + task, 11, 12])
    first = await episode.generate(max_tokens=4, stop_token_ids=[])
    first.reward = 0.5
    branches = [episode.fork() for _ in range(2)]
    for number, branch in enumerate(branches):
        branch.append([20 + number])
    turns = await asyncio.gather(*(b.generate(max_tokens=5, stop_token_ids=[]) for b in branches))
    turns[1].reward = -1.0
    assert turns[0].token_ids != turns[1].token_ids
    episode.append([30])
    await episode.generate(max_tokens=3, stop_token_ids=[])
    return float(episode.index)


async def test_branches_of_a_real_run_are_trained_recorded_and_audited(tmp_path: Path) -> None:
    model, run = make_model_directory(tmp_path / "qwen3"), tmp_path / "run"
    async with tidegate.serve(model=model, **SMALL, run_directory=run) as rollouts:
        async for batch in rollouts.batches(range(2), episode=explore):
            assert batch.token_ids.shape[0] == 12
            assert batch.sampled_tokens == 4 * (4 + 2 * 5 + 3)
            of = list(zip(batch.rollout_ids.tolist(), batch.advantages.tolist(), strict=True))
            assert len({rollout_id for rollout_id, _ in of}) == len(set(of)) == 4
            assert batch.turn_rewards is not None
            assert batch.turn_rewards.sum().item() == 4 * (0.5 - 1.0)
            torch.testing.assert_close(batch.logprobs[~batch.loss_mask].abs().sum().item(), 0.0)
        ledger = rollouts.statistics().ledger
        assert (ledger.error, ledger.trained) == (0, ledger.generated)
    rows = list(read_trajectories(run))
    assert [(row.branch_of is None, row.fork_reason) for row in rows[:2]] == [(True, "")] * 2
    assert sorted(row.fork_reason for row in rows) == [""] * 4 + ["asked"] * 8
    assert {turn.reward for row in rows for turn in row.turns} == {None, 0.5, -1.0}
    report = audit_run(run)
    assert report.agrees, report.lines()


async def test_a_turn_that_takes_too_long_ends_and_leaves_what_it_sampled(tmp_path: Path) -> None:
    kept: list[int] = []
    branches: list[tidegate.Episode] = []

    async def hurry(episode: tidegate.Episode, task: int) -> float:
        episode.append([10, 11])
        with pytest.raises(TurnTimeout, match=r"the turn had 0\.05 s and sampled"):
            await episode.generate(max_tokens=500, stop_token_ids=[], timeout_s=0.05)
        kept.append(len(episode.token_ids) - 2)
        branches.append(episode.fork())
        await episode.generate(max_tokens=2, stop_token_ids=[], timeout_s=60.0)
        return 0.0

    model = make_model_directory(tmp_path / "qwen3", max_position_embeddings=4096)
    async with tidegate.serve(model=model, **SMALL) as rollouts:
        async for batch in rollouts.batches(range(2), episode=hurry):
            assert batch.sampled_tokens == sum(kept) + 2 * 4
            assert batch.token_ids.shape[0] == 4  # branches without a turn are no rows
        assert rollouts.statistics().ledger.error == 0
    with pytest.raises(RunClosed, match="the episode has returned"):
        branches[0].append("x")
