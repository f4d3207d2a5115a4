"""Rows that a trainer received and did not train on are counted as discarded, at any instant."""

from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.orchestrator.core.driver import Driver
from tests.orchestrator.core.test_branches import forked, take_turn
from tidegate.errors import ConfigError
from tidegate.orchestrator.batches.batch_rows import select_rows, shards
from tidegate.orchestrator.batches.batches import build_batch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.discards import Discards
from tidegate.orchestrator.core.hand_over import KEPT_BATCHES
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.trainer.discarded_rows import discarded_rows
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.simulation.run.serve import ServeInTests


def one_batch(driver: Driver, *, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> None:
    """Two groups of two rollouts, of so many tokens, are handed over."""
    driver.fill()
    for rollout, length in zip(list(driver.running.values())[:4], tokens, strict=True):
        driver.solve(rollout, length)
    driver.do(ev.BatchRequested())


@pytest.fixture
def driver() -> Driver:
    driver = Driver(max_staleness=1, groups_per_batch=2, group_size=2)
    driver.join("engine-0")
    return driver


def test_tokens_of_rows_not_trained_on_are_discarded_for_their_reason(
    driver: Driver,
) -> None:
    one_batch(driver)
    assert driver.core.ledger.trained == 10
    assert driver.do(ev.RowsDiscarded(1, (0, 3), "too_long")) == []
    assert driver.core.ledger.trained == 5
    assert driver.core.ledger.discarded == {"too_long": 5}
    assert driver.core.discarded_rollouts == {"too_long": 2}
    assert driver.core.trained.rollouts == 2
    assert driver.core.trained.staleness == {0: 2}
    reported = driver.core.groups.discards.by_reason(generated_tokens=10)["too_long"]
    assert (reported.rollouts, reported.tokens, reported.lengths) == (2, 5, {1: 1, 4: 1})
    bias = driver.core.groups.discards.length_bias()
    assert bias is not None
    assert bias.survival == {1: 0.0, 2: 1.0, 4: 0.0}
    assert (bias.rollouts, bias.mean_trained_tokens) == (4, 2.5)


def test_to_say_it_twice_changes_nothing_and_the_first_reason_stays(driver: Driver) -> None:
    one_batch(driver)
    driver.do(ev.RowsDiscarded(1, (0, 0), "too_long"))
    driver.do(ev.RowsDiscarded(1, (0, 1), "too_stale"))
    assert driver.core.ledger.discarded == {"too_long": 1, "too_stale": 2}
    assert driver.core.ledger.trained == 7


def test_a_batch_that_comes_again_after_a_crash_comes_whole_and_counts_no_row_twice(
    driver: Driver,
) -> None:
    one_batch(driver)
    driver.do(ev.RowsDiscarded(1, (0, 3), "too_long"))
    driver.die_and_resume(0, snapshot=True)
    core = driver.core
    assert (core.ledger.buffered, core.ledger.trained) == (10, 0)
    assert core.ledger.discarded["too_long"] == core.discarded_rollouts["too_long"] == 0
    discards = core.groups.discards
    assert discards.by_reason(generated_tokens=10) == {}
    driver.do(ev.BatchRequested())
    assert [len(group.kept) for group in driver.batches[0].groups] == [2, 2]
    assert core.ledger.trained == 10
    assert core.trained.rollouts == 4
    bias = discards.length_bias()
    assert bias is not None
    assert bias.survival == {1: 1.0, 2: 1.0, 4: 1.0}
    driver.do(ev.RowsDiscarded(1, (0, 3), "too_long"))
    reported = discards.by_reason(generated_tokens=10)["too_long"]
    assert (reported.rollouts, reported.tokens, reported.lengths) == (2, 5, {1: 1, 4: 1})
    assert sum(task.rollouts for task in reported.tasks) == 2


def test_a_crash_after_the_checkpoint_keeps_discarded_rows_discarded(driver: Driver) -> None:
    one_batch(driver)
    driver.do(ev.RowsDiscarded(1, (0, 3), "too_long"))
    driver.die_and_resume(1, snapshot=False)
    assert driver.core.ledger.trained == 5
    assert driver.core.discarded_rollouts == {"too_long": 2}


def test_masked_tokens_of_a_discarded_row_stay_in_their_own_account() -> None:
    policy = BoundedStaleness(
        max_staleness=0, groups_per_batch=1, consumption_order="completion", deadline_policy="mask"
    )
    driver = Driver(policy=policy, group_size=1)
    driver.join("engine-0")
    driver.fill()
    (rollout,) = driver.running.values()
    driver.ask_turn(rollout)
    place = driver.where(rollout)
    assert place is not None
    driver.sample(*place, 3)
    driver.publish_and_swap()
    driver.sample(*place, 2, 1)
    driver.return_reward(rollout)
    driver.do(ev.BatchRequested())
    assert driver.core.ledger.discarded == {"too_old": 3}
    driver.do(ev.RowsDiscarded(1, (0,), "too_long"))
    assert driver.core.ledger.discarded == {"too_old": 3, "too_long": 2}
    assert driver.core.ledger.trained == 0


def forked_batch(driver: Driver) -> Rollout:
    """Its first rollout has two rows, of 2 and 3 tokens."""
    driver.fill()
    rollouts = list(driver.running.values())[:4]
    first = rollouts[0]
    take_turn(driver, first, 2)
    take_turn(driver, forked(driver, first), 3)
    driver.return_reward(first)
    for rollout in rollouts[1:]:
        driver.solve(rollout, 1)
    driver.do(ev.BatchRequested())
    return first


def test_a_rollout_is_trained_until_its_last_row_is_discarded(driver: Driver) -> None:
    first = forked_batch(driver)
    rows = driver.core.handed[1].rows
    places = [place for place, row in enumerate(rows) if row.root is first]
    driver.do(ev.RowsDiscarded(1, (places[0],), "too_long"))
    assert driver.core.ledger.discarded == {"too_long": 2}
    assert (driver.core.trained.rollouts, driver.core.discarded_rollouts) == (4, {})
    driver.do(ev.RowsDiscarded(1, (places[1],), "too_stale"))
    assert driver.core.ledger.discarded == {"too_long": 2, "too_stale": 3}
    assert driver.core.trained.rollouts == 3
    assert driver.core.discarded_rollouts == {"too_long": 1}  # as its first row
    driver.die_and_resume(0, snapshot=True)
    assert driver.core.trained.rollouts == driver.core.ledger.trained == 0
    assert driver.core.discarded_rollouts["too_long"] == 0


def test_the_staleness_of_a_rollout_is_that_of_the_rows_that_are_trained(driver: Driver) -> None:
    """Its first row is of version 0, its branch of version 1."""
    driver.fill()
    rollouts = list(driver.running.values())[:4]
    for rollout in rollouts[1:]:
        driver.solve(rollout, 1)
    take_turn(driver, rollouts[0], 2)
    driver.publish_and_swap()
    take_turn(driver, forked(driver, rollouts[0]), 3)
    driver.return_reward(rollouts[0])
    driver.do(ev.BatchRequested())
    assert driver.core.trained.staleness == {1: 4}
    assert driver.core.trained.mixed_version == 1
    driver.do(ev.RowsDiscarded(1, (0,), "too_stale"))
    assert driver.core.trained.staleness == {0: 1, 1: 3}
    assert driver.core.trained.mixed_version == 0


def test_lengths_of_what_was_counted_long_ago_are_never_below_zero() -> None:
    discards = Discards()
    discards.count_trained([4])
    rollout = Rollout(0, 0, 0)
    for _ in range(2):
        discards.count_untrained(rollout, "too_long", None)
    bias = discards.length_bias()
    assert bias is not None
    assert bias.mean_trained_tokens == 4.0


# ---------------------------------------------------------------- a whole run


async def solve(episode: tidegate.Episode, task: int) -> float:
    episode.append("a")
    await episode.generate(max_tokens=4)
    return float(episode.index)


def settings(**more: Any) -> dict[str, Any]:
    return {"max_staleness": 1, "group_size": 2, "groups_per_batch": 2, **more}


async def test_a_trainer_reports_the_rows_it_discarded_and_statistics_show_them(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve(**settings()) as rollouts:
        async for batch in rollouts.batches(range(4), episode=solve):
            tokens = batch.loss_mask.sum(1)
            await rollouts.discard(batch, [0, 2], reason="too_long")
            await rollouts.publish({})
            statistics = rollouts.statistics()
            discarded_tokens = batch.number * int(tokens[0] + tokens[2])
            assert statistics.ledger.discarded == {"too_long": discarded_tokens}
            assert statistics.trained_rollouts == 2 * batch.number
        assert rollouts.statistics().discards["too_long"].rollouts == 4
        assert rollouts.statistics().ledger.error == 0


async def test_rows_that_can_not_be_discarded_are_refused_and_count_nothing(
    tidegate_serve: ServeInTests,
) -> None:
    async with tidegate_serve(**settings()) as rollouts:
        batches = rollouts.batches(range(40), episode=solve)
        first = await anext(batches)
        with pytest.raises(ConfigError, match=r"batch 1 has 4 rows here, got indices \[4\]"):
            await rollouts.discard(first, [4])
        with pytest.raises(ConfigError, match=r"batch 1 has 4 rows, got indices \[-1\]"):
            await rollouts.discard(1, [-1])
        with pytest.raises(ConfigError, match="with a letter; got 'Too l"):
            await rollouts.discard(first, [0], reason="Too long")
        with pytest.raises(ConfigError, match="rows of batch 2 can't be discarded any more"):
            await rollouts.discard(2, [0])
        for _ in range(KEPT_BATCHES):
            await rollouts.publish({})
            await anext(batches)
        await rollouts.publish({})
        with pytest.raises(ConfigError, match="the run still keeps 2, 3"):
            await rollouts.discard(first, [0])
        await rollouts.discard(2, [0])
        assert rollouts.statistics().ledger.discarded == {"not_trained": 4}


def test_of_a_part_the_places_are_those_in_the_whole_batch(driver: Driver) -> None:
    one_batch(driver)
    parts = shards(build_batch(driver.batches[0].groups, 0, 1), 2)
    reported = [discarded_rows(part, [1]).rows[0] for part in parts]
    places = [part.shard.rows[1] for part in parts if part.shard is not None]
    assert reported == places
    assert len(set(reported)) == 2


def test_rows_are_numbers_of_any_kind_and_no_mask() -> None:
    kinds: tuple[Any, ...] = (list, torch.tensor, np.array)
    for kind in kinds:
        assert discarded_rows(1, kind([3, 1])).rows == (3, 1)
        with pytest.raises(ConfigError, match="indices from 0, not a boolean mask"):
            discarded_rows(1, kind([False, True]))


def test_rows_of_a_part_without_indices_can_not_be_discarded(driver: Driver) -> None:
    """As of a rank's part that was cut into smaller ones, or came from an older run."""
    one_batch(driver)
    part, _ = shards(build_batch(driver.batches[0].groups, 0, 1), 2)
    with pytest.raises(ConfigError, match="has 1 rows here, but its shard lists 2"):
        discarded_rows(select_rows(part, [1]), [0])
