"""Hand-over of batches: the trainer says what a version was made from, and nothing is inferred."""

from collections import deque
from dataclasses import replace

import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.errors import BatchNotHeld, PublishUnclear
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.hand_over import BatchState
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import STOP


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


def oldest_trained(batch: ev.HandOver) -> int:
    versions = [r.oldest_trained_version for group in batch.groups for r in group.kept]
    return min(version for version in versions if version is not None)


POLICIES = [
    BoundedStaleness(max_staleness=1, groups_per_batch=2),
    BoundedStaleness(max_staleness=2, groups_per_batch=2, consumption_order="completion"),
    BoundedStaleness(
        max_staleness=1, groups_per_batch=2, consumption_order="completion", deadline_policy="mask"
    ),
    BoundedStaleness(
        max_staleness=1, groups_per_batch=2, consumption_order="completion", deadline_policy="split"
    ),
    BoundedStaleness(
        max_staleness=1, groups_per_batch=2, consumption_order="completion", deadline_policy="drop"
    ),
]


# ---------------------------------------------------------------- a publish that says nothing


def test_a_publish_that_says_nothing_is_made_from_the_one_batch_that_the_trainer_took() -> None:
    driver = new_driver()
    for number in range(1, 5):
        ask(driver)
        assert silent(driver) == (number,)
        driver.publish_and_swap()
        assert silent(driver) == ()  # the same weights again


@pytest.mark.parametrize("k", [2, 3])
def test_a_publish_that_says_nothing_is_made_from_the_k_batches_of_a_version(k: int) -> None:
    driver = new_driver(batches_per_version=k)
    for version in range(3):
        for _ in range(k):
            ask(driver)
        assert silent(driver) == tuple(range(version * k + 1, version * k + k + 1))
        driver.publish_and_swap()
    ask(driver)
    assert silent(driver) == (3 * k + 1,)  # the last version may be of fewer


def test_a_publish_that_says_nothing_is_refused_if_a_held_batch_was_asked_ahead() -> None:
    driver = new_driver(max_staleness=2)
    ask(driver)
    ask(driver)
    driver.publish_and_swap([1])
    with pytest.raises(PublishUnclear, match=r"batch 2, and has asked.*batches=\[2\]"):
        silent(driver)
    driver.publish_and_swap([2])
    ask(driver)
    assert silent(driver) == (3,)  # one at a time again


def test_a_publish_that_says_nothing_is_refused_while_a_request_is_pending() -> None:
    driver = new_driver()
    ask(driver)
    driver.do(ev.BatchRequested(1))
    assert len(driver.batches) == 1
    with pytest.raises(PublishUnclear, match="asked for one ahead"):
        silent(driver)
    driver.do(ev.BatchRequestCancelled(1))
    assert silent(driver) == (1,)


def test_a_publish_that_says_nothing_is_refused_while_a_batch_is_on_offer() -> None:
    driver = new_driver()
    driver.acknowledges = False
    first = ask(driver)
    with pytest.raises(PublishUnclear):
        silent(driver)
    driver.take(first)
    assert silent(driver) == (1,)


def test_a_publish_that_says_nothing_is_refused_with_more_batches_than_a_version_has() -> None:
    driver = new_driver(max_staleness=2, batches_per_version=2)
    for _ in range(3):
        ask(driver)
    with pytest.raises(PublishUnclear, match=r"batches 1, 2, 3.*batches=\[1, 2\]") as refused:
        silent(driver)
    assert refused.value.held == (1, 2, 3)


def test_a_publish_that_says_nothing_is_refused_after_a_loss_until_one_names_its_batches() -> None:
    driver = new_driver(max_staleness=0)
    ask(driver)
    driver.publish([])  # so that the batch is too old
    driver.swap("a")
    assert driver.lost == [ev.LoseBatch(1, "stale")]
    ask(driver)
    with pytest.raises(PublishUnclear):
        silent(driver)
    driver.publish_and_swap([2])
    ask(driver)
    assert silent(driver) == (3,)


# ---------------------------------------------------------------- naming


def test_a_version_holds_its_batches_in_admission_until_it_is_live() -> None:
    driver = new_driver(max_staleness=1)
    ask(driver)
    handed = driver.core.handed
    states = [handed.holding[0].state]
    driver.name([1])
    states.append(handed.holding[0].state)
    driver.publish([])
    states.append(handed.holding[0].state)
    assert states == [BatchState.HELD, BatchState.TRAINED, BatchState.IN_VERSION]
    assert handed.num_groups == 1
    driver.swap("a")
    assert handed.num_groups == 0


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


