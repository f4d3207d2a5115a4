"""Groups trained more than once: fresh ones first, within the bound, each token counted once."""

from dataclasses import replace

import pytest

from tests.orchestrator.core.driver import Driver
from tests.orchestrator.core.test_hand_over import finish
from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling

TWICE = BoundedStaleness(max_staleness=2, groups_per_batch=1, max_uses=2)


def new_driver(policy: BoundedStaleness = TWICE, group_size: int = 1) -> Driver:
    """Return a driver with one engine."""
    driver = Driver(policy=policy, group_size=group_size)
    driver.join("a")
    driver.fill()
    return driver


def ask(driver: Driver) -> list[tuple[int, int]]:
    """Ask for a batch; return (group id, use) of each of its groups, or nothing if none came."""
    before = len(driver.batches)
    driver.do(ev.BatchRequested(before + 1))
    new = driver.batches[before:]
    return [(group.group_id, group.use) for batch in new for group in batch.groups]


def train(driver: Driver, groups: int = 1) -> list[tuple[int, int]]:
    """End the oldest running groups, take a batch, and publish the version made from it."""
    finish(driver, groups)
    uses = ask(driver)
    driver.publish_and_swap()
    driver.fill()
    return uses


# ---------------------------------------------------------------- which groups, and when


def test_a_trainer_that_would_wait_is_given_the_group_that_it_trained_before() -> None:
    driver = new_driver()
    assert train(driver) == [(0, 1)]
    assert ask(driver) == [(0, 2)]
    first, again = driver.batches
    assert again.groups[0].kept[0].logprobs == first.groups[0].kept[0].logprobs
    assert [again.trainer_version, first.trainer_version] == [1, 0]


