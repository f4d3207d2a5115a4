"""Batches that a trainer lost while it held them: snapshots and resumes after that."""

import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.errors import PublishUnclear
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.snapshot_codec import digest, load, save


def lost_batch() -> Driver:
    """Return a run whose trainer has lost batch 1, because it published without training on it."""
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    driver.do(ev.BatchRequested(1))
    [rollout] = driver.running.values()
    driver.solve(rollout)
    driver.do(ev.BatchTaken(1))
    assert ev.LoseBatch(1, "stale") in driver.do(ev.VersionPublished(1))
    driver.published = 1
    return driver


def test_a_run_that_has_lost_a_batch_can_be_saved() -> None:
    core = lost_batch().core
    loaded = Driver(max_staleness=0, groups_per_batch=1, group_size=1).new_core()
    load(save(core), loaded)
    assert digest(loaded) == digest(core)


def test_a_batch_with_the_number_of_one_lost_before_a_resume_can_be_returned() -> None:
    driver = lost_batch()
    driver.die_and_resume(0, snapshot=False)
    driver.swap("a")
    driver.fill()
    driver.do(ev.BatchRequested(2))
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    assert driver.batches[-1].number == 1
    driver.do(ev.HandOverPaused(True))
    driver.do(ev.BatchReturned(1, 2))
    assert not driver.core.handed.held


def test_a_resumed_trainer_has_lost_nothing_so_its_silent_publish_is_clear() -> None:
    driver = lost_batch()
    driver.die_and_resume(0, snapshot=False)
    driver.swap("a")
    driver.fill()
    driver.do(ev.BatchRequested(2))
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    driver.do(ev.BatchTaken(2))
    assert driver.core.handed.batches_of_publish(1) == (1,)


def test_a_batch_of_which_the_trainer_has_discarded_all_rows_may_be_named_or_not() -> None:
    driver = Driver(max_staleness=2, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    for request in (1, 2):
        driver.do(ev.BatchRequested(request))
        for rollout in list(driver.running.values()):
            driver.solve(rollout)
        driver.do(ev.BatchTaken(request))
    driver.do(ev.RowsDiscarded(2, (0,), "too_long"))
    assert driver.held == [1]
    driver.publish_and_swap([1])  # the version counts batch 2 as done, too
    driver.name([2])
    loaded = Driver(max_staleness=2, groups_per_batch=1, group_size=1).new_core()
    load(save(driver.core), loaded)
    loaded.handed.refuse_untrainable([2])


def test_a_request_whose_offered_batch_a_rollback_has_lost_waits_for_the_next_batch() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.publish_and_swap([])
    driver.fill()
    driver.acknowledges = False
    driver.do(ev.BatchRequested(1))
    for rollout in list(driver.running.values())[:1]:
        driver.solve(rollout)
    assert ev.LoseBatch(1, "rolled_back") in driver.do(ev.VersionRetracted(1))
    driver.do(ev.HandOverPaused(True))
    driver.do(ev.BatchReturned(1, 1))
    assert [request.number for request in driver.core.handed.requests] == [1]


def test_a_publish_that_says_nothing_after_a_loss_is_refused_though_nothing_is_held() -> None:
    driver = lost_batch()
    with pytest.raises(PublishUnclear, match="holds no batch, and has lost one since it last"):
        driver.core.handed.batches_of_publish(1)


def test_a_version_after_an_emptied_batch_is_lost_by_a_resume_from_before_that_batch() -> None:
    driver = Driver(max_staleness=2, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    driver.do(ev.BatchRequested(1))
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    driver.do(ev.RowsDiscarded(1, (0,), "too_long"))
    driver.publish_and_swap([])
    driver.die_and_resume(0, snapshot=False)
    assert driver.core.next_version == 2  # engines may have served another version 1


def test_a_trainer_that_discards_batch_after_batch_whole_gets_further_ones_without_a_publish() -> (
    None
):
    driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1)
    driver.join("a")
    for number in range(1, 8):
        driver.fill()
        for rollout in list(driver.running.values()):
            driver.solve(rollout)
        driver.do(ev.BatchRequested(number))
        assert driver.refused == []
        driver.fill()
        for rollout in list(driver.running.values()):
            driver.solve(rollout)
        assert driver.core.handed.count == number
        driver.do(ev.BatchTaken(number))
        driver.do(ev.RowsDiscarded(number, (0,), "too_stale"))
