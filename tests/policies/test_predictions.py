"""Tests of the closed forms against published and simulated figures, and for consistency.

The figures come from an event-driven model of engines with exact processor sharing: 12 rollout and
4 train engines of 64 slots, 64 groups of 16 a batch, unless said otherwise.
"""

import bisect
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import ConfigError
from tidegate.policies import predictions

SLOTS, ROLLOUTS_PER_BATCH = 12 * 64, 64 * 16


@pytest.mark.parametrize(
    ("rho", "queue_batches", "slots", "tail", "in_flight", "total", "simulated"),
    [
        (0.60, 2, 128, 1.72, 1.72, 2.32, 2.32),
        (0.90, 2, 256, 1.72, 3.44, 4.34, 4.45),
        (1.15, 1, 128, 1.72, 1.49, 2.43, 2.39),
        (1.30, 2, 256, 1.72, 2.64, 4.30, 4.34),
        (0.70, 1, 256, 2.28, 4.56, 5.26, 5.19),
        (1.30, 1, 128, 2.28, 1.75, 2.64, 2.66),
    ],
)
def test_staleness_without_a_bound_is_that_of_the_validation_table(
    rho: float,
    queue_batches: int,
    slots: int,
    tail: float,
    in_flight: float,
    total: float,
    simulated: float,
) -> None:
    pqs = predictions.staleness_from_generation(
        slots=slots, tail_factor=tail, rollouts_per_batch=128, rho=rho
    )
    iqs = predictions.staleness_from_queue(rho=rho, queue_batches=queue_batches)

    assert pqs == pytest.approx(in_flight, abs=0.0101)
    assert pqs + iqs == pytest.approx(total, abs=0.0051)
    assert pqs + iqs == pytest.approx(simulated, abs=0.12)


@pytest.mark.parametrize(
    ("slots_share", "tail", "rho", "max_staleness", "simulated"),
    [
        (0.75, 1.95, 0.9, 1, 1.00),  # math-8k
        (0.75, 1.95, 0.9, 2, 2.00),
        (0.75, 1.95, 0.9, 4, 2.35),
        (0.75, 1.95, 0.9, 8, 2.35),
        (0.75, 2.75, 0.9, 2, 2.01),  # reasoning-32k
        (0.75, 2.75, 0.9, 4, 3.02),
        (0.75, 2.75, 0.9, 8, 3.02),
        (0.75, 2.75, 1.6, 4, 4.02),  # trainer-bound: the queue grows until the bound
        (0.75, 3.08, 0.9, 8, 3.3),  # reasoning-64k
        (0.1875, 2.75, 0.9, 4, 1.4),  # large batch
        (2.0, 2.75, 0.9, 4, 4.02),  # small batches: the bound is active at 4
        (1.0, 2.75, 0.9, 4, 3.68),
        (0.5, 2.75, 0.9, 4, 2.30),
    ],
)
def test_mean_staleness_is_within_three_tenths_of_what_was_simulated(
    slots_share: float, tail: float, rho: float, max_staleness: int, simulated: float
) -> None:
    pqs = predictions.staleness_from_generation(
        slots=slots_share, tail_factor=tail, rollouts_per_batch=1, rho=rho
    )
    allowed = predictions.allowed_staleness(
        outstanding_groups_max=(max_staleness + 1) * 64, groups_per_version=64
    )
    free = pqs + predictions.staleness_from_queue(rho=rho)
    mean = predictions.mean_staleness_so_far(
        allowed=allowed, free=free, rho=rho, first_version=100, last_version=100
    )

    assert mean == pytest.approx(simulated, abs=0.3)


