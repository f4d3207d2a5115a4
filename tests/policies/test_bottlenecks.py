"""Diagnosis: each limit is named by its figures, and idle engines veto more of them."""

from dataclasses import replace

import pytest

from tidegate.policies.bottlenecks import Diagnosis, RunFigures, diagnose, expected_batch_s
from tidegate.policies.predictions import DecodeCost

BALANCED = RunFigures(
    batch_s=10.0,
    trainer_s=9.5,
    publish_s=0.1,
    engines=6,
    engine_idle_share=0.02,
    full_share=0.0,
    work_s=9.5,
    slots=64,
    full_rows=64.0,
    rows=60.0,
    cost=DecodeCost(0.008, 0.0001),
    rollout_s=15.0,
    decode_s=15.0,
    queue_s=0.0,
    activity_s=0.0,
    group_s=[20.0],
    groups_per_batch=8,
    waits_for_stragglers=True,
    max_staleness=4.0,
)
"""A run in which neither side waits for long."""


def levers(diagnosis: Diagnosis) -> list[str]:
    return [change.lever for change in diagnosis.changes if change.gain]


def test_a_busy_trainer_beside_idle_engines_is_the_limit_though_it_waits_now_and_then() -> None:
    run = replace(BALANCED, trainer_s=9.18, work_s=1.02, engine_idle_share=0.698, rows=8.0)
    found = diagnose(run)

    assert found.limit == "trainer"
    assert levers(found)[0] == "training"
    assert "trainer idle 8.2%, engines idle 69.8%" in str(found)
    assert "engines would gain" not in str(found)
    assert "2 engines would lose nothing" in str(found)


def test_idle_engines_veto_more_engines_whatever_else_is_measured() -> None:
    engines_limit = replace(BALANCED, trainer_s=2.0, work_s=10.0, queue_s=3.0)
    assert diagnose(engines_limit).limit == "engines"
    assert levers(diagnose(engines_limit)) == ["engines"]
    assert "engines" not in levers(diagnose(replace(engines_limit, engine_idle_share=0.3)))
    assert "engines" not in levers(diagnose(replace(engines_limit, work_s=7.0)))


def test_a_run_in_which_both_sides_wait_is_told_how_far_to_raise_its_bound() -> None:
    run = replace(BALANCED, trainer_s=2.0, work_s=2.0, rows=15.0, group_s=[48.0])
    found = diagnose(run)

    assert found.limit == "admission"
    assert found.changes[0].lever == "max_staleness"
    # A batch each 10 s, which the trainer and idle engines make in 2 s; full ones take longer.
    assert 1.5 < found.changes[0].gain < 4.0


def test_slow_publishes_are_the_trainers_time_and_named() -> None:
    run = replace(BALANCED, trainer_s=10.0, publish_s=6.0, work_s=2.0)
    found = diagnose(run)

    assert found.limit == "trainer"
    assert levers(found)[0] == "publishing"
    assert "publishing 60.0% of the time" in str(found)


def test_a_run_without_a_limit_is_balanced_and_told_nothing() -> None:
    found = diagnose(BALANCED)
    assert found.limit == "balance"
    assert levers(found) == []


def test_a_deep_queue_is_told_the_bound_that_would_do() -> None:
    run = replace(
        BALANCED, trainer_s=10.0, work_s=4.0, group_s=[9.0], staleness=4.0, queue_staleness=3.0
    )
    assert "3.0 of 4.0 versions of staleness in the queue" in str(diagnose(run))
    assert "max_staleness=2 would lose nothing" in str(diagnose(run))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"activity_s": 9.0, "decode_s": 6.0}, "rollouts 60.0% of their time in tools"),
        ({"queue_s": 3.0, "decode_s": 12.0}, "rollouts 20.0% of their time in engines' queues"),
        ({"full_share": 0.5, "full_rows": 40.0}, "turns wait for KV or prefills while 40.0 decode"),
        ({"group_s": [45.0]}, "groups 3.0 times as long as rollouts"),
        ({"prefilled_per_sampled": 2.5}, "2.5 tokens prefilled per sampled one"),
    ],
)
def test_the_evidence_names_where_time_goes(changed: dict[str, float], said: str) -> None:
    assert said in diagnose(replace(BALANCED, **changed)).evidence  # type: ignore[arg-type]


def test_a_range_is_stated_for_each_gain() -> None:
    run = replace(BALANCED, trainer_s=2.0, work_s=2.0, rows=15.0, group_s=[48.0])
    change = diagnose(run).changes[0]
    low, high = change.gain_range
    assert low < change.gain < high
    assert f"({low:.0%} to {high:.0%})" in str(change)


def test_the_longest_rollout_of_a_batch_starts_while_engines_have_others_to_start() -> None:
    run = replace(
        BALANCED,
        max_staleness=0.0,
        trainer_s=2.0,
        publish_s=0.0,
        work_s=10.0,
        cost=DecodeCost(0.0, 0.001),
        rollout_s=4.0,
        decode_s=4.0,
        group_s=[9.0],
    )
    # When 4 s of work are left in the running rollouts, after 6 s, the last one starts.
    assert expected_batch_s(run) == pytest.approx(6.0 / 2 + 9.0 + 2.0)
    assert expected_batch_s(replace(run, group_s=[5.0])) == pytest.approx(10.0 + 2.0)


def test_a_faster_trainer_waits_longer_for_each_publish_because_engines_are_busier() -> None:
    def gain(step_s: float) -> float:
        run = replace(
            BALANCED,
            trainer_s=10.0,
            publish_s=1.0,
            engine_idle_share=0.8,
            work_s=0.5,
            cost=DecodeCost(step_s, 0.0),
            rollout_s=3.0,
            decode_s=3.0,
            group_s=[5.0],
        )
        return next(each.gain for each in diagnose(run).changes if each.lever == "training")

    assert gain(step_s=0.002) == pytest.approx(10 / (9 / 4 + 1) - 1, rel=0.05)
    # Of 2.5 steps, a fifth is waited for now: b = 9/4 + 10/b seconds per batch.
    assert gain(step_s=2.0) == pytest.approx(10 / 4.48 - 1, rel=0.05)


def test_stragglers_take_a_batchs_time_unless_others_overtake_them() -> None:
    run = replace(
        BALANCED,
        max_staleness=1.0,
        trainer_s=2.0,
        work_s=2.0,
        group_s=[5.0, 50.0],
        cost=DecodeCost(0.0, 0.001),
    )
    overtaken = replace(run, waits_for_stragglers=False)
    assert expected_batch_s(run) > 1.5 * expected_batch_s(overtaken)


def test_the_stated_error_is_smaller_the_more_batches_were_measured_or_the_more_equal() -> None:
    def width(*work_shares: float) -> float:
        run = replace(BALANCED, trainer_s=2.0, work_s=2.0, rows=15.0, group_s=[48.0])
        change = diagnose(replace(run, work_shares=work_shares)).changes[0]
        low, high = change.gain_range
        return (high - low - 0.7 * change.gain - 0.1) / (1 + change.gain)

    assert width(1.0, 1.0) == pytest.approx(0.0)
    assert width(*[0.8, 1.2] * 8) == pytest.approx(2 * 0.2 / 4)
    assert width(*[0.8, 1.2] * 32) == pytest.approx(2 * 0.2 / 8)
