import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tidegate.errors import ConfigError
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Order, Unbounded
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.staleness import StalenessPolicy


@dataclass
class Job:
    """A group, as a policy sees it."""

    group_id: int
    oldest_possible_version: int
    running: int = 1
    is_retaken: bool = False
    is_split_remainder: bool = False
    finished: int = 0

    @property
    def oldest_version(self) -> int | None:
        return self.oldest_possible_version


class Queue:
    """Groups that are running or buffered."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[int, Job] = OrderedDict()
        self.done: OrderedDict[int, Job] = OrderedDict()
        self.returned_tasks = 0

    @property
    def in_order(self) -> Collection[Job]:
        return self.jobs.values()

    @property
    def ended(self) -> Collection[Job]:
        return self.done.values()

    @property
    def admission_slots(self) -> int:
        return len(self.jobs)

    @property
    def oldest_running(self) -> Job | None:
        return next((job for job in self.jobs.values() if job.running), None)

    @property
    def counts_by_version(self) -> Mapping[int, int]:
        return Counter(job.oldest_possible_version for job in self.in_order)

    @property
    def ended_counts_by_version(self) -> Mapping[int, int]:
        return Counter(job.oldest_possible_version for job in self.ended)

    @property
    def ended_ahead(self) -> int:
        ended = itertools.takewhile(lambda job: not job.running, self.jobs.values())
        return sum(1 for _ in ended)


def queue_of(groups: int) -> Queue:
    """Return a queue of running groups."""
    queue = Queue()
    queue.jobs.update({number: Job(number, 0) for number in range(groups)})
    return queue


@dataclass
class Outcome:
    """Result of training for some versions on jobs of arbitrary durations."""

    staleness: list[int]
    outstanding_max: int
    dropped: int
    is_stuck: bool


def train(policy: StalenessPolicy, *, seed: int, versions: int) -> Outcome:
    """Simulate training: jobs end in any order, some very late, and each batch makes a version, or
    as many as the policy says."""
    chance, queue, version, taken = random.Random(seed), Queue(), 0, 0
    outcome, next_id, laziness = Outcome([], 0, 0, is_stuck=False), 0, chance.random()
    stragglers: set[int] = set()
    while version < versions:
        in_training = taken * policy.groups_per_batch
        for _ in range(policy.admit(queue, training_groups=in_training)):
            queue.jobs[next_id] = Job(next_id, version)
            stragglers |= {next_id} if chance.random() < 0.2 else set()
            next_id += 1
        outcome.outstanding_max = max(outcome.outstanding_max, len(queue.jobs) + in_training)
        running = [job for job in queue.jobs.values() if job.running]
        quick = [job for job in running if job.group_id not in stragglers]
        if running and (not quick or chance.random() < 0.1 * laziness):
            quick = running
        if quick:
            job = chance.choice(quick)
            job.running, queue.done[job.group_id] = 0, job
        batch = policy.select(queue, groups=policy.groups_per_batch, trainer_version=version)
        if batch is None:
            if not running:
                outcome.is_stuck = True
                return outcome
            continue
        oldest = policy.oldest_trainable(version)
        for job in batch:
            del queue.jobs[job.group_id], queue.done[job.group_id]
            version_trained = job.oldest_possible_version
            if policy.masks_old_tokens:
                version_trained = max(version_trained, oldest)
            outcome.staleness.append(version - version_trained)
        taken += 1
        if taken == policy.batches_per_version:
            version, taken = version + 1, 0
        for job in policy.expire(queue, trainer_version=version):
            del queue.jobs[job.group_id]
            queue.done.pop(job.group_id, None)
            outcome.dropped += 1
    return outcome


orders = st.one_of(
    st.sampled_from(("admission", "completion")), st.builds(Window, st.integers(1, 20))
)


@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    batches=st.integers(1, 3),
    order=orders,
    deadline_policy=st.sampled_from(("wait", "mask", "drop")),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_no_policy_trains_beyond_what_it_guarantees_and_none_gets_stuck(
    eta: int, batch: int, batches: int, order: Order, deadline_policy: str, seed: int
) -> None:
    if order == "admission":
        deadline_policy = "wait"
    policy = BoundedStaleness(
        max_staleness=eta,
        groups_per_batch=batch,
        batches_per_version=batches,
        consumption_order=order,
        deadline_policy=deadline_policy,  # type: ignore[arg-type]
    )
    outcome = train(policy, seed=seed, versions=12)
    assert not outcome.is_stuck
    assert max(outcome.staleness) <= policy.guaranteed_bound
    assert outcome.outstanding_max <= (eta + 1) * batches * batch
    if deadline_policy == "wait":
        assert outcome.dropped == 0


def test_the_bound_of_waiting_in_the_order_of_completion_is_reached_and_so_is_a_windows() -> None:
    for order, bound in (("completion", 2), (Window(5), 2 + 1 + 3 // 2)):
        policy = BoundedStaleness(max_staleness=2, groups_per_batch=2, consumption_order=order)  # type: ignore[arg-type]
        oldest = [max(train(policy, seed=seed, versions=12).staleness) for seed in range(60)]
        assert policy.guaranteed_bound == bound
        assert max(oldest) == bound


def test_a_straggler_with_time_left_is_overtaken_and_one_without_is_waited_for() -> None:
    policy = BoundedStaleness(max_staleness=1, groups_per_batch=2, consumption_order="completion")
    queue = Queue()
    for number, floor in enumerate((0, 1, 1, 1)):
        queue.jobs[number] = job = Job(number, floor, running=int(number == 0))
        if number:
            queue.done[number] = job
    assert [j.group_id for j in policy.select(queue, groups=2, trainer_version=0) or []] == [1, 2]
    assert policy.select(queue, groups=2, trainer_version=1) is None  # group 0 is due now
    queue.jobs[0].running, queue.done[0] = 0, queue.jobs[0]
    assert [j.group_id for j in policy.select(queue, groups=2, trainer_version=1) or []] == [0, 1]


class Unread(Queue):
    """A queue whose groups must not be iterated: two have ended, an old one has not."""

    ended_ahead = 0
    counts_by_version = {0: 1, 1: 2}  # noqa: RUF012
    ended_counts_by_version = {1: 2}  # noqa: RUF012

    @property
    def in_order(self) -> Collection[Job]:
        raise AssertionError("each end of thousands would look through all of them")

    @property
    def ended(self) -> Collection[Job]:
        return Unlistable((1, 2))


class Unlistable(tuple[Any, ...]):
    """May be counted, but not iterated."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("each end of thousands would look through all of them")