def test_a_batch_named_for_a_publish_that_failed_can_be_named_again_and_is_in_the_next() -> None:
    driver = new_driver()
    ask(driver)
    driver.name([1])  # and the publish fails
    before = digest(driver.core)
    driver.name([1])
    assert digest(driver.core) == before
    assert silent(driver) == ()
    ask(driver)
    driver.publish([2])
    assert [batch.version for batch in driver.core.handed.holding] == [1, 1]


def test_a_number_that_a_failed_publish_took_lets_no_waiting_group_get_too_old() -> None:
    policy = BoundedStaleness(max_staleness=2, groups_per_batch=1, consumption_order="completion")
    driver = Driver(policy=policy, group_size=1)
    driver.join("a")
    driver.fill()  # groups 0, 1, 2
    slow = driver.running[2]
    driver.ask_turn(slow)  # sampled by version 0, while its episode runs on
    assert [group.group_id for group in ask(driver).groups] == [0]
    driver.publish_and_swap()
    driver.fill()  # group 3
    driver.solve(driver.running[1])
    driver.do(ev.BatchRequested())
    driver.name([2])  # group 1, whose publish then fails
    driver.solve(driver.running[3])

    driver.do(ev.BatchRequested())  # group 3 has ended, but group 2 is late if it waits
    driver.return_reward(slow)
    assert [group.group_id for group in driver.batches[-1].groups] == [2]
    driver.name([3])
    driver.published += 1  # the number of the publish that failed
    driver.publish_and_swap()
    driver.do(ev.BatchRequested())

    assert [group.group_id for group in driver.batches[-1].groups] == [3]


def test_a_batchs_age_is_final_when_a_publish_names_it() -> None:
    """The counts have the planned version until then."""
    driver = new_driver(max_staleness=3)
    first, second, third = (ask(driver) for _ in range(3))
    assert [b.trainer_version for b in (first, second, third)] == [0, 1, 2]
    assert driver.core.trained.staleness == {0: 1, 1: 1, 2: 1}
    driver.publish_and_swap([1, 2])
    assert driver.core.trained.staleness == {0: 2, 2: 1}
    driver.publish_and_swap([3])
    assert driver.core.trained.staleness == {0: 2, 1: 1}


def test_the_next_batch_is_planned_after_all_that_no_publish_has_named() -> None:
    driver = new_driver(max_staleness=4, batches_per_version=2)
    assert [ask(driver).trainer_version for _ in range(5)] == [0, 0, 1, 1, 2]
    driver.publish_and_swap([1])
    assert driver.core.consumption_version == 1 + 4 // 2


# ---------------------------------------------------------------- trainers


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_batches_that_a_trainer_holds_ahead_are_trained_as_planned_and_within_the_bound(
    policy: BoundedStaleness, k: int, look_ahead: int
) -> None:
    policy = replace(policy, batches_per_version=k)
    look_ahead = min(look_ahead, policy.max_staleness * k)
    driver = Driver(policy=policy)
    driver.join("a")
    held: deque[ev.HandOver] = deque()
    trained: list[int] = []
    for number in range(12):
        while len(held) <= look_ahead:
            held.append(ask(driver, 2))
        batch = held.popleft()
        trained.append(batch.number)
        assert batch.trainer_version == driver.published == number // k
        assert policy.guaranteed_bound is not None
        assert driver.published - oldest_trained(batch) <= policy.guaranteed_bound
        if len(trained) == k:
            driver.publish_and_swap(trained)
            trained.clear()
    assert (driver.refused, driver.lost) == ([], [])
    assert driver.core.discarded_rollouts["stale"] == 0


@pytest.mark.parametrize("taken", [[1, 2, 1, 1, 2, 1, 2, 2, 1, 2], [2] * 6])
def test_a_trainer_that_publishes_now_and_then_is_never_refused_if_it_names_what_it_took(
    taken: list[int],
) -> None:
    driver = new_driver(max_staleness=1)
    for batches in taken:
        for _ in range(batches):
            ask(driver)
        driver.publish_and_swap()
    assert (driver.refused, driver.lost, len(driver.batches)) == ([], [], sum(taken))


def test_a_trainer_that_publishes_none_of_its_batches_is_refused_and_told_which_it_holds() -> None:
    driver = new_driver(max_staleness=1)
    ask(driver)
    ask(driver)
    assert driver.do(ev.BatchRequested(7)) == [ev.RefuseBatch(7, 2, held=(1, 2))]
    driver.publish_and_swap([1])
    ask(driver)
    assert [batch.number for batch in driver.batches] == [1, 2, 3]


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