@pytest.mark.parametrize(
    ("window_groups", "simulated"),
    [(None, 3.00), (3 * 64, 4.22), (2 * 64, 5.04), (64, 5.94), (32, 6.45), (1, 6.85)],
)
def test_what_order_costs_in_age_is_what_was_simulated(
    window_groups: int | None, simulated: float
) -> None:
    """reasoning-32k with an inactive bound: log-normal lengths, half of the variance by prompt."""
    rng = random.Random(0)
    groups = []
    for _ in range(1000):
        prompt = math.sqrt(0.5) * rng.gauss(0, 1)
        samples = (prompt + math.sqrt(0.5) * rng.gauss(0, 1) for _ in range(16))
        groups.append([min(32768.0, 2500 * math.exp(sample)) for sample in samples])
    mean = sum(map(sum, groups)) / (1000 * 16)
    taken = sorted(max(group) * SLOTS / (ROLLOUTS_PER_BATCH * mean) for group in groups)

    pqs = predictions.staleness_in_order(
        lambda versions: bisect.bisect_right(taken, versions) / len(taken),
        taken[-1],
        groups_per_batch=64,
        window_groups=window_groups,
    )

    assert pqs + predictions.staleness_from_queue(rho=0.9) == pytest.approx(simulated, abs=0.3)


@pytest.mark.parametrize("window_groups", [None, 1, 3, 100])
def test_groups_that_all_take_as_long_are_never_held_up_by_order(window_groups: int | None) -> None:
    waited = predictions.staleness_in_order(
        lambda versions: float(versions >= 2.5),
        2.5,
        groups_per_batch=3,
        window_groups=window_groups,
    )
    assert waited == pytest.approx(2.5, abs=1 / predictions.GRID_PER_VERSION)


def test_waits_of_thousands_of_versions_take_no_more_points_than_short_ones() -> None:
    asked = []

    def share_done(versions: float) -> float:
        asked.append(versions)
        return min(1.0, versions / 5000)

    waited = predictions.staleness_in_order(
        share_done, 5000.0, groups_per_batch=64, window_groups=1
    )

    assert len(asked) <= predictions.POINTS_MAX
    assert waited == pytest.approx(5000, rel=0.01)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 5.0))
def test_a_narrower_window_never_makes_samples_younger(
    groups_per_batch: int, window_groups: int, longest: float
) -> None:
    wide, narrow, none = (
        predictions.staleness_in_order(
            lambda versions: min(1.0, versions / longest),
            longest,
            groups_per_batch=groups_per_batch,
            window_groups=window,
        )
        for window in (window_groups + 1, window_groups, None)
    )
    assert none <= wide + 1e-9
    assert wide <= narrow + 1e-9
    assert narrow <= longest + 1 / predictions.GRID_PER_VERSION


@pytest.mark.parametrize(
    ("mean", "context", "slots", "stall_s"),
    [
        (1196, 855, 64, 3.5),
        (1196, 855, 128, 7.0),
        (3382, 2931, 64, 8.8),
        (4040, 4753, 64, 13.5),
        (4040, 4753, 128, 27.0),
        (12536, 13161, 64, 35.0),
    ],
)
def test_an_abort_costs_what_the_table_says(
    mean: float, context: float, slots: int, stall_s: float
) -> None:
    cost_s = predictions.abort_cost_s(
        slots_per_engine=slots,
        prompt_tokens=512,
        mean_tokens=mean,
        mean_squared_tokens=2 * mean * context,
        prefill_tokens_per_s=25_000,
    )
    assert cost_s == pytest.approx(stall_s, abs=0.06)


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1e5), min_size=1, max_size=30))
def test_the_mean_context_in_flight_is_at_least_half_the_mean_length(lengths: list[float]) -> None:
    mean = sum(lengths) / len(lengths)
    squared = sum(length**2 for length in lengths) / len(lengths)
    context = predictions.mean_context_in_flight_tokens(mean, squared)
    assert mean / 2 * (1 - 1e-9) <= context <= max(lengths) / 2 * (1 + 1e-9)


def test_the_tail_factor_compares_a_groups_longest_with_a_rollout() -> None:
    assert predictions.tail_factor([[1, 3], [2, 6]]) == pytest.approx(4.5 / 3)
    assert predictions.tail_factor([[7], [7], [7]]) == 1.0
    assert predictions.tail_factor([]) == predictions.tail_factor([[], [0]]) == 1.0