def test_used_groups_complete_a_batch_of_the_fresh_ones_that_have_ended() -> None:
    driver = new_driver(replace(TWICE, groups_per_batch=3, max_staleness=4))
    assert train(driver, 3) == [(0, 1), (1, 1), (2, 1)]
    finish(driver, 1)
    assert ask(driver) == [(3, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("published", "uses"), [(2, [(0, 2)]), (3, [])])
def test_no_used_group_is_trained_if_an_outstanding_one_would_get_too_old(
    published: int, uses: list[tuple[int, int]]
) -> None:
    driver = new_driver(replace(TWICE, max_staleness=4))
    straggler = list(driver.running.values())[1]
    driver.ask_turn(straggler)
    [handle] = driver.engines["a"].turns
    driver.sample("a", handle, 1)  # by version 0, so it must be trained at version 4
    train(driver)
    for _ in range(published - 1):
        driver.publish_and_swap([])
    assert [*driver.core.handed.used] == [0]
    assert len(driver.core.groups.in_order) == 2
    assert ask(driver) == uses  # a used group at version 2, and then the two at 3 and 4


def test_a_window_lets_no_used_group_be_trained_before_an_ended_one_within_it() -> None:
    policy = replace(TWICE, max_staleness=6, groups_per_batch=2, consumption_order=Window(3))
    driver = new_driver(policy)
    assert train(driver, 2) == [(0, 1), (1, 1)]
    last = [r for r in driver.running.values() if r.group_id == 4]
    driver.solve(last[0])
    assert ask(driver) == [(4, 1), (0, 2)]


def test_a_group_of_a_filtered_run_is_reused_with_all_its_rollouts() -> None:
    driver = Driver(policy=TWICE, group_size=2, group_filter=DynamicSampling())
    driver.join("a")
    driver.fill()
    for reward, rollout in enumerate(list(driver.running.values())):
        driver.ask_turn(rollout)
        [handle] = driver.engines["a"].turns
        driver.sample("a", handle, 2, 1)
        driver.return_reward(rollout, float(reward))
    assert ask(driver) == [(0, 1)]
    driver.publish_and_swap()
    assert ask(driver) == [(0, 2)]
    assert [row.reward for row in driver.batches[-1].groups[0].kept] == [0.0, 1.0]


# ---------------------------------------------------------------- ledger, counts and admission


def test_tokens_are_trained_once_and_further_uses_are_counted_apart() -> None:
    driver = new_driver()
    train(driver)
    before = driver.core.ledger.snapshot()
    ask(driver)
    trained = driver.core.trained
    assert driver.core.ledger.snapshot() == before
    assert (trained.rollouts, trained.reused_rollouts, trained.reused_tokens) == (1, 1, 3)
    assert trained.staleness == {0: 1, 1: 1}


def test_a_row_discarded_in_its_second_use_stays_trained_by_its_first() -> None:
    driver = new_driver()
    train(driver)
    ask(driver)
    before = driver.core.ledger.snapshot()
    driver.do(ev.RowsDiscarded(2, (0,), "too_long"))
    trained = driver.core.trained
    assert driver.core.ledger.snapshot() == before
    assert (trained.reused_rollouts, trained.reused_tokens) == (0, 0)
    assert not driver.core.discarded_rollouts["too_long"]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_group_with_a_row_that_the_trainer_discarded_is_not_used_again(
    is_published: bool,
) -> None:
    driver = new_driver(group_size=2)
    finish(driver, 1)
    ask(driver)
    if is_published:
        driver.publish_and_swap()
    driver.do(ev.RowsDiscarded(1, (0,), "too_long"))
    driver.publish_and_swap([] if is_published else None)
    assert ask(driver) == []


def test_admission_leaves_room_for_the_versions_of_further_uses() -> None:
    most = {
        (eta, uses): BoundedStaleness(
            max_staleness=eta, groups_per_batch=8, max_uses=uses
        ).outstanding_groups_max
        for eta, uses in ((4, 1), (1, 2), (2, 2), (4, 2), (5, 2), (4, 3), (8, 3))
    }
    assert most == {
        (4, 1): 40,
        (1, 2): 8,
        (2, 2): 8,
        (4, 2): 16,
        (5, 2): 20,
        (4, 3): 8,
        (8, 3): 18,
    }


# ---------------------------------------------------------------- what goes wrong


def test_a_withdrawn_batch_gives_its_used_group_back() -> None:
    driver = new_driver()
    train(driver)
    driver.acknowledges = False
    assert ask(driver) == [(0, 2)]
    driver.do(ev.BatchReturned(2))
    assert driver.core.trained.reused_rollouts == 0
    del driver.batches[1:]
    assert ask(driver) == [(0, 2)]


def test_a_used_group_of_a_rolled_back_version_is_forgotten() -> None:
    driver = new_driver(replace(TWICE, max_staleness=4))
    train(driver)
    assert train(driver) == [(1, 1)]
    used = driver.core.handed.used
    assert [(group.group_id, group.newest_version) for group in used.values()] == [(0, 0), (1, 1)]
    driver.do(ev.VersionRetracted(1))
    assert [*driver.core.handed.used] == [0]


def test_a_trained_group_of_a_rolled_back_version_is_not_kept_later() -> None:
    driver = new_driver(replace(TWICE, max_staleness=4))
    train(driver)
    finish(driver, 1)
    assert ask(driver) == [(1, 1)]
    driver.name([2])
    driver.do(ev.VersionRetracted(1))
    driver.publish_and_swap([])
    assert [*driver.core.handed.used] == [0]


def test_a_used_group_of_a_lost_batch_is_not_used_again() -> None:
    driver = new_driver(replace(TWICE, max_staleness=2))
    train(driver)
    assert ask(driver) == [(0, 2)]
    driver.publish_and_swap([])
    driver.publish_and_swap([])
    assert [each.reason for each in driver.lost] == ["stale"]
    assert not driver.core.handed.used
    assert not driver.core.ledger.discarded


@pytest.mark.parametrize("snapshot", [False, True], ids=["replayed", "loaded"])
@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_a_resume_gives_every_use_back_that_the_checkpoint_lacks(
    batches: int, snapshot: bool
) -> None:
    driver = new_driver(replace(TWICE, max_staleness=8, max_uses=3))
    train(driver)
    before = [(0, 1)]
    for _ in range(2):
        before += ask(driver)
        driver.publish_and_swap()
    assert before == [(0, 1), (0, 2), (0, 3)]
    driver.die_and_resume(batches, snapshot=snapshot)
    driver.publish_and_swap()  # the weights of the checkpoint
    after = []
    for _ in range(3 - batches):
        after += ask(driver)
        driver.publish_and_swap()
    assert after == before[batches:]
    driver.fill()
    assert ask(driver) == []
    trained = driver.core.trained
    assert (trained.rollouts, trained.reused_rollouts, trained.reused_tokens) == (1, 2, 6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_uses": 0}, "max_uses counts the uses of a group and must be >= 1, got 0"),
        ({"max_uses": 4}, "max_uses=4 needs max_staleness >= 3, got 2"),
        (
            {"consumption_order": "completion", "deadline_policy": "split", "max_uses": 2},
            "max_uses=2 can't be combined with deadline_policy='split'",
        ),
    ],
)
def test_uses_that_could_not_happen_within_the_bound_are_refused_by_name(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        BoundedStaleness(**{"max_staleness": 2, "groups_per_batch": 1, **settings})  # type: ignore[arg-type]
