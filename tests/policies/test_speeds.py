"""Tests that an engine's speed is its work per second, whatever its number of turns."""

import random

import pytest

from tidegate.policies.speeds import DeclaredSpeeds, MeasuredSpeeds


def step_us(turns: int, slowness: float) -> int:
    return round(slowness * (8000 + 120 * turns))


def measured(slowness: float, turns: list[int], speed: float = 1.0) -> float:
    speeds = MeasuredSpeeds()
    for rows in turns:
        busy_us = step_us(rows, slowness)
        speed = speeds.after_step(speed, rows=rows, tokens=rows, busy_us=busy_us)
    return speed


def test_an_engine_twice_as_slow_has_half_the_speed_however_many_turns_it_has() -> None:
    chance = random.Random(0)
    fast = measured(1.0, [chance.randint(1, 64) for _ in range(500)])
    slow = measured(2.0, [chance.randint(1, 64) for _ in range(500)])
    assert fast / slow == pytest.approx(2.0, rel=0.02)
    assert measured(1.0, [1] * 500) == pytest.approx(measured(1.0, [64] * 500), rel=0.05)


def test_a_step_without_a_measurement_changes_nothing() -> None:
    speeds = MeasuredSpeeds()
    assert speeds.after_step(0.7, rows=3, tokens=0, busy_us=50) == 0.7
    assert speeds.after_step(0.7, rows=3, tokens=3, busy_us=0) == 0.7


def test_a_new_engine_is_assumed_as_fast_as_the_others() -> None:
    assert MeasuredSpeeds().first("new", [0.1, 0.3]) == pytest.approx(0.2)
    assert MeasuredSpeeds().first("new", []) == 1.0


def test_declared_speeds_are_those_declared() -> None:
    speeds = DeclaredSpeeds({"big": 4.0})
    assert speeds.first("big", [1.0]) == 4.0
    assert speeds.first("small", [4.0]) == 1.0
    assert speeds.after_step(4.0, rows=1, tokens=1, busy_us=10**6) == 4.0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_declared_speed_that_is_none_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed of engine 'a'"):
        DeclaredSpeeds({"a": speed})
