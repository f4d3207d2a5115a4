"""Elasticity: engines come where they make batches cheaper, go where they do not, and in doubt
nothing changes."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.test_bottlenecks import BALANCED
from tidegate.policies.bottlenecks import GAIN_MIN, RunFigures, batch_s_by_engines
from tidegate.policies.elasticity import Elastic
from tidegate.policies.predictions import DecodeCost

ELASTIC = Elastic(engines_min=1, engines_max=32, trainer_hour_cost=10.0, cool_down_s=600.0)

BUSY = replace(BALANCED, trainer_s=2.0, work_s=10.0, queue_s=3.0)
"""Engines take five times as long as the trainer, and never idle."""

IDLE = replace(BALANCED, trainer_s=10.0, work_s=1.0, engine_idle_share=0.8, rows=8.0)
"""Six engines do a tenth of what they could."""


def decided(run: RunFigures, policy: Elastic = ELASTIC, quiet_s: float = 600.0) -> int:
    scaling = policy.decide(run, quiet_s=quiet_s)
    return run.engines if scaling is None else scaling.engines


@pytest.mark.parametrize(
    ("run", "policy", "engines"),
    [
        (BUSY, ELASTIC, 12),  # twice as many at most
        (BUSY, replace(ELASTIC, engines_max=8), 8),
        (IDLE, ELASTIC, 3),  # half as many at least
        (IDLE, replace(ELASTIC, engines_min=5), 5),
        (BALANCED, ELASTIC, 6),
        # the engines are not all busy, so more would not be known to help
        (replace(BUSY, engine_idle_share=0.3), ELASTIC, 6),
        # a trainer that costs nothing may wait
        (BUSY, replace(ELASTIC, trainer_hour_cost=0.0), 6),
        # engines that cost nothing stay
        (IDLE, replace(ELASTIC, engine_hour_cost=0.0), 6),
        # what an engine saves within the cool-down does not pay for its start
        (BUSY, replace(ELASTIC, start_s=6000.0), 6),
        # of few and unequal batches little is known
        (replace(BUSY, work_shares=(0.1, 1.9)), ELASTIC, 6),
        # a fleet outside the limits goes back where that saves something
        (replace(BUSY, engines=2), replace(ELASTIC, engines_min=3), 4),
    ],
)
def test_the_number_of_engines_follows_from_what_a_batch_costs(
    run: RunFigures, policy: Elastic, engines: int
) -> None:
    assert decided(run, policy) == engines


def test_a_decision_comes_after_the_cool_down_and_states_its_figures() -> None:
    assert ELASTIC.decide(BUSY, quiet_s=599.0) is None
    scaling = ELASTIC.decide(BUSY, quiet_s=600.0)
    assert scaling is not None
    assert str(scaling) == (
        'from=6 to=12 because="trainer idle 80.0%, engines idle 2.0%, 60.0 of 64 slots in use '
        "while they decode, rollouts 20.0% of their time in engines' queues: a batch would take "
        '4.99 s instead of 10 s, and cost 0.0305 instead of 0.0444"'
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engines_max": 0}, "1 <= engines_min <= engines_max, got engines_min=1, engines_max=0"),
        ({"engines_max": 2, "engines_min": 3}, "got engines_min=3, engines_max=2"),
        ({"engines_max": 2, "cool_down_s": -1.0}, "cool_down_s must be finite and >= 0, got -1.0"),
        ({"engines_max": 2, "engine_hour_cost": float("inf")}, "engine_hour_cost must be finite"),
        ({"engines_max": 2, "batches": 1}, "batches must be >= 2 to measure them, got 1"),
        ({"engines_max": 2, "stop": print}, "both start and stop"),
    ],
)
def test_impossible_policies_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Elastic(**wrong)  # type: ignore[arg-type]


runs = st.builds(
    lambda engines, work, trainer, rows, idle, length, bound: replace(
        BALANCED,
        engines=engines,
        batch_s=max(work, trainer),
        work_s=work,
        trainer_s=trainer,
        publish_s=0.01 * trainer,
        rows=rows,
        engine_idle_share=idle,
        group_s=[length],
        rollout_s=length,
        decode_s=length,
        cost=DecodeCost(0.008, 0.0001),
        max_staleness=float(bound),
    ),
    st.integers(1, 24),
    st.floats(0.1, 100.0),
    st.floats(0.1, 100.0),
    st.floats(1.0, 64.0),
    st.floats(0.0, 0.99),
    st.floats(0.1, 100.0),
    st.integers(0, 8),
)

policies = st.builds(
    lambda least, more, trainer, start_s: Elastic(
        engines_min=least, engines_max=least + more, trainer_hour_cost=trainer, start_s=start_s
    ),
    st.integers(1, 8),
    st.integers(0, 24),
    st.floats(0.0, 50.0),
    st.floats(0.0, 600.0),
)


@settings(deadline=None)
@given(runs, policies)
def test_each_decision_is_within_the_limits_and_cheaper(run: RunFigures, policy: Elastic) -> None:
    scaling = policy.decide(run, quiet_s=policy.cool_down_s)
    if scaling is None:
        return
    assert scaling.engines_before == run.engines != scaling.engines
    assert policy.engines_min <= scaling.engines <= policy.engines_max
    times = batch_s_by_engines(run, (run.engines, scaling.engines))
    before, after = (
        times[count] * (policy.trainer_hour_cost + count * policy.engine_hour_cost)
        for count in (run.engines, scaling.engines)
    )
    assert after <= (1 - GAIN_MIN) * before


@settings(deadline=None)
@given(runs, policies)
def test_a_decision_is_not_undone_by_the_next_in_a_run_that_is_as_modelled(
    run: RunFigures, policy: Elastic
) -> None:
    counts = [run.engines]
    for _ in range(6):
        counts.append(decided(run, policy, policy.cool_down_s))
        times = batch_s_by_engines(run, range(min(counts[-2:]), max(counts[-2:]) + 1))
        speed = counts[-1] / run.engines
        run = replace(
            run,
            engines=counts[-1],
            work_s=run.work_s / speed,
            batch_s=times[counts[-1]],
            engine_idle_share=max(0.0, 1 - (1 - run.engine_idle_share) / speed),
        )
    steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
