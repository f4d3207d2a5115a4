"""What a run is advised gains what it is told, in set-ups drawn from seeds.

`python -m tests.orchestrator.telemetry.drawn_runs 200` checks 200 of them.
"""

import pytest

from tests.orchestrator.telemetry.drawn_runs import applied_advice

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(12))
def test_the_advised_change_gains_within_its_stated_error(seed: int) -> None:
    missed = [str(applied) for applied in applied_advice(seed) if not applied.is_within_error]
    assert not missed
