"""Draws, weights and statistics of a curriculum's tasks survive a crash at any point."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.core.driver import Driver
from tidegate.errors import ConfigError, ResumeMismatch
from tidegate.orchestrator.batches.curriculum import Curriculum
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.task_records import TaskStatistics
from tidegate.policies.failures import FailureCause
from tidegate.policies.filters import DynamicSampling
from tidegate.policies.task_sampling import HardTaskReplay

TASKS = 6
NAME = "sums"


def by_outcome(task: int, seen: TaskStatistics) -> float:
    """Give unsolved tasks more weight."""
    return 1.0 if seen.mean_reward is None else 0.25 + (1 - seen.mean_reward)


def new_curriculum() -> Curriculum:
    replayed = HardTaskReplay(share=0.3, times_max=2)
    return Curriculum(range(TASKS), weight=by_outcome, replay=replayed, seed=5, name=NAME)


class CurriculumDriver(Driver):
    """A driver whose tasks come from a curriculum."""

    def __init__(self) -> None:
        super().__init__(group_filter=DynamicSampling(), max_staleness=1)
        self.join("a")
        self.offer(new_curriculum())

    def offer(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self.do(ev.TasksOffered("", NAME))
        curriculum.attach(self.core.task_records.curricula[NAME], lambda weights: None)

    def fill(self) -> int:
        admitted = 0
        while self.core.admissible_groups:
            if self.requeued:
                key = self.requeued.pop(0)
                self.do(ev.TaskArrived(key.index, key))
            else:
                draw = self.curriculum.draw()
                if draw is None:
                    self.do(ev.TasksExhausted())
                    break
                self.do(ev.TaskArrived(draw[0], None, b"", b"", draw[1], draw[2]))
            admitted += 1
        return admitted

    def offer_again(self) -> None:
        """Offer a new curriculum object, as another process does."""
        self.offer(new_curriculum())
        core = self.core
        for key in sorted({*core.pending_after_resume, *core.tasks.requeued}):
            assert key.offer == core.tasks.offer
            self.do(ev.TaskFoundAgain(core.task_records.item_of(key), key))


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["solve", "solve", "solve", "fail", "batch", "publish", "weights", "crash"]
        ),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(actions)
def test_statistics_and_draws_are_those_of_a_run_that_never_crashed(
    steps: list[tuple[str, int]],
) -> None:
    driver = CurriculumDriver()
    model: dict[int, Counter[str]] = {}
    for kind, number in steps:
        driver.fill()
        record = driver.core.task_records.curricula[NAME]
        running = sorted(driver.running)
        match kind:
            case "solve" if running:
                rollout = driver.running[running[number % len(running)]]
                count(model, driver, rollout, {"rollouts": 1, "tokens": 3, "reward": number % 2})
                driver.ask_turn(rollout)
                for handle in list(driver.engines["a"].turns):
                    driver.sample("a", handle, 3, 1)
                driver.return_reward(rollout, float(number % 2))
            case "fail" if running:
                rollout = driver.running[running[number % len(running)]]
                count(model, driver, rollout, {"failed": 1})
                driver.fail_by(rollout, FailureCause.INFRASTRUCTURE)
            case "batch":
                driver.do(ev.BatchRequested())
                if driver.core.handed.requests:
                    driver.do(ev.BatchRequestCancelled())
            case "publish" if len(driver.batches) > driver.batches_published:
                driver.publish_and_swap()
            case "weights":
                driver.do(ev.TaskWeightsSet(NAME, ((number % TASKS, number / 10),)))
            case "crash":
                assert driver.core.admissible_groups == 0
                before = dict(record.statistics)
                driver.die_and_resume(driver.batches_published, snapshot=bool(number % 2))
                record = driver.core.task_records.curricula[NAME]
                kept = {item: observed(seen) for item, seen in before.items()}
                assert {item: observed(seen) for item, seen in record.statistics.items()} == kept
        record = driver.core.task_records.curricula[NAME]
        check(driver, model)
        drawn, fresh = driver.curriculum.draw(), new_curriculum()
        fresh.attach(record, lambda weights: None)
        assert fresh.draw() == drawn, "a new process would draw another task"


def observed(statistics: TaskStatistics) -> tuple[object, ...]:
    """Return what no resume may change: outcomes, which were observed."""
    return statistics.draws, statistics.rollouts, statistics.reward_sum, statistics.tokens


def count(
    model: dict[int, Counter[str]], driver: Driver, rollout: Rollout, more: dict[str, int]
) -> None:
    """Add to the model's counts by group, which are settled when the group ends."""
    model.setdefault(rollout.group_id, Counter()).update(more)


