"""Just-in-time admission in a core: it never holds a trainer up, whatever the trainer does."""

from tests.orchestrator.core.driver import Driver
from tests.orchestrator.core.test_policies import end, started
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.policies.asynchrony import BoundedStaleness

ETA = 4
BATCH = 2
VERSIONS = 2


def of_idle_engines(*, after_versions: int | None = VERSIONS, batches: int = 1) -> Driver:
    """Return a run whose groups end as soon as they have started."""
    driver = started(
        BoundedStaleness(
            max_staleness=ETA,
            groups_per_batch=BATCH,
            batches_per_version=batches,
            just_in_time_after_versions=after_versions,
        )
    )
    end_all(driver)
    return driver


def end_all(driver: Driver) -> None:
    driver.fill()
    end(driver, *sorted({rollout.group_id for rollout in driver.running.values()}))


def train(driver: Driver, versions: int, *, batches: int = 1) -> None:
    """Train this many versions; all groups end while the trainer trains."""
    for _ in range(versions):
        for _ in range(batches):
            driver.do(ev.BatchRequested())
            end_all(driver)
        driver.publish_and_swap()
        driver.fill()


def staleness(driver: Driver) -> list[int]:
    """Return the staleness of each batch's oldest token."""
    return [
        batch.trainer_version - min(group.oldest_version or 0 for group in batch.groups)
        for batch in driver.batches
    ]


def test_groups_start_as_late_as_the_trainer_allows() -> None:
    driver = of_idle_engines()
    train(driver, 20)
    assert max(staleness(driver)) == ETA
    assert staleness(driver)[-8:] == [1] * 8  # one version passes while a batch is trained
    assert driver.core.outstanding_groups == 2 * BATCH


def test_without_just_in_time_admission_groups_age_up_to_the_bound() -> None:
    driver = of_idle_engines(after_versions=None)
    train(driver, 20)
    assert staleness(driver)[-8:] == [ETA] * 8


def test_with_several_batches_per_version_most_are_of_the_trainers_own_version() -> None:
    driver = of_idle_engines(batches=4)
    train(driver, 20, batches=4)
    assert staleness(driver)[-4:] == [1, 1, 0, 0]  # the margin of a group is in the second


def test_a_request_that_waits_for_its_batch_lifts_the_limit() -> None:
    driver = of_idle_engines()
    train(driver, 20)
    driver.fill()
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    driver.do(ev.BatchRequested())  # its groups have not ended
    driver.fill()
    assert driver.core.outstanding_groups == (ETA + 1) * BATCH


def test_a_trainer_that_holds_more_batches_than_planned_gets_its_next_one() -> None:
    driver = of_idle_engines()
    train(driver, 20)
    for held in range(1, ETA + 2):  # accumulates without a publish, as far as the bound allows
        end_all(driver)
        driver.do(ev.BatchRequested())
        end_all(driver)
        assert len(driver.held) == held
    assert not driver.refused


def test_a_trainer_that_asks_ahead_is_given_fresh_groups_too() -> None:
    driver = of_idle_engines()
    driver.do(ev.BatchRequested())
    for _ in range(24):
        driver.do(ev.BatchRequested())
        end_all(driver)
        driver.publish_and_swap([driver.held[0]])
        end_all(driver)
    assert staleness(driver)[-4:] == [1] * 4


def test_the_loss_of_an_engine_lifts_the_limit() -> None:
    driver = of_idle_engines()
    driver.join("b")
    train(driver, 20)
    assert driver.core.pace.limit == 2 * BATCH
    driver.leave("b")
    assert driver.core.pace.limit is None


def test_a_replay_and_a_snapshot_admit_as_the_run_did() -> None:
    driver = of_idle_engines()
    train(driver, 11)
    assert driver.core.pace.limit is not None
    replayed = driver.new_core()
    for record in driver.records:
        replay(record, replayed)
    assert digest(replayed, is_replayed=True) == digest(driver.core)
    loaded = driver.new_core()
    load(save(driver.core), loaded)
    assert (loaded.pace, loaded.admissible_groups) == (
        driver.core.pace,
        driver.core.admissible_groups,
    )


def test_a_resumed_run_admits_as_early_as_the_bound_allows() -> None:
    driver = of_idle_engines()
    train(driver, 20)
    driver.do(ev.RunResumed(len(driver.batches), 0))
    assert driver.core.pace.limit is None
