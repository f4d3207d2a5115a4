"""Hand-over of batches: none is lost, and none is too old when it is trained."""

import asyncio
import itertools
import random
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.core.driver import Driver
from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.handed_batches import HandedBatches
from tidegate.orchestrator.core.state import digest, load, save
from tidegate.orchestrator.fleet.pending_futures import BatchRequest
from tidegate.orchestrator.scheduler.trainer_side import BatchRequestQueue
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import STOP

pytestmark = pytest.mark.wire


def finish(driver: Driver, groups: int) -> None:
    """End this many of the oldest running groups."""
    driver.fill()
    running = sorted({rollout.group_id for rollout in driver.running.values()})
    for rollout in list(driver.running.values()):
        if rollout.group_id in running[:groups]:
            driver.solve(rollout)


def ask(driver: Driver, groups: int) -> ev.HandOver:
    """End as many groups as a batch takes, and take it."""
    finish(driver, groups)
    before = len(driver.batches)
    driver.do(ev.BatchRequested())
    if len(driver.batches) == before and not driver.refused:
        finish(driver, groups)  # in places whose request has shown them to be free
    return driver.batches[-1]


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


# ---------------------------------------------------------------- age


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_a_trainer_asks_for_during_its_step_is_young_enough_when_it_is_trained(
    policy: BoundedStaleness,
) -> None:
    driver = Driver(policy=policy)
    driver.join("a")
    bound = policy.guaranteed_bound
    assert bound is not None
    in_training = ask(driver, 2)
    for _ in range(8):
        ahead = ask(driver, 2)
        assert in_training.trainer_version == driver.published
        assert driver.published - oldest_trained(in_training) <= bound
        driver.publish_and_swap()
        in_training = ahead
    assert driver.core.discarded_rollouts["stale"] == 0


@pytest.mark.parametrize("batches_per_publish", [2, 3])
def test_a_trainer_that_publishes_every_few_batches_is_not_held_up(
    batches_per_publish: int,
) -> None:
    driver = Driver(max_staleness=3, groups_per_batch=1)
    driver.join("a")
    for _ in range(6):
        for _ in range(batches_per_publish):
            ask(driver, 1)
        driver.publish_and_swap()
    assert driver.refused == []
    assert len(driver.batches) == 6 * batches_per_publish
    assert driver.core.handed.untrained == 0  # all that it took before its publish


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_all_batches_of_a_version_are_trained_at_it_and_are_young_enough(
    policy: BoundedStaleness, look_ahead: int
) -> None:
    policy = replace(policy, batches_per_version=3)
    driver = Driver(policy=policy)
    driver.join("a")
    held: deque[ev.HandOver] = deque()
    for number in range(18):
        while len(held) <= look_ahead:
            held.append(ask(driver, 2))
        batch = held.popleft()
        assert batch.trainer_version == driver.published == number // 3
        assert driver.published - oldest_trained(batch) <= policy.guaranteed_bound
        if number % 3 == 2:
            driver.publish_and_swap()
    assert driver.refused == []
    assert driver.core.discarded_rollouts["stale"] == 0


@pytest.mark.parametrize("look_ahead", [0, 1, 4])
def test_a_publish_after_part_of_a_versions_batches_is_refused(look_ahead: int) -> None:
    policy = BoundedStaleness(max_staleness=4, groups_per_batch=2, batches_per_version=3)
    driver = Driver(policy=policy)
    driver.join("a")
    for _ in range(look_ahead):
        ask(driver, 2)
    for taken in (3, 3, 1, 1, 1):
        for _ in range(taken):
            ask(driver, 2)
        if driver.core.handed.taken < 3:
            match = rf"after {driver.core.handed.taken} batches.*batches_per_version=3"
            with pytest.raises(ConfigError, match=match):
                driver.core.refuse_early_publish()
        else:
            driver.core.refuse_early_publish()
            driver.publish_and_swap()
    driver.core.refuse_early_publish()  # the same weights again
    ask(driver, 2)
    driver.core.handed.on_tasks_ended()
    driver.core.refuse_early_publish()  # the last version may be of fewer batches


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
    batch = ask(driver, 1)
    assert [len(group.kept) for group in batch.groups] == [3, 1]
    assert batch.trainer_version == 0
    assert driver.core.ledger.discarded == {}


