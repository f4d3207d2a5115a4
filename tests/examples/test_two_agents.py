"""Tests of the example of two agents, in a short form."""

from pathlib import Path

import pytest

from examples.tiny_model import make_model
from examples.two_agents import BOUNDS, TWO_ROLES, by_tenth, main, secrets
from tidegate.observability.reports.facts import read_facts

pytestmark = pytest.mark.wire


@pytest.mark.slow
def test_both_agents_train_within_bounds_of_their_own_and_every_token_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    make_model(model, recipe=TWO_ROLES, steps_max=3)
    arguments = ["--model", str(model), "--runs", str(tmp_path), "--name", "run"]
    short = ["--versions", "3", "--groups-per-batch", "2", "--step-time-s", "0"]
    assert main([*arguments, *short]) == 0
    output = capsys.readouterr().out
    for name, bound in BOUNDS.items():
        facts = read_facts(tmp_path / "run" / "adapters" / name)
        assert (facts.versions, facts.rollouts_trained) == (4, 3 * 2 * 8)
        assert facts.staleness_bound == bound
        assert facts.max_staleness <= bound
        assert facts.audit is not None
        assert facts.audit["tokens_agreeing"] == facts.audit["tokens"]
        assert not facts.audit["problems"]
        assert f"{name}: reward by tenth of the run" in output


def test_a_missing_model_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "nowhere", "--runs", str(tmp_path)]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_tasks_follow_from_their_seed_and_the_curve_has_a_point_per_tenth() -> None:
    assert secrets(5, 1) == secrets(5, 1) != secrets(5, 2)
    assert list(by_tenth([0.0, 1.0])) == [0.0, 1.0]
    assert list(by_tenth([float(n // 2) for n in range(20)])) == list(map(float, range(10)))
