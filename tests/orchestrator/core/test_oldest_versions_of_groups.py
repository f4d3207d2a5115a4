"""Oldest possible versions of groups, and how a publish raises them."""

from tests.orchestrator.core.driver import Driver
from tidegate.transport.messages import STOP


def test_a_publish_raises_the_oldest_possible_version_only_of_groups_without_a_token() -> None:
    driver = Driver(max_staleness=2, groups_per_batch=1, group_size=2)
    driver.join("a")
    assert driver.fill() == 3
    sampled, waiting, ended = (group.rollouts for group in driver.core.groups.in_order)
    for rollout in (sampled[0], waiting[0], *ended):
        driver.ask_turn(rollout)
        place = driver.where(rollout)
        assert place is not None
        if rollout is not waiting[0]:
            driver.sample(*place, tokens=1, finish=STOP)
    for rollout in ended:
        driver.return_reward(rollout)
    driver.core.groups.raise_oldest_possible_versions(1)
    assert [group.oldest_possible_version for group in driver.core.groups.in_order] == [0, 1, 0]
    assert driver.core.groups.counts_by_version == {0: 2, 1: 1}
    driver.core.groups.raise_oldest_possible_versions(2)
    assert driver.core.groups.counts_by_version == {0: 2, 2: 1}