def test_a_rollback_loses_held_batches_of_bad_versions_and_their_tasks_start_again() -> None:
    driver = new_driver(max_staleness=3)
    first = ask(driver)
    driver.publish_and_swap([])
    while not oldest_trained(driver.batches[-1]):
        ask(driver)
    bad = driver.batches[-1]
    commands = driver.do(ev.VersionRetracted(1))
    lost = [command for command in commands if isinstance(command, ev.LoseBatch)]
    assert lost == [ev.LoseBatch(bad.number, "rolled_back")]
    assert bad.groups[0].key in driver.requeued
    assert driver.held == [batch.number for batch in driver.batches[:-1]]
    assert driver.core.ledger.discarded["rolled_back"] >= 3
    driver.publish_and_swap([])
    driver.core.handed.refuse_untrainable([first.number])
    with pytest.raises(BatchNotHeld, match=r"was lost \(rolled_back\)"):
        driver.core.handed.refuse_untrainable([bad.number])


def test_a_rollback_loses_by_age_what_its_own_version_makes_too_old() -> None:
    driver = new_driver(max_staleness=0)
    ask(driver)
    driver.do(ev.VersionRetracted(1))
    assert driver.held == [1]
    driver.publish([])
    assert driver.lost == [ev.LoseBatch(1, "stale")]


def test_a_batch_named_before_a_rollback_is_trained_and_not_lost() -> None:
    driver = new_driver(max_staleness=0)
    ask(driver)
    driver.name([1])
    driver.do(ev.VersionRetracted(0))
    driver.do(ev.VersionPublished(1))
    assert driver.lost == []


def test_a_lost_batch_can_not_be_given_back_and_an_earlier_one_stays_held() -> None:
    driver = new_driver(max_staleness=3)
    ask(driver)
    driver.publish_and_swap([])
    while not oldest_trained(driver.batches[-1]):
        ask(driver)
    newest = driver.batches[-1].number
    assert driver.core.handed.can_return(newest)
    driver.do(ev.VersionRetracted(1))
    assert driver.lost == [ev.LoseBatch(newest, "rolled_back")]
    assert not driver.core.handed.can_return(newest)


def test_a_batch_with_a_lost_ones_number_is_another_one_after_a_resume() -> None:
    driver = new_driver(max_staleness=0)
    ask(driver)
    driver.publish_and_swap([1])
    ask(driver)
    driver.publish_and_swap([])
    assert driver.lost == [ev.LoseBatch(2, "stale")]
    driver.die_and_resume(1, snapshot=True)
    driver.publish_and_swap([])
    assert ask(driver).number == 2
    assert driver.core.handed.can_return(2)
    driver.do(ev.BatchReturned(2))
    assert (driver.core.handed.count, driver.held) == (1, [])


def test_a_batch_all_of_whose_rows_the_trainer_discarded_counts_as_trained() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1, group_size=2)
    driver.join("a")
    ask(driver)
    driver.do(ev.RowsDiscarded(1, (0,), "discarded_rows"))
    assert driver.held == [1]
    driver.do(ev.RowsDiscarded(1, (1,), "discarded_rows"))
    assert driver.held == []
    assert silent(driver) == ()
    driver.core.handed.refuse_untrainable([1])  # the trainer may name it all the same
    driver.publish_and_swap([])
    assert driver.lost == []
    assert driver.core.outstanding_groups == 0


# ---------------------------------------------------------------- requests and offers


def test_one_batch_at_a_time_is_on_offer_and_the_next_once_it_is_taken() -> None:
    driver = new_driver(max_staleness=1)
    driver.acknowledges = False
    finish(driver, 2)
    [first] = driver.do(ev.BatchRequested(1))
    assert isinstance(first, ev.HandOver)
    assert (first.request, first.number, first.is_ahead) == (1, 1, False)
    assert driver.do(ev.BatchRequested(2)) == []
    [second] = driver.do(ev.BatchTaken(1))
    assert isinstance(second, ev.HandOver)
    assert (second.request, second.number, second.is_ahead) == (2, 2, True)
    assert driver.do(ev.BatchTaken(2)) == []


def test_an_offer_withdrawn_during_a_publish_is_made_again_to_its_request_at_the_new_age() -> None:
    driver = new_driver(max_staleness=2)
    driver.acknowledges = False
    finish(driver, 1)
    [first] = driver.do(ev.BatchRequested(1))
    assert isinstance(first, ev.HandOver)
    assert driver.do(ev.HandOverPaused(True)) == []
    assert driver.do(ev.BatchReturned(1, 1)) == []
    assert driver.core.ledger.trained == 0
    assert driver.do(ev.VersionPublished(1)) == []
    [again] = driver.do(ev.HandOverPaused(False))
    assert isinstance(again, ev.HandOver)
    assert (again.request, again.number, again.trainer_version) == (1, 1, 1)
    assert again.groups == first.groups


def test_a_cancelled_request_gets_no_batch_and_the_next_one_does() -> None:
    driver = new_driver()
    driver.do(ev.BatchRequested(1))
    driver.do(ev.BatchRequested(2))
    assert driver.do(ev.BatchRequestCancelled(1)) == []
    finish(driver, 1)
    assert [batch.request for batch in driver.batches] == [2]