@settings(deadline=None)
@given(
    st.floats(1e-4, 1.0),
    st.floats(0.0, 0.1),
    st.lists(st.integers(1, 64), min_size=2, max_size=50),
)
def test_the_cost_of_a_step_is_found_again_from_sums_over_steps(
    fixed_s: float, row_s: float, rows: list[int]
) -> None:
    times = [fixed_s + row_s * b for b in rows]
    cost = predictions.fit_decode_cost(
        steps=len(rows),
        rows=sum(rows),
        rows_squared=sum(b * b for b in rows),
        busy_s=sum(times),
        rows_busy_s=sum(b * t for b, t in zip(rows, times, strict=True)),
    )

    assert cost is not None
    if len(set(rows)) == 1:
        assert cost.rows_per_s(rows[0]) == pytest.approx(rows[0] / times[0])
    else:
        assert cost.rows_per_s(64) == pytest.approx(64 / (fixed_s + 64 * row_s), rel=1e-3)


def test_an_engine_without_steps_has_no_cost() -> None:
    nothing = dict.fromkeys(("steps", "rows", "rows_squared", "busy_s", "rows_busy_s"), 0.0)
    assert predictions.fit_decode_cost(**nothing) is None
    assert predictions.DecodeCost(0.0, 0.0).rows_per_s(8) == 0.0


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0])
def test_while_admission_limits_mean_staleness_is_the_bound_exactly(
    max_staleness: int, rho: float
) -> None:
    allowed = predictions.allowed_staleness(
        outstanding_groups_max=(max_staleness + 1) * 4, groups_per_version=4
    )
    mean = predictions.mean_staleness_so_far(
        allowed=allowed, free=51.0, rho=rho, first_version=100, last_version=100
    )
    assert mean == max_staleness


def test_a_run_starts_fresh_and_ages_as_its_queue_grows() -> None:
    def mean(allowed: float | None, free: float, rho: float, first: int, last: int) -> float:
        return predictions.mean_staleness_so_far(
            allowed=allowed, free=free, rho=rho, first_version=first, last_version=last
        )

    assert mean(2, 9, 0.5, 0, 3) == (0 + 1 + 2 + 2) / 4
    assert mean(None, 1.5, 0.5, 0, 3) == (0 + 1 + 1.5 + 1.5) / 4
    assert mean(2, 9, 2.0, 5, 9) == 2  # the run was past its warm-up
    assert mean(4, 9, 0.5, 0, 1) == 0.5
    assert mean(0, 3, 0.5, 0, 9) == 0
    assert mean(4, 1, 1.5, 0, 9) == (0 + 1 + 2 + 2.5 + 3 + 3.5 + 4 * 4) / 10
    assert mean(None, 1, 1.5, 0, 4) == (0 + 1 + 2 + 2.5 + 3) / 5


def test_from_just_in_time_admission_on_nothing_is_queued() -> None:
    mean = predictions.mean_staleness_so_far(
        allowed=4, free=1, rho=1.5, first_version=0, last_version=9, eager_versions=4
    )
    assert mean == (0 + 1 + 2 + 2.5 + 6 * 1) / 10


@settings(deadline=None)
@given(st.floats(0, 20), st.floats(0, 20), st.floats(0, 2), st.integers(0, 9), st.integers(0, 60))
def test_the_mean_so_far_is_that_of_each_version(
    allowed: float, free: float, rho: float, first: int, more: int
) -> None:
    each = [min(v, allowed, free + v * max(0.0, rho - 1)) for v in range(first, first + more + 1)]
    mean = predictions.mean_staleness_so_far(
        allowed=allowed, free=free, rho=rho, first_version=first, last_version=first + more
    )
    assert mean == pytest.approx(sum(each) / len(each), abs=1e-9)


def test_what_is_divided_by_must_be_there() -> None:
    with pytest.raises(ConfigError, match="rollout_batch_s must be > 0, got 0"):
        predictions.throughput_ratio(rollout_batch_s=0, trainer_batch_s=1)
    with pytest.raises(ConfigError, match="rho must be >= 0, got -1"):
        predictions.staleness_from_queue(rho=-1)
