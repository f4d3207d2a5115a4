"""Tests that the engine's benchmark counts exactly overhead as overhead, and stalls as stalls."""

import pytest

from benchmarks.engine.steps import Round, full_steps, reported
from benchmarks.engine.watched_worker import Mark

TURNS = 4


def marks(*lengths: tuple[int, int, int]) -> list[Mark]:
    """Of full steps one after another: how long, how long without a core, how long in kernels."""
    found = [Mark(0, 0, 0, 0, True, TURNS, TURNS)]
    for wall, unserved, kernels in lengths:
        last = found[-1]
        found.append(
            Mark(
                at=last.at + wall,
                cpu=last.cpu + wall - unserved,
                unserved=last.unserved + unserved,
                kernels=last.kernels + (kernels if last.is_timed else 0),
                is_timed=not last.is_timed,
                rows=TURNS,
                tokens=TURNS,
            )
        )
    return found


def test_cpu_time_of_other_processes_is_no_stall() -> None:
    usual, preempted, slow = (100, 0, 80), (900, 800, 80), (250, 0, 80)
    one = Round(0, 10_000, is_updated=True)
    other = one._replace(is_updated=False)
    updated = full_steps(marks(usual, slow, usual, usual), one, TURNS)
    still = full_steps(marks(usual, preempted, usual, usual), other, TURNS)

    output = reported([(one, updated), (other, still)])

    assert output["update_stall_steps"] == pytest.approx(1.5)
    assert output["without_update_stall_steps"] == 0
    assert output["overhead_share"] == pytest.approx(0.2)


def test_steps_with_prefills_fewer_turns_or_of_another_round_are_excluded() -> None:
    first, second, third, fourth = marks((100, 0, 0), (100, 0, 0), (100, 0, 0))
    one = Round(0, 10_000, is_updated=False)

    assert len(full_steps([first, second, third, fourth], one, TURNS)) == 3
    assert not full_steps([first, second._replace(rows=3), third], one, TURNS)
    assert not full_steps([first, second._replace(tokens=20), third], one, TURNS)
    assert len(full_steps([first, second, third, fourth], one._replace(began=100), TURNS)) == 2
    assert len(full_steps([first, second, third, fourth], one._replace(ended=200), TURNS)) == 2
