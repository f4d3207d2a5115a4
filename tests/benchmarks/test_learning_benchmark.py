"""The learning benchmark: a run depends on its seed alone, and its rows say what runs reached."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.learning import WAYS, Curve, HeldOut, Way, rows_of, train
from examples.calculator import long_tailed_tasks
from examples.grpo import load_trainer
from examples.tiny_model import make_model

BY_KEY = {way.key: way for way in WAYS}

CURVE = Curve(
    way="sync",
    seed=0,
    at_s=[0.0, 2.0, 4.0, 6.0],
    rewards=[0.3, 0.5, 0.85, 0.7],
    reward_after=0.72,
    staleness_mean=0.0,
    dropped_share=0.0,
    lengths=[[4, 9], [5, 30]],
    turns_mean=3.0,
    generated=[0, 40, 80, 120],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    make_model(path, steps_max=1)
    return path


@pytest.mark.parametrize("key", ["one-step", "eta2"])
def test_a_run_has_the_same_curve_when_it_is_repeated(
    model: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    for name, value in {
        "GROUPS_PER_BATCH": 2,
        "GROUP_SIZE": 2,
        "CURVE_TASKS": 2,
        "EVALUATION_TASKS": 2,
    }.items():
        monkeypatch.setattr(learning, name, value)
    first, second = (train(BY_KEY[key], 1, model, versions=3) for _ in range(2))
    assert first == second
    assert len(first.rewards) == len(first.at_s) == 4
    assert first.at_s == sorted(first.at_s)
    assert [len(group) for group in first.lengths] == [2] * 6


def test_the_expected_reward_is_the_chance_of_the_paths_to_it(model: Path) -> None:
    tasks = [next(long_tailed_tasks("held_out", seed)) for seed in range(3)]
    policy, _ = load_trainer(model, 1e-4)
    each = [HeldOut([task]).reward(policy) for task in tasks]
    assert HeldOut(tasks).reward(policy) == pytest.approx(sum(each) / 3, rel=1e-4)
    assert all(0 < reward < 0.1 for reward in each)  # one step of warm-up teaches little


def rows(curves: list[Curve], *ways: Way) -> dict[tuple[str, str], dict[str, Any]]:
    return {(str(row["way"]), str(row["name"])): row for row in rows_of(curves, ways)}


def test_a_reward_that_most_seeds_do_not_reach_has_no_time() -> None:
    never = replace(CURVE, way="async η=4", rewards=[0.3, 0.4, 0.5, 0.6])
    curves = [CURVE, never, replace(never, seed=1), replace(CURVE, way="async η=4", seed=2)]
    curves += [replace(CURVE, seed=1), replace(CURVE, seed=2)]
    found = rows(curves, BY_KEY["sync"], BY_KEY["eta4"])
    assert found["sync", "seconds_to_0.8"]["value"] == 4.0
    reached = found["async η=4", "seconds_to_0.8"]
    assert (reached["value"], reached["lowest"], reached["highest"]) == (None, 4.0, None)
    assert reached["ratio"] is None
    assert found["async η=4", "batch_s"]["ratio"] == 1.0


def test_the_forecast_stands_beside_the_measured_time_of_a_batch() -> None:
    row = rows([CURVE], BY_KEY["sync"])["sync", "planned_batch_s"]
    # the longest rollout, 30 tokens in 3 turns, takes at least as many steps
    assert row["value"] > 30 * learning.COSTS.step_s
    assert row["ratio"] == pytest.approx(row["value"] / CURVE.batch_s, rel=0.01)
    assert row["peer"] == "measured"