def test_versions_of_fewer_batches_than_declared_are_counted_as_they_are() -> None:
    """The last version before the tasks end, and weights that were published again."""
    handed = HandedBatches(is_kept=False, batches_per_version=3)
    handed.add([], 0, num_groups=1)
    handed.publish(1)
    assert handed.untrained == 0
    for _ in range(3):
        handed.add([], 1, num_groups=1)
    handed.on_publish_failed(is_batch_requested=False)
    for _ in range(4):
        handed.add([], 2, num_groups=1)
    handed.publish(2)  # made from six; one was requested ahead
    assert handed.untrained == 1


def test_a_trainer_that_publishes_now_and_then_is_never_refused_while_it_may_hold_a_batch() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=1)
    driver.join("a")
    for batches in (1, 2, 1, 1, 2, 1, 2, 2, 1, 2):
        for _ in range(batches):
            ask(driver, 1)
        driver.publish_and_swap()
    assert driver.refused == []


def test_a_trainer_that_never_publishes_gets_an_error_that_says_so() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=1)
    driver.join("a")
    ask(driver, 1)
    ask(driver, 1)
    driver.do(ev.BatchRequested())
    assert len(driver.refused) == 1
    driver.publish_and_swap()
    ask(driver, 1)
    assert len(driver.batches) == 3


def test_a_request_ahead_of_a_publish_is_refused_rather_than_answered_with_too_old_groups() -> None:
    driver = Driver(max_staleness=2, groups_per_batch=1)
    driver.join("a")
    ask(driver, 1)
    ask(driver, 1)
    driver.do(ev.BatchRequested())  # and waits
    driver.publish_and_swap()
    finish(driver, 1)
    ask(driver, 1)
    assert driver.core.handed.untrained == 3
    driver.do(ev.BatchRequested())
    assert len(driver.refused) == 1


def take_tasks_in_batches_of_one(driver: Driver, tasks: int) -> None:
    """Take all batches of an iterator of so many tasks, and ask once more."""
    driver.do(ev.TasksOffered())
    for _ in range(tasks):
        driver.do(ev.BatchRequested())
        driver.do(ev.TaskArrived(driver.next_task))
        driver.next_task += 1
        for rollout in list(driver.running.values()):
            driver.solve(rollout)
    driver.do(ev.TasksExhausted())
    driver.do(ev.BatchRequested())


def test_a_trainer_whose_tasks_ended_during_its_step_catches_up_after_its_publish() -> None:
    """With two batches ahead, it lacks one; a publish counts for one batch all the same."""
    driver = Driver(max_staleness=2, groups_per_batch=1)
    driver.join("a")
    take_tasks_in_batches_of_one(driver, 2)
    assert driver.ended == 1
    driver.publish_and_swap()  # made from the first
    driver.do(ev.TasksOffered())
    ask(driver, 1)
    ask(driver, 1)
    assert [batch.trainer_version for batch in driver.batches] == [0, 1, 2, 3]


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_a_publish_after_an_iterators_last_task_is_not_delayed(tasks: int) -> None:
    driver = Driver(max_staleness=tasks - 1, groups_per_batch=1)
    driver.join("a")
    for _ in range(4):
        take_tasks_in_batches_of_one(driver, tasks)
        driver.publish_and_swap()
    assert (driver.refused, driver.ended, len(driver.batches)) == ([], 4, 4 * tasks)


def test_a_publish_that_failed_counts_for_its_batch_once_another_was_taken() -> None:
    handed = HandedBatches(is_kept=False)
    handed.add([], 0, num_groups=1)
    handed.on_publish_failed(is_batch_requested=False)
    handed.add([], 1, num_groups=1)
    handed.publish(1)
    assert handed.untrained == 0