def test_a_batch_that_did_not_reach_the_trainer_is_aged_when_it_is_asked_for_again() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1)
    driver.join("a")
    ask(driver)
    driver.do(ev.BatchReturned(1))
    assert (driver.core.handed.count, driver.core.trained.batches) == (0, 0)
    for _ in range(3):
        driver.publish_and_swap()
    driver.do(ev.BatchRequested())
    assert len(driver.batches) == 1  # what is v0's is not trained at v3
    assert driver.core.discarded_rollouts["stale"] == 2
    finish(driver, 1)
    assert driver.batches[-1].number == 1
    assert driver.batches[-1].trainer_version == oldest_trained(driver.batches[-1]) == 3
    assert driver.core.trained.staleness == {0: 2}


def test_a_batch_that_went_back_comes_again_as_it_was_if_it_is_young_enough() -> None:
    driver = Driver(max_staleness=2, groups_per_batch=2)
    driver.join("a")
    first = ask(driver, 2)
    ids = [group.group_id for group in first.groups]
    before = driver.core.ledger.snapshot()
    driver.do(ev.BatchReturned(1))
    assert driver.core.ledger.trained == 0
    driver.do(ev.BatchRequested())
    assert [group.group_id for group in driver.batches[-1].groups] == ids
    assert driver.core.ledger.snapshot() == before


def test_a_batch_that_a_publish_has_named_can_not_be_given_back() -> None:
    driver = new_driver()
    ask(driver)
    assert driver.core.handed.can_return(1)
    driver.name([1])
    assert not driver.core.handed.can_return(1)


# ---------------------------------------------------------------- saved state, and resumes


def test_everything_about_a_trainers_batches_is_saved_and_replayed() -> None:
    driver = new_driver(max_staleness=2)
    ask(driver)
    driver.publish_and_swap([])
    driver.publish_and_swap([])
    driver.publish_and_swap([])  # the first is lost
    ask(driver)
    ask(driver)
    driver.name([2])
    driver.acknowledges = False
    finish(driver, 2)
    driver.do(ev.BatchRequested(8))
    driver.do(ev.BatchRequested(9))
    driver.do(ev.HandOverPaused(True))
    driver.do(ev.VersionRetracted(99))
    handed = driver.core.handed
    driver.core.handed.has_lost = True
    again = driver.new_core()
    load(save(driver.core), again)
    assert digest(again) == digest(driver.core)
    loaded = again.handed
    assert loaded.requests == handed.requests
    assert [(each.number, each.is_ahead) for each in loaded.requests] == [(9, True)]
    assert loaded.offer == handed.offer == (8, 4)
    assert (loaded.is_paused, loaded.has_lost, loaded.newest_trained) == (True, True, 2)
    assert loaded.lost == {1: "stale"}
    states = [(b.number, b.is_trained, b.is_ahead, b.version) for b in loaded.holding]
    assert states == [(2, True, False, None), (3, False, True, None), (4, False, True, None)]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_run_resumed_in_mid_version_counts_the_checkpoints_batch_as_trained(
    snapshot: bool,
) -> None:
    driver = new_driver(max_staleness=1, batches_per_version=2)
    ask(driver)
    ask(driver)
    driver.publish_and_swap()
    ask(driver)  # trained, and in the checkpoint; no publish has named it
    ask(driver)
    driver.die_and_resume(3, snapshot=snapshot)
    assert driver.held == []
    driver.publish_and_swap(silent(driver))  # the checkpoint's weights
    assert ask(driver).number == 4  # once more, as it was
    assert silent(driver) == (4,)
    driver.publish_and_swap(silent(driver))
    assert (driver.refused, driver.lost) == ([], [])
    for _ in range(4):
        ask(driver)
        ask(driver)
        driver.publish_and_swap(silent(driver))
    assert driver.core.discarded_rollouts["stale"] == 0


def test_late_tokens_of_an_evaluation_are_not_trainings() -> None:
    driver = Driver()
    driver.join("a")
    driver.do(ev.EvaluationRequested("look", 0))
    rollout = next(iter(driver.running.values()))
    driver.ask_turn(rollout)
    (handle,) = driver.engines["a"].turns
    driver.sample("a", handle, 2)
    driver.do(ev.TurnAbandoned(rollout.rollout_id))
    driver.engines["a"].turns[handle] = None  # type: ignore[assignment]  # it has not heard yet
    driver.sample("a", handle, 3, STOP)
    assert driver.core.ledger.generated == 0
    assert driver.core.evaluation_ledger.generated == 5
    assert driver.core.evaluation_ledger.discarded["cancelled"] == 3
