"""Hand-over of batches: the trainer says what a version was made from, and nothing is inferred.

Here are the words of refusals, the ends of tasks, and what :mod:`trainer_model` does not do.
"""

import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.errors import BatchNotHeld, PublishUnclear
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.snapshot_codec import load, save
from tidegate.policies.asynchrony import BoundedStaleness


def finish(driver: Driver, groups: int) -> None:
    """End this many of the oldest running groups."""
    driver.fill()
    running = sorted({rollout.group_id for rollout in driver.running.values()})
    for rollout in list(driver.running.values()):
        if rollout.group_id in running[:groups]:
            driver.solve(rollout)


def ask(driver: Driver, groups: int = 1) -> ev.HandOver:
    """End as many groups as a batch takes, and take it."""
    finish(driver, groups)
    driver.do(ev.BatchRequested())
    return driver.batches[-1]


def new_driver(max_staleness: int = 1, batches_per_version: int = 1) -> Driver:
    """Return a driver with one engine, whose batches are one group of one rollout."""
    policy = BoundedStaleness(
        max_staleness=max_staleness, groups_per_batch=1, batches_per_version=batches_per_version
    )
    driver = Driver(policy=policy, group_size=1)
    driver.join("a")
    return driver


def silent(driver: Driver) -> tuple[int, ...]:
    """Return the batches of a publish that doesn't say what it was made from."""
    return driver.core.handed.batches_of_publish(driver.policy.batches_per_version)


def lost_batch() -> Driver:
    """Return a run whose trainer has lost batch 1, because it published without training on it."""
    driver = new_driver(max_staleness=0)
    ask(driver)
    driver.publish([])
    assert driver.lost == [ev.LoseBatch(1, "stale")]
    return driver


def oldest_trained(batch: ev.HandOver) -> int:
    versions = [r.oldest_trained_version for group in batch.groups for r in group.kept]
    return min(version for version in versions if version is not None)


# ---------------------------------------------------------------- a publish that says nothing


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_publish_that_says_nothing_is_made_from_the_k_batches_of_a_version(k: int) -> None:
    driver = new_driver(batches_per_version=k)
    for version in range(3):
        for _ in range(k):
            ask(driver)
        assert silent(driver) == tuple(range(version * k + 1, version * k + k + 1))
        driver.publish_and_swap()
        assert silent(driver) == ()  # the same weights again
    ask(driver)
    assert silent(driver) == (3 * k + 1,)  # the last version may be of fewer


def test_a_publish_that_says_nothing_is_refused_with_what_the_trainer_holds_or_has_lost() -> None:
    driver = new_driver(max_staleness=2, batches_per_version=2)
    for _ in range(3):
        ask(driver)
    with pytest.raises(PublishUnclear, match=r"batches 1, 2, 3.*batches=\[1, 2\]") as refused:
        silent(driver)
    assert refused.value.held == (1, 2, 3)
    driver.publish_and_swap([1, 2])
    with pytest.raises(PublishUnclear, match=r"batch 3, and has asked.*batches=\[3\]"):
        silent(driver)
    with pytest.raises(PublishUnclear, match="holds no batch, and has lost one since it last"):
        silent(lost_batch())


# ---------------------------------------------------------------- naming


def test_a_batch_in_a_version_can_not_be_named_again() -> None:
    driver = new_driver()
    ask(driver)
    driver.publish([1])
    with pytest.raises(BatchNotHeld, match=r"names batch 1, which is in version 1 already"):
        driver.core.handed.refuse_untrainable([1])
    driver.swap("a")
    with pytest.raises(BatchNotHeld, match=r"batch 1, which is in version already.*no batch now"):
        driver.core.handed.refuse_untrainable([1])


@pytest.mark.parametrize("number", [0, 3])
def test_a_batch_that_was_not_handed_over_can_not_be_named(number: int) -> None:
    driver = new_driver()
    ask(driver)
    ask(driver)
    with pytest.raises(BatchNotHeld, match="which was not handed over") as refused:
        driver.core.handed.refuse_untrainable([1, number])
    assert (refused.value.batch, refused.value.held) == (number, (1, 2))


# ---------------------------------------------------------------- trainers


def test_a_straggler_that_ends_between_two_batches_of_a_version_is_trained_at_that_version() -> (
    None
):
    policy = BoundedStaleness(
        max_staleness=0,
        groups_per_batch=1,
        batches_per_version=2,
        consumption_order="completion",
        deadline_policy="split",
    )
    driver = Driver(policy=policy, group_size=3)
    driver.join("a")
    driver.fill()
    first = [rollout for rollout in driver.running.values() if rollout.group_id == 0]
    for rollout in first[:2]:
        driver.solve(rollout)
    driver.do(ev.BatchRequested())  # splits the group
    driver.solve(first[2])
    batch = ask(driver)
    assert [len(group.kept) for group in batch.groups] == [3, 1]
    assert batch.trainer_version == 0
    assert driver.core.ledger.discarded == {}


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_a_publish_after_an_iterators_last_task_is_not_delayed(tasks: int) -> None:
    driver = new_driver(max_staleness=tasks - 1)
    for _ in range(4):
        driver.do(ev.TasksOffered())
        for _ in range(tasks):
            driver.do(ev.BatchRequested())
            driver.do(ev.TaskArrived(driver.next_task))
            for rollout in list(driver.running.values()):
                driver.solve(rollout)
        driver.do(ev.TasksExhausted())
        driver.do(ev.BatchRequested())
        driver.publish_and_swap()
    assert (driver.refused, driver.ended, len(driver.batches)) == ([], 4, 4 * tasks)