@pytest.mark.parametrize("order", ["admission", "completion"])
def test_ended_groups_are_not_scanned_while_a_straggler_is_waited_for(order: Order) -> None:
    policy = BoundedStaleness(max_staleness=1, groups_per_batch=2, consumption_order=order)
    assert policy.select(Unread(), groups=2, trainer_version=1) is None


def test_stragglers_that_are_due_are_counted_before_groups_are_scanned() -> None:
    policy = split_at_deadline(groups_per_batch=4)
    assert policy.select(Unread(), groups=4, trainer_version=1) is None


def split_at_deadline(*, groups_per_batch: int = 1, **settings: Any) -> BoundedStaleness:
    return BoundedStaleness(
        max_staleness=1,
        groups_per_batch=groups_per_batch,
        consumption_order="completion",
        deadline_policy="split",
        **settings,
    )


@pytest.mark.parametrize(
    ("finished", "running", "is_split"),
    [(4, 12, True), (3, 13, False), (2, 2, True), (1, 3, False)],
)
def test_a_due_group_is_split_if_a_quarter_of_it_and_two_rollouts_have_ended(
    finished: int, running: int, is_split: bool
) -> None:
    policy = split_at_deadline()
    queue = Queue()
    queue.jobs[0] = due = Job(0, 0, running=running, finished=finished)
    assert policy.select(queue, groups=1, trainer_version=0) is None
    assert policy.select(queue, groups=1, trainer_version=1) == ([due] if is_split else None)


def test_a_remainder_joins_a_batch_as_soon_as_one_of_its_rollouts_has_ended() -> None:
    policy = split_at_deadline()
    queue = Queue()
    queue.jobs |= {
        0: Job(0, 0, running=2, is_split_remainder=True),
        1: Job(1, 0, running=2, is_split_remainder=True, finished=1),
        2: Job(2, 0, running=0),
    }
    queue.done[2] = queue.jobs[2]
    batch = policy.select(queue, groups=1, trainer_version=0) or []
    assert [job.group_id for job in batch] == [2, 1]


def test_a_batch_waits_while_more_rollouts_of_split_groups_than_the_limit_would_run_on() -> None:
    policy = split_at_deadline(split_rollouts_limit=3)
    queue = Queue()
    queue.jobs |= {
        0: Job(0, 0, running=2, is_split_remainder=True, finished=1),
        1: Job(1, 0, running=2, finished=2),
    }
    assert policy.select(queue, groups=1, trainer_version=1) is None
    queue.jobs[0].running, queue.jobs[0].finished = 1, 2
    batch = policy.select(queue, groups=1, trainer_version=1) or []
    assert [job.group_id for job in batch] == [1, 0]