def test_a_batch_taken_after_a_failed_publish_shows_nothing_of_the_version_before_it() -> None:
    """The trainer holds one batch beside the one that it trains on, as it may with a bound of 1."""
    handed = HandedBatches(is_kept=False)
    handed.add([], 0, num_groups=1)
    handed.add([], 1, num_groups=1)
    handed.publish(1)  # made from the first
    handed.add([], 2, num_groups=1)
    handed.on_publish_failed(is_batch_requested=False)  # of the second
    assert not handed.on_batch_requested()
    assert handed.assume_trained()  # no batch can fill: the second is trained by now
    handed.add([], 2, num_groups=1)
    handed.publish(2)  # made from the second and the third
    assert [batch.version for batch in handed.holding] == [1, 1, 2, None]


def test_a_trainer_that_waits_for_a_batch_when_its_publish_fails_catches_up() -> None:
    handed = HandedBatches(is_kept=False)
    handed.add([], 0, num_groups=1)
    handed.add([], 1, num_groups=1)
    handed.publish(1)  # made from the first
    handed.on_publish_failed(is_batch_requested=True)
    handed.add([], 2, num_groups=1)
    assert not handed.on_batch_requested()


def test_weights_tried_again_count_for_one_batch() -> None:
    handed = HandedBatches(is_kept=False)
    handed.add([], 0, num_groups=1)
    handed.add([], 1, num_groups=1)
    handed.on_publish_failed(is_batch_requested=False)
    handed.publish(1)
    assert handed.untrained == 1


def test_a_publish_counts_for_those_whose_place_it_took() -> None:
    handed = HandedBatches(is_kept=False)
    handed.add([], 0, num_groups=1)
    handed.add([], 1, num_groups=1)
    handed.publish(2, replaced=1)
    assert handed.untrained == 0


# ---------------------------------------------------------------- back again


def test_a_batch_that_did_not_reach_the_trainer_is_aged_when_it_is_asked_for_again() -> None:
    driver = Driver(max_staleness=0, groups_per_batch=1)
    driver.join("a")
    ask(driver, 1)
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


def test_what_is_known_of_a_trainers_rhythm_is_saved() -> None:
    driver = Driver(max_staleness=3, groups_per_batch=1)
    driver.join("a")
    for _ in range(2):
        ask(driver, 1)
        ask(driver, 1)
        driver.publish_and_swap()
    ask(driver, 1)
    driver.do(ev.PublishFailed())
    driver.do(ev.BatchRequested())
    driver.do(ev.BatchRequestCancelled(is_held=True))
    again = driver.new_core()
    load(save(driver.core), again)
    assert digest(again) == digest(driver.core)
    assert (
        again.has_unmet_request,
        again.handed.previous_taken,
        again.handed.failed_publishes,
    ) == (True, 2, 1)


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


# ---------------------------------------------------------------- between two loops


class RequestingTrainer:
    """A :class:`BatchRequestQueue` whose core has a batch per request, numbered anew after a
    return."""

    def __init__(self) -> None:
        self.asked: list[ev.Event] = []
        self.number = 0
        self.requests = BatchRequestQueue(
            deque(), self.handle, lambda action: action(), lambda: None
        )

    def handle(self, event: ev.Event) -> None:
        self.asked.append(event)
        match event:
            case ev.BatchRequested():
                self.number += 1
                self.requests.hand_over(ev.HandOver([], 0, self.number))
            case ev.BatchReturned():
                self.number -= 1


async def test_an_offer_that_was_not_taken_is_withdrawn_when_a_publish_begins() -> None:
    core = RequestingTrainer()
    request = BatchRequest()
    assert await core.requests.wait(request)
    seen = request.batch
    core.requests.hold(True)
    assert seen is not None
    assert not request.take(seen)
    assert core.asked == [ev.BatchRequested(), ev.BatchReturned(1, is_held=True)]
    core.requests.hold(False)
    assert await core.requests.wait(request)
    assert request.batch is not None
    assert request.take(request.batch)


async def test_a_batch_that_was_taken_outlives_a_publish() -> None:
    core = RequestingTrainer()
    request = BatchRequest()
    assert await core.requests.wait(request)
    assert request.batch is not None
    assert request.take(request.batch)
    core.requests.hold(True)
    core.requests.acknowledge(request)
    core.requests.close(request)  # of a call that is over: nothing goes back
    assert core.asked == [ev.BatchRequested()]


