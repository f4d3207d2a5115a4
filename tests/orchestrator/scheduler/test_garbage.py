"""GC thresholds during runs and after them."""

import gc
from collections.abc import Iterator

import pytest

from tidegate.orchestrator.scheduler.gc_tuning import GcTuning, young_objects_max


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    """Set Python's default thresholds, and restore the process's own afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("rollouts", "young_objects"),
    [(512, 50_000), (100_000, 1_000_000), (10_000_000, 2_000_000)],
)
def test_garbage_is_collected_the_less_often_the_more_rollouts_may_run(
    rollouts: int, young_objects: int
) -> None:
    assert young_objects_max(rollouts) == young_objects


def test_of_runs_that_overlap_the_last_leaves_what_the_first_has_found(
    usual: tuple[int, int, int],
) -> None:
    tuning = GcTuning()
    first, second = tuning.during(60_000), tuning.during(50_000)
    first.__enter__()
    assert gc.get_threshold() == (60_000, 10, 10)
    second.__enter__()
    assert gc.get_threshold() == (60_000, 10, 10)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (50_000, 10, 10)
    assert gc.get_freeze_count()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual
    assert not gc.get_freeze_count()


def test_a_program_with_the_collector_off_keeps_it_off() -> None:
    gc.set_threshold(0, 10, 10)
    with GcTuning().during(50_000):
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)


def test_a_value_set_during_a_run_stays() -> None:
    with GcTuning().during(50_000):
        gc.set_threshold(10_000, 5, 5)
    assert gc.get_threshold() == (10_000, 5, 5)


def test_a_program_that_collects_more_rarely_is_left_unchanged() -> None:
    gc.set_threshold(90_000, 10, 10)
    with GcTuning().during(50_000):
        assert gc.get_threshold() == (90_000, 10, 10)
