from dataclasses import dataclass

import msgspec
import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.errors import ConfigError, PolicyBroken, ResumeMismatch
from tidegate.orchestrator.batches.batches import build_batch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import describe, made_of, record_of
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling
from tidegate.policies.staleness import G, OutstandingGroups, StalenessPolicy
from tidegate.transport.messages import RUNNING, STOP


@dataclass(frozen=True, kw_only=True)
class NewestFirst(StalenessPolicy):
    """User-defined policy: the newest groups are trained first, within an age."""

    highest_age: int = 1

    @property
    def guaranteed_bound(self) -> int:
        return self.highest_age

    @property
    def allowed_groups(self) -> int:
        return 3 * self.groups_per_batch

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        newest = sorted(waiting.ended, key=lambda group: -group.group_id)
        return newest[:groups] if len(newest) >= groups else None


def started(policy: StalenessPolicy, *, group_size: int = 1) -> Driver:
    driver = Driver(policy=policy, group_size=group_size)
    driver.join("a")
    driver.fill()
    return driver


def end(driver: Driver, *group_ids: int) -> None:
    for group_id in group_ids:
        for rollout in [r for r in driver.running.values() if r.group_id == group_id]:
            driver.sample(*ask(driver, rollout), 3, STOP)
            driver.return_reward(rollout)


def ask(driver: Driver, rollout: Rollout) -> tuple[str, int]:
    driver.ask_turn(rollout, max_tokens=100)
    place = driver.where(rollout)
    assert place is not None
    return place


def trained_ids(driver: Driver) -> list[list[int]]:
    return [[group.group_id for group in batch.groups] for batch in driver.batches]


def test_a_users_own_policy_decides_what_is_trained_next_and_its_bound_is_kept() -> None:
    driver = started(NewestFirst(groups_per_batch=1))
    end(driver, 0, 1, 2)
    for _ in range(3):
        driver.do(ev.BatchRequested())
        driver.publish_and_swap()
    assert trained_ids(driver) == [[2], [1]]
    assert driver.core.discarded_rollouts == {"stale": 1}  # group 0 would be of staleness 2


def test_groups_that_teach_nothing_make_room_for_others_and_their_stragglers_are_stopped() -> None:
    policy = BoundedStaleness(max_staleness=0, groups_per_batch=1)
    driver = Driver(policy=policy, group_size=3, group_filter=DynamicSampling(decide_after=2))
    driver.join("a")
    driver.fill()
    first, second, third = list(driver.running.values())
    driver.sample(*ask(driver, third), 4, RUNNING)
    for rollout in (first, second):
        driver.sample(*ask(driver, rollout), 3, STOP)
        driver.return_reward(rollout, 0.0)
    assert driver.stopped == [third]
    assert driver.core.ledger.discarded == {"zero_variance": 10}
    assert driver.core.discarded_rollouts == {"zero_variance": 3}
    assert driver.core.admissible_groups == 1


def test_a_prompt_that_is_solved_is_passed_over_after_a_crash_too() -> None:
    policy = BoundedStaleness(max_staleness=0, groups_per_batch=1)
    solved = DynamicSampling(solved_at=0.9, rollouts_min=2)
    driver = Driver(policy=policy, group_size=2, group_filter=solved)
    driver.join("a")
    driver.do(ev.TaskArrived("easy", digest=b"easy"))
    end(driver, 0)
    again = driver.new_core()
    load(save(driver.core), again)
    for core in (driver.core, again):
        assert core.handle(ev.TaskArrived("easy", digest=b"easy")) == []
        assert core.prompts.skipped == 1
        assert core.handle(ev.TaskArrived("hard", digest=b"hard")) != []


def test_a_policy_that_chooses_a_running_group_gets_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hasty(NewestFirst):
        def select(
            self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
        ) -> list[G] | None:
            return list(waiting.in_order)[:groups]

    driver = started(Hasty(groups_per_batch=1))
    with pytest.raises(PolicyBroken, match=r"Hasty.select\(\) chose group 0, 1 of whose rollouts"):
        driver.core.handle(ev.BatchRequested())


def test_a_straggler_is_overtaken_and_only_its_old_tokens_are_masked() -> None:
    policy = BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="mask"
    )
    driver = started(policy)
    slow = next(r for r in driver.running.values() if r.group_id == 0)
    name, handle = ask(driver, slow)
    driver.sample(name, handle, 5, RUNNING)
    for group in (1, 2, 3):
        end(driver, group)
        driver.do(ev.BatchRequested())
        driver.publish_and_swap()
        driver.fill()
        driver.sample(name, handle, 2, RUNNING)
    driver.sample(name, handle, 1, STOP)
    driver.return_reward(slow)
    driver.do(ev.BatchRequested())  # at version 3: tokens of versions 2 and 3 are trained
    handed = driver.batches[-1]
    assert [group.group_id for group in handed.groups] == [0]
    batch = build_batch(handed.groups, handed.trainer_version)
    assert batch.weight_versions[batch.loss_mask].tolist() == [2, 2, 3, 3, 3]
    assert batch.staleness.tolist() == [1]
    assert driver.core.ledger.discarded["too_old"] == 7
    assert driver.core.ledger.snapshot().error == 0