def test_other_tasks_after_a_short_batch_do_not_get_too_old() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=2, group_size=1)
    driver.join("a")
    driver.do(ev.TaskArrived(0))
    driver.do(ev.TasksExhausted())
    driver.solve(next(iter(driver.running.values())))
    driver.do(ev.BatchRequested())
    assert [len(batch.groups) for batch in driver.batches] == [1]
    driver.do(ev.TasksOffered())
    for _ in range(4):
        finish(driver, 4)  # everything that may start does, under the version of now
        driver.publish_and_swap()
        driver.do(ev.BatchRequested())
    assert driver.core.discarded_rollouts["stale"] == 0


# ---------------------------------------------------------------- lost batches


def test_a_publish_that_names_none_ages_held_batches_and_loses_those_that_are_too_old() -> None:
    driver = new_driver(max_staleness=1)
    first, second = ask(driver), ask(driver)
    driver.publish([])
    assert driver.lost == []  # of version 0, and trainable at version 1
    tokens = driver.core.ledger.snapshot().trained
    commands = driver.do(ev.VersionPublished(2))
    lost = [command for command in commands if isinstance(command, ev.LoseBatch)]
    assert lost == [ev.LoseBatch(1, "stale"), ev.LoseBatch(2, "stale")]
    assert driver.requeued == [group.key for b in (first, second) for group in b.groups]
    ledger = driver.core.ledger.snapshot()
    assert (ledger.trained, ledger.discarded["stale"]) == (0, tokens)
    assert driver.core.discarded_rollouts["stale"] == 2
    assert driver.core.trained.batches == 0
    assert not driver.core.trained.staleness
    with pytest.raises(BatchNotHeld, match=r"batch 1, which was lost \(stale\)"):
        driver.core.handed.refuse_untrainable([1])


def test_a_batch_is_given_back_only_while_it_is_held_and_not_named() -> None:
    driver = new_driver(max_staleness=3)
    ask(driver)
    assert driver.core.handed.can_return(1)
    driver.name([1])
    assert not driver.core.handed.can_return(1)
    driver.publish_and_swap([])
    while not oldest_trained(driver.batches[-1]):
        ask(driver)
    newest = driver.batches[-1].number
    assert driver.core.handed.can_return(newest)
    driver.do(ev.VersionRetracted(1))
    assert driver.lost == [ev.LoseBatch(newest, "rolled_back")]
    assert not driver.core.handed.can_return(newest)


def test_a_batch_with_the_number_of_one_lost_before_a_resume_can_be_given_back() -> None:
    driver = lost_batch()
    driver.die_and_resume(0, snapshot=False)
    driver.swap("a")
    assert ask(driver).number == 1
    assert driver.core.handed.can_return(1)
    driver.do(ev.HandOverPaused(True))
    driver.do(ev.BatchReturned(1, 2))
    assert driver.held == []


def test_a_batch_of_which_the_trainer_has_discarded_all_rows_may_be_named_or_not() -> None:
    driver = new_driver(max_staleness=2)
    ask(driver)
    ask(driver)
    driver.do(ev.RowsDiscarded(2, (0,), "too_long"))
    assert driver.held == [1]
    driver.publish_and_swap([1])  # the version counts batch 2 as done, too
    driver.name([2])
    loaded = driver.new_core()
    load(save(driver.core), loaded)
    loaded.handed.refuse_untrainable([2])


def test_a_request_whose_offered_batch_a_rollback_has_lost_waits_for_the_next_batch() -> None:
    driver = new_driver(max_staleness=1)
    driver.publish_and_swap([])
    driver.acknowledges = False
    ask(driver)
    assert ev.LoseBatch(1, "rolled_back") in driver.do(ev.VersionRetracted(1))
    driver.do(ev.HandOverPaused(True))
    driver.do(ev.BatchReturned(1, 0))
    assert [request.number for request in driver.core.handed.requests] == [0]


def test_a_trainer_that_discards_batch_after_batch_whole_gets_further_ones_without_a_publish() -> (
    None
):
    driver = new_driver(max_staleness=1)
    for number in range(1, 8):
        ask(driver)
        assert driver.refused == []
        finish(driver, 1)  # a batch that was discarded makes room only for a request that waits
        assert driver.core.handed.count == number
        driver.do(ev.RowsDiscarded(number, (0,), "too_stale"))
