"""What admission learns from the groups left when the trainer needs a batch."""

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import given

from tidegate.policies.just_in_time import PATIENCE_MAX, AdmissionPace

BATCH = 8
MOST = 5 * BATCH
MARGIN = 3


def after(
    pace: AdmissionPace, observed: Iterable[int | None], *, batches: int = 1, versions: int = 4
) -> AdmissionPace:
    """Return the pace after these needs: the groups left at each; None: the trainer waited."""
    for left in observed:
        pace = (
            pace.after_wait()
            if left is None
            else pace.after_need(
                left,
                most=MOST,
                groups_per_batch=BATCH,
                batches_per_version=batches,
                versions=versions,
            )
        )
    return pace


def test_groups_that_were_always_left_start_later_but_for_a_margin() -> None:
    assert after(AdmissionPace(), [20, 12, 15, 30]).limit == MOST - 12 + MARGIN


def test_no_limit_is_drawn_from_needs_of_groups_admitted_under_another() -> None:
    lowered = after(AdmissionPace(), [12] * 4)
    draining = after(lowered, [0] * (MOST // BATCH))  # these still show the earlier limit's groups
    assert draining.limit == lowered.limit
    assert after(draining, [MARGIN] * 4).limit == lowered.limit


def test_a_margin_that_is_used_up_is_added_again() -> None:
    lowered = after(AdmissionPace(), [12] * 4)
    assert lowered.limit is not None
    assert after(lowered, [0] * (MOST // BATCH + 4)).limit == lowered.limit + MARGIN


def test_a_wait_of_the_trainer_lifts_the_limit_and_makes_the_next_one_later() -> None:
    lifted = after(AdmissionPace(), [12] * 4 + [None])
    assert (lifted.limit, lifted.patience) == (None, 2)
    assert after(lifted, [12] * 7).limit is None
    assert after(lifted, [12] * 8).limit == MOST - 12 + MARGIN


def test_a_run_whose_trainer_often_waits_is_admitted_as_without_a_pace() -> None:
    pace = AdmissionPace()
    for _ in range(20):
        pace = after(pace, [12, 12, 12, None])
        assert pace == AdmissionPace()


def test_repeated_waits_come_more_and_more_rarely() -> None:
    pace, batches, waits = AdmissionPace(), 0, 0
    while batches < 1000:  # a trainer that waits whenever groups start later
        pace = after(pace, [12 if pace.limit is None else None])
        batches, waits = batches + 1, waits + (pace.limit is None and not pace.needs)
    assert waits <= 12
    assert pace.patience == PATIENCE_MAX


def test_patience_returns_where_a_limit_holds() -> None:
    pace = after(AdmissionPace(), [12] * 4 + [None] + [12] * 8)
    assert pace.patience == 2
    assert after(pace, [MARGIN] * (MOST // BATCH + 8)).patience == 1


def test_with_engines_that_are_idle_only_the_batch_in_training_and_the_next_are_outstanding() -> (
    None
):
    assert after(AdmissionPace(), [MOST - 2 * BATCH] * 4).limit == 2 * BATCH


def test_batches_of_one_version_are_outstanding_together() -> None:
    pace = after(AdmissionPace(), [MOST - 3 * BATCH] * 8, batches=2)
    assert pace.limit == 3 * BATCH + MARGIN


@given(
    st.lists(st.none() | st.integers(0, MOST), max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_whatever_is_observed_the_limit_holds_a_batch_and_never_exceeds_the_bound(
    observed: list[int | None], batches: int, versions: int
) -> None:
    pace = AdmissionPace()
    for left in observed:
        pace = after(pace, [left], batches=batches, versions=versions)
        assert pace.limit is None or min(MOST, (batches + 1) * BATCH) <= pace.limit < MOST