def test_a_group_that_gets_too_old_is_dropped_at_once_where_that_is_asked_for() -> None:
    policy = BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="drop"
    )
    driver = started(policy)
    slow = next(r for r in driver.running.values() if r.group_id == 0)
    name, handle = ask(driver, slow)
    driver.sample(name, handle, 5, RUNNING)
    end(driver, 1)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    assert not driver.requeued
    driver.fill()
    end(driver, 2)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()  # version 2: group 0 is of version 0
    assert [key.index for key in driver.requeued] == [0]
    assert driver.core.ledger.discarded["stale"] == 5


@pytest.mark.parametrize(
    "policy",
    [
        BoundedStaleness(
            max_staleness=3, groups_per_batch=2, consumption_order=Window(4), deadline_policy="mask"
        ),
        BoundedStaleness(max_staleness=3, groups_per_batch=2, batches_per_version=4),
        OneStepOffPolicy(groups_per_batch=3),
        BoundedStaleness(max_staleness=2, groups_per_batch=3, just_in_time_after_versions=None),
        NewestFirst(groups_per_batch=1, highest_age=4),
    ],
)
def test_a_policy_is_written_down_and_read_again(policy: StalenessPolicy) -> None:
    record = record_of(policy)
    assert made_of(msgspec.json.decode(msgspec.json.encode(record)), [NewestFirst]) == policy
    assert describe(record).startswith(type(policy).__name__)


def test_what_can_not_be_written_down_is_refused_with_its_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clever(NewestFirst):
        model: object = None

    with pytest.raises(ConfigError, match=r"make range a frozen dataclass of plain values"):
        record_of(Clever(groups_per_batch=1, model=range(3)))
    with pytest.raises(ResumeMismatch, match=r"Clever', which is no policy of Tidegate's"):
        made_of(record_of(Clever(groups_per_batch=1)))


def test_a_group_is_trained_in_time_without_its_stragglers_which_follow() -> None:
    policy = BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="split"
    )
    driver = started(policy, group_size=3)
    quick, second, slow = (r for r in driver.running.values() if r.group_id == 0)
    place = ask(driver, slow)
    driver.sample(*place, 5, RUNNING)
    for rollout, reward in ((quick, 1.0), (second, 0.0)):
        driver.sample(*ask(driver, rollout), 3, STOP)
        driver.return_reward(rollout, reward)
    end(driver, 1)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()  # group 0 is due now
    driver.do(ev.BatchRequested())
    assert trained_ids(driver) == [[1], [0]]
    assert [r.index for r in driver.batches[1].groups[0].kept] == [0, 1]
    driver.publish_and_swap()
    assert driver.fill() == 2  # the remainder holds no place
    driver.sample(*place, 2, RUNNING)  # the first of version 2
    driver.sample(*place, 1, STOP)
    driver.return_reward(slow, 1.0)
    end(driver, 3)  # the remainder has become group 2
    driver.do(ev.BatchRequested())
    handed = driver.batches[-1]
    remainder = handed.groups[-1]
    assert (remainder.split_from, remainder.sibling_rewards) == (0, [1.0, 0.0])
    batch = build_batch(handed.groups, handed.trainer_version)
    assert batch.advantages[-1] == pytest.approx((1 - 1 / 2) / (1 / 3) ** 0.5, rel=1e-3)
    assert batch.weight_versions[-1][batch.loss_mask[-1]].tolist() == [2, 2, 2]
    assert driver.core.ledger.discarded == {"too_old": 5}
    again = driver.new_core()
    load(save(driver.core), again)
    assert digest(again) == digest(driver.core)


def test_each_straggler_of_a_split_group_is_in_the_first_batch_after_its_end() -> None:
    policy = BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="split"
    )
    driver = started(policy, group_size=4)
    *quick, slow, slowest = (r for r in driver.running.values() if r.group_id == 0)
    places = [ask(driver, straggler) for straggler in (slow, slowest)]
    for place in places:
        driver.sample(*place, 5, RUNNING)
    for rollout, reward in zip(quick, (1.0, 0.0), strict=True):
        driver.sample(*ask(driver, rollout), 3, STOP)
        driver.return_reward(rollout, reward)
    end(driver, 1)
    for _ in range(2):
        driver.do(ev.BatchRequested())
        driver.publish_and_swap()
        driver.fill()
    assert trained_ids(driver) == [[1], [0]]
    for straggler, place in zip((slow, slowest), places, strict=True):
        end(driver, next(r.group_id for r in driver.running.values() if r.rollout_id > 7))
        driver.sample(*place, 1, STOP)
        driver.return_reward(straggler, 1.0)
        driver.do(ev.BatchRequested())
        rest = driver.batches[-1].groups[-1]
        assert rest.kept == [straggler]
        assert (rest.split_from, rest.sibling_rewards) == (0, [1.0, 0.0])
        driver.publish_and_swap()
        driver.fill()
        again = driver.new_core()
        load(save(driver.core), again)
        assert digest(again) == digest(driver.core)
    assert driver.core.outstanding_groups == 2