def test_so_many_of_a_version_are_trained_early_as_later_batches_have_no_room_for() -> None:
    policy = BoundedStaleness(max_staleness=2, groups_per_batch=2, consumption_order="completion")
    queue = Queue()
    for number, floor in enumerate((0, 0, 0, 0, 0, 1)):  # five of version 0 are due by version 2
        queue.jobs[number] = job = Job(number, floor, running=int(number == 4))
        if number != 4:
            queue.done[number] = job
    queue.done.move_to_end(5, last=False)  # group 5 has ended first
    batch = policy.select(queue, groups=2, trainer_version=0) or []
    # One of the five, and the group that ended first.
    assert sorted(job.group_id for job in batch) == [0, 5]


def test_a_synchronous_run_admits_the_next_batch_only_when_the_last_one_is_published() -> None:
    policy = Synchronous(groups_per_batch=4)
    assert policy.guaranteed_bound == 0
    assert policy.admit(queue_of(0), training_groups=4) == 0
    assert policy.admit(queue_of(0), training_groups=0) == 4


def test_a_one_step_pipeline_starts_a_batch_once_the_last_one_is_handed_over() -> None:
    policy = OneStepOffPolicy(groups_per_batch=4)
    assert policy.guaranteed_bound == 1
    assert policy.admit(queue_of(1), training_groups=0) == 3
    assert policy.admit(queue_of(4), training_groups=0) == 0
    assert policy.admit(queue_of(0), training_groups=4) == 4
    assert policy.admit(queue_of(0), training_groups=8) == 0


def test_over_sampling_admits_by_its_factor_and_promises_no_age() -> None:
    policy = OverSampling(groups_per_batch=4, factor=1.5)
    assert policy.admit(queue_of(0), training_groups=0) == 6
    assert policy.guaranteed_bound is None
    with pytest.raises(ConfigError, match=r"factor must be >= 1.*got 0\.5"):
        OverSampling(groups_per_batch=4, factor=0.5)


def test_stragglers_are_packed_into_a_round_of_their_own_once_they_fill_one() -> None:
    policy = TailPacking(groups_per_batch=4, factor=1.5)
    queue = Queue()
    assert policy.admit(queue, training_groups=4) == 0
    assert (policy.admit(queue, training_groups=0), policy.prefers_returned(queue)) == (6, False)
    queue.jobs[0] = Job(0, 0)
    queue.returned_tasks = 4  # a short round in progress stays a short round
    assert (policy.admit(queue, training_groups=0), policy.prefers_returned(queue)) == (5, False)
    del queue.jobs[0]
    assert (policy.admit(queue, training_groups=0), policy.prefers_returned(queue)) == (4, True)
    queue.jobs[1], queue.returned_tasks = Job(1, 0, is_retaken=True), 3
    assert (policy.admit(queue, training_groups=0), policy.prefers_returned(queue)) == (3, True)


def test_what_bounds_no_age_must_say_how_much_may_be_outstanding() -> None:
    with pytest.raises(ConfigError, match="needs outstanding_groups_limit"):
        Unbounded(groups_per_batch=4)
    policy = Unbounded(groups_per_batch=4, outstanding_groups_limit=9)
    assert policy.admit(queue_of(2), training_groups=4) == 3


IN_COMPLETION_ORDER = {"consumption_order": "completion"}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"consumption_order": "random"}, "must be 'admission', 'completion' or Window"),
        ({"deadline_policy": "hope"}, "must be 'wait', 'mask', 'split' or 'drop', got 'hope'"),
        ({"batches_per_version": 0}, "batches_per_version counts the batches"),
        ({"batches_per_version": 2, "outstanding_groups_limit": 7}, "needs 8 outstanding groups"),
        (
            IN_COMPLETION_ORDER | {"deadline_policy": "split", "split_rollouts_limit": 0},
            "split_rollouts_limit counts running rollouts",
        ),
        (
            IN_COMPLETION_ORDER | {"split_rollouts_limit": 1},
            "split_rollouts_limit counts running rollouts",
        ),
        ({"just_in_time_after_versions": 0}, "must be >= 1, or None .* got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        BoundedStaleness(max_staleness=1, groups_per_batch=4, **settings)
    with pytest.raises(ConfigError, match=r"got Window\(0\)"):
        Window(0)