def check(driver: CurriculumDriver, model: dict[int, Counter[str]]) -> None:
    records = driver.core.task_records
    record = records.curricula[NAME]
    running = Counter(
        records.item_of(group.key)
        for group in driver.core.groups.in_order
        if group.running and group.key is not None
    )
    assert +record.running == running
    assert record.num_draws == sum(s.draws for s in record.statistics.values())
    assert record.num_draws == driver.core.tasks.count
    failed = sum(counts["failed"] for counts in model.values())
    assert failed == sum(sum(s.failures.values()) for s in record.statistics.values())
    ended = sum(s.rollouts for s in record.statistics.values())
    open_rollouts = sum(
        len(group.kept_rewards) for group in driver.core.groups.in_order if group.running
    )
    solved = sum(counts["rollouts"] for counts in model.values())
    assert ended + open_rollouts <= solved
    trained = sum(s.trained_groups for s in record.statistics.values())
    assert trained == sum(len(batch.groups) for batch in driver.batches)
    staleness = sum(s.staleness_sum for s in record.statistics.values())
    assert 0 <= staleness <= trained  # max_staleness=1
    for seen in record.statistics.values():
        assert seen.replays <= 2


def test_a_groups_rewards_lengths_failures_and_staleness_are_added_to_its_task() -> None:
    driver = CurriculumDriver()
    driver.fill()
    item = driver.core.task_records.item_of(TaskKey(1, 0))
    first, second = [r for r in driver.running.values() if r.group_id == 0]
    driver.fail_by(first, FailureCause.INFRASTRUCTURE, "tool_server_down")
    driver.running[first.rollout_id] = first  # retried
    driver.solve(first)
    driver.ask_turn(second)
    for handle in list(driver.engines["a"].turns):
        driver.sample("a", handle, 5, 1)
    driver.return_reward(second, 0.0)
    seen = driver.curriculum.statistics[item]
    assert (seen.rollouts, seen.mean_reward, seen.mean_tokens) == (2, 0.5, 4.0)
    assert seen.failures == {"infrastructure/tool_server_down": 1}
    assert (seen.groups, seen.trained_groups) == (1, 0)


def test_the_tasks_end_when_no_task_has_a_positive_weight() -> None:
    curriculum = Curriculum(range(3), weight=lambda task, seen: float(not seen.draws))
    driver = CurriculumDriver()
    driver.offer(curriculum)
    driver.fill()
    assert driver.core.are_tasks_exhausted
    assert sorted(driver.curriculum.statistics) == [0, 1, 2]


def test_misuse_of_a_curriculum_is_refused_with_what_to_do() -> None:
    curriculum = Curriculum(["a", "b"])
    with pytest.raises(ConfigError, match="pass it to batches"):
        iter(curriculum)
    with pytest.raises(ConfigError, match="got 3 weights for 2 tasks"):
        curriculum.set_weights([1, 2, 3])
    with pytest.raises(ConfigError, match="no task 2 among 2"):
        curriculum.set_weights({2: 1.0})
    with pytest.raises(ConfigError, match="at least one task"):
        Curriculum([])
    driver = CurriculumDriver()
    driver.fill()
    with pytest.raises(ResumeMismatch, match="has 1 tasks"):
        Curriculum([0], name=NAME).attach(
            driver.core.task_records.curricula[NAME], lambda weights: None
        )


def test_a_filter_at_its_limit_keeps_further_groups_and_counts_them_until_the_next_batch() -> None:
    limited = DynamicSampling(drops_per_batch_max=1)
    driver = Driver(group_filter=limited, group_size=2, groups_per_batch=2, max_staleness=0)
    driver.join("a")
    for _ in range(2):
        driver.do(ev.BatchRequested())
        handed = len(driver.batches)
        while len(driver.batches) == handed:
            driver.fill()
            driver.solve(next(iter(driver.running.values())))
        driver.publish_and_swap()
    assert driver.core.discarded_rollouts == {"zero_variance": 4}  # one group before each batch
    assert driver.core.prompts.kept_at_limit == 4


def test_a_negative_limit_of_drops_is_refused() -> None:
    with pytest.raises(ConfigError, match="drops_per_batch_max counts groups"):
        DynamicSampling(drops_per_batch_max=-1)
