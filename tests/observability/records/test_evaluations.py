"""Evaluations as recorded, read back over the processes of a run, and shown in reports."""

from pathlib import Path
from typing import Any

import pytest

from tests.observability.recorded import recorder, some_statistics
from tidegate.errors import AuditError
from tidegate.observability.records.evaluations import EvaluationPoint, read_evaluations
from tidegate.observability.reports.comparison import comparison_lines, held_out_curve, read_runs
from tidegate.observability.reports.facts import read_facts
from tidegate.observability.reports.report import page_lines


def figures(version: int, reward: float, name: str = "held_out", tasks: int = 4) -> dict[str, Any]:
    about = {"name": name, "version": version, "batches": version, "reward": reward}
    return {**about, "tasks": tasks, "failures": 1, "seconds": 0.5}


def a_run(directory: Path, *evaluations: dict[str, object], **facts: object) -> Path:
    with recorder(directory) as records:
        for version in range(20):
            records.batch({"version": version, "reward": version / 20, "wall_s": 2.0 * version})
        for each in evaluations:
            records.evaluation(each)
        records.finish(some_statistics(), **facts)
    return directory


def test_a_run_without_evaluations_has_none(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert read_evaluations(run) == []
    assert not (run / "evaluations.jsonl").exists()
    facts = read_facts(run)
    assert (facts.reward_before, facts.reward_after) == (None, None)
    assert "## Evaluations" not in page_lines(facts, [], picture="x")


def test_evaluations_of_one_version_by_several_ranks_are_one_point(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", figures(2, 0.5), figures(2, 1.0, tasks=12))
    assert read_evaluations(run) == [EvaluationPoint("held_out", 2, 2, 0.875, 16, 2)]


def test_evaluations_after_the_checkpoint_of_a_resume_are_omitted(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", figures(0, 0.1), figures(4, 0.2), figures(8, 0.3))
    with recorder(run / "part-1", resumed_batches=5) as records:
        records.evaluation(figures(8, 0.6))
    points = read_evaluations(run)
    assert [(point.version, point.reward) for point in points] == [(0, 0.1), (4, 0.2), (8, 0.6)]


def test_held_out_rewards_are_those_before_the_first_batch_and_at_the_last_evaluation(
    tmp_path: Path,
) -> None:
    other = figures(9, 0.9, name="other")
    run = a_run(tmp_path / "run", figures(0, 0.25), other, figures(4, 0.5))
    facts = read_facts(run)
    assert (facts.reward_before, facts.reward_after) == (0.25, 0.5)
    assert facts.training_reward_start == pytest.approx(0.025)  # of two batches
    assert facts.training_reward_end == pytest.approx(0.925)
    page = "\n".join(page_lines(facts, [], picture="x"))
    assert "from 0.250 to 0.500" in page
    assert "| other | 9 | 0.900 | 4 | 1 |" in page
    recorded = a_run(tmp_path / "recorded", figures(0, 0.25), reward_before=0.1)
    assert read_facts(recorded).reward_before == 0.1  # the owner's wins over evaluations


def test_a_damaged_line_is_refused_with_its_file(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", figures(0, 0.25))
    for damage in ("{]", '{"name": 1, "version": "x"}', '{"reward": [0.5]}'):
        (run / "evaluations.jsonl").write_text(damage + "\n")
        with pytest.raises(AuditError, match=r"evaluations\.jsonl"):
            read_evaluations(run)


def test_a_comparison_has_the_training_and_held_out_rewards_and_their_curves(
    tmp_path: Path,
) -> None:
    one = a_run(tmp_path / "one", figures(0, 0.25), figures(3, 0.5), figures(20, 0.75))
    runs = read_runs([one, a_run(tmp_path / "two")])
    lines = comparison_lines(runs)
    assert "| held-out reward after | 0.750 | - |" in lines
    assert "| training reward, last tenth | 0.925 | 0.925 |" in lines
    assert held_out_curve(runs[0]) == [(0, 0.25), (3, 0.5), (20, 0.75)]
    assert held_out_curve(runs[0], over="wall_s") == [(0.0, 0.25), (6.0, 0.5), (38.0, 0.75)]
    assert held_out_curve(runs[1]) == []