async def test_one_batch_at_a_time_is_on_offer() -> None:
    core = RequestingTrainer()
    first, second = BatchRequest(), BatchRequest()
    assert await core.requests.wait(first)
    waits = asyncio.ensure_future(core.requests.wait(second))
    await asyncio.sleep(0)
    assert core.asked == [ev.BatchRequested()]
    core.requests.close(first)
    assert await waits
    assert second.batch is not None
    assert second.batch.number == 1


# ---------------------------------------------------------------- a trainer's own loop


async def solve(episode: tidegate.Episode, task: int) -> float:
    """Episode of one short turn."""
    episode.append([10 + task % 40, 11, 12])
    return float(len((await episode.generate(max_tokens=4)).token_ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


SETTINGS: dict[str, Any] = {"engines": 1, "group_size": 1, "groups_per_batch": 1}


@pytest.mark.timeout(120)
async def test_no_batch_is_lost_by_a_trainer_that_keeps_stopping_to_wait(model: Path) -> None:
    tasks, numbers, groups, stopped = 40, list[int](), list[int](), 0
    async with tidegate.serve(model=model, **SETTINGS, max_staleness=4) as rollouts:
        await rollouts.offer(range(tasks), episode=solve)
        chance = random.Random(0)
        while True:
            try:
                timeout_s = chance.uniform(0, 0.004)
                batch = await asyncio.wait_for(rollouts.next_batch(), timeout_s)
            except TimeoutError:
                stopped += 1
                time.sleep(chance.choice((0, 0, 0.002)))  # noqa: ASYNC251 - a step that blocks
                continue
            if batch is None:
                break
            numbers.append(batch.number)
            groups += batch.group_ids.tolist()
            assert rollouts.batches_received == batch.number
            await rollouts.publish({}, partial=True)
    assert stopped > 0
    assert numbers == list(range(1, tasks + 1))
    assert len(set(groups)) == tasks


@pytest.mark.timeout(120)
async def test_the_state_of_a_cancelled_call_claims_no_batch(model: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"journal": True, "run_directory": tmp_path / "run"}
    async with tidegate.serve(model=model, **settings, max_staleness=1) as rollouts:
        await rollouts.offer(range(4), episode=solve)
        asked = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0)  # it is on its way to the run's loop
        until_s = time.monotonic() + 60
        while not rollouts.statistics().batches and time.monotonic() < until_s:
            pass  # this loop doesn't poll, and the run's loop has a batch for it
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert rollouts.state_dict()["batches"] == 0
        batch = await rollouts.next_batch()
        assert batch is not None
        assert (batch.number, rollouts.state_dict()["batches"]) == (1, 1)


@pytest.mark.timeout(120)
def test_a_batch_that_ctrl_c_comes_in_between_with_is_given_once_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tidegate.serve_sync(model=model, **SETTINGS, max_staleness=2) as rollouts:
        batches = rollouts.batches(range(3), episode=solve)
        first = next(batches)
        rollouts.publish({}, partial=True)
        with monkeypatch.context() as patch:  # between the batch's arrival and its acknowledgement
            patch.setattr(rollouts._handle._forecaster, "add_batch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert rollouts.batches_received == 1
        second = next(rollouts.batches(range(2, 5), episode=solve))
        assert (first.number, second.number) == (1, 2)
        assert second.tasks == (1,)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(120)
async def test_what_is_asked_for_during_the_step_is_trained_within_the_bound(model: Path) -> None:
    async with tidegate.serve(model=model, **SETTINGS, max_staleness=1) as rollouts:
        await rollouts.offer(itertools.count(), episode=solve)
        ahead = asyncio.create_task(rollouts.next_batch())
        for _ in range(12):
            batch = await ahead
            assert batch is not None
            ahead = asyncio.create_task(rollouts.next_batch())
            await asyncio.to_thread(time.sleep, 0.03)  # the step
            assert batch.trainer_version == rollouts.version
            assert rollouts.version - min(v for v in batch.weight_versions.flatten() if v >= 0) <= 1
            await rollouts.publish({}, partial=True)
        ahead.cancel()
