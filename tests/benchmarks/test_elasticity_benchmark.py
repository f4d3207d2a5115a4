"""The elasticity benchmark compares an elastic fleet with fixed ones that take as long."""

import pytest

from benchmarks import elasticity
from benchmarks.elasticity import Outcome, cost_of, rows, run

FIXED = {1: Outcome(4.0, 4.0, 0), 2: Outcome(2.0, 4.5, 0), 3: Outcome(1.5, 5.0, 0)}


@pytest.mark.parametrize(
    ("hours", "cost"), [(4.0, 4.0), (3.0, 4.25), (1.75, 4.75), (1.4, None), (4.1, None)]
)
def test_a_fixed_fleet_as_fast_costs_what_lies_between_its_neighbours(
    hours: float, cost: float | None
) -> None:
    assert cost_of(hours, FIXED) == cost


def test_an_engine_of_a_fixed_fleet_costs_its_time() -> None:
    outcome = run(2, None, seed=0, batches=6)
    assert outcome.engine_hours == pytest.approx(2 * outcome.hours, rel=0.02)


def test_each_seed_has_the_fixed_fleets_and_the_elastic_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elasticity, "ENGINES_MAX", 2)
    names = [row.name for row in rows([3], batches=6)]
    assert names[:7] == [
        "3/fixed_1/hours",
        "3/fixed_1/engine_hours",
        "3/fixed_2/hours",
        "3/fixed_2/engine_hours",
        "3/elastic/hours",
        "3/elastic/decisions",
        "3/cost_at_equal_time",
    ]
