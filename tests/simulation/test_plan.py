"""Plans compared with what runs do: closed forms beside the simulator, and both beside runs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import status_of
from tests.observability.recorded import record_run
from tidegate.cli.plan_table import measured_line
from tidegate.errors import ConfigError
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.simulation.planning.closed_forms import predict
from tidegate.simulation.planning.from_run import measured_run
from tidegate.simulation.planning.plan import advice, other_rows, recommended, staleness_rows
from tidegate.simulation.planning.simulated import simulate
from tidegate.simulation.planning.workload import (
    PlanCandidate,
    PlanWorkload,
    log_normal_groups,
)

pytestmark = pytest.mark.wire

COSTS = EngineCosts(slots=32, swap_s=0.2, group_size=8)
GROUPS = log_normal_groups(mean_tokens=200, sigma=1.0, tokens_max=1600, group_size=8)
BALANCED = COSTS.peak_tokens_per_s * 4 / 0.9
"""The trainer of four engines: it needs a little less than they do."""

WORKLOAD = PlanWorkload(groups=GROUPS, costs=COSTS, trainer_tokens_per_s=BALANCED)
CANDIDATE = PlanCandidate(max_staleness=2, groups_per_batch=16, engines=4)


def test_drawn_lengths_have_the_requested_mean_after_the_cut() -> None:
    assert WORKLOAD.mean_tokens == pytest.approx(200, rel=0.01)
    assert max(map(max, GROUPS)) == 1600
    assert WORKLOAD.group_size == 8


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_closed_forms_come_within_a_quarter_of_the_simulator(max_staleness: int) -> None:
    candidate = replace(CANDIDATE, max_staleness=max_staleness)
    prediction, simulated = predict(WORKLOAD, candidate), simulate(WORKLOAD, candidate, versions=8)
    assert prediction.batch_s == pytest.approx(simulated.batch_s, rel=0.25)
    assert prediction.mean_staleness == pytest.approx(simulated.mean_staleness, abs=0.6)
    assert prediction.trainer_idle_share == pytest.approx(simulated.trainer_idle_share, abs=0.15)


def test_a_trainer_bound_run_is_reported_and_gains_nothing_from_more_staleness() -> None:
    slow = replace(WORKLOAD, trainer_tokens_per_s=BALANCED / 4)
    rows = staleness_rows(slow, CANDIDATE, [2, 4, 8])
    simulated = simulate(slow, CANDIDATE, versions=4)
    assert rows[1].closed.limit == "trainer"
    assert rows[0].closed.batch_s == pytest.approx(simulated.batch_s, rel=0.1)
    assert rows[2].closed.tokens_per_s == pytest.approx(rows[1].closed.tokens_per_s)
    assert recommended(rows).candidate.max_staleness == 2
    assert "trainer-bound; training" in advice(rows)


def test_a_faster_trainer_gains_in_the_simulator_what_the_plan_says() -> None:
    slow = replace(WORKLOAD, trainer_tokens_per_s=BALANCED / 4)
    said = re.search(
        r"training (\S+) times as fast would gain about \d+% \((\d+)% to (\d+)%\)",
        predict(slow, CANDIDATE).conclusion,
    )
    assert said is not None
    factor, low, high = map(float, said.groups())
    faster = replace(slow, trainer_tokens_per_s=factor * slow.trainer_tokens_per_s)
    before, after = (simulate(each, CANDIDATE, versions=8).batch_s for each in (slow, faster))
    assert low <= 100 * (before / after - 1) <= high


def test_closed_forms_rank_pause_modes_as_the_simulator_does() -> None:
    choices = [
        replace(CANDIDATE, pause_mode="keep", kv_policy="keep"),
        replace(CANDIDATE, pause_mode="abort"),
        replace(CANDIDATE, pause_mode="wait"),
    ]
    predicted_s = [predict(WORKLOAD, candidate).batch_s for candidate in choices]
    simulated_s = [simulate(WORKLOAD, candidate, versions=4).batch_s for candidate in choices]
    assert predicted_s == sorted(predicted_s)
    assert simulated_s == sorted(simulated_s)
    assert predicted_s[1] == pytest.approx(simulated_s[1], rel=0.2)


def test_more_engines_help_an_engine_bound_run_and_each_row_changes_one_setting() -> None:
    base = replace(CANDIDATE, max_staleness=16)
    quick = replace(WORKLOAD, trainer_tokens_per_s=100 * BALANCED)
    split, batch = other_rows(quick, base, device_splits=[(8, 1)], batches=[32])
    one = predict(quick, base)
    assert one.limit == "engines"
    assert split.closed.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.15)
    assert batch.candidate == replace(base, groups_per_batch=32)


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("runs") / "short")


def test_speeds_and_lengths_are_read_from_a_recorded_run(recorded_run: Path) -> None:
    run = measured_run(recorded_run)
    assert run.candidate.max_staleness == 1
    assert run.candidate.groups_per_batch == 2
    assert run.workload.group_size == 2
    assert 1 <= run.workload.mean_tokens <= 8
    assert run.workload.costs.slots == 4
    assert run.workload.costs.token_s(4) > 0
    # Whatever this machine's speed: a plan gives the time of the run that it is made from.
    assert run.unaccounted_slowdown >= 1
    predicted = predict(run.workload, run.candidate)
    assert predicted.batch_s == pytest.approx(run.measured.batch_s, rel=0.05)
    assert predicted.mean_staleness <= 1


def diagnosed(run: Path, copy: Path, limit: str) -> Path:
    """The same run, had its diagnosis found this limit."""
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["statistics"]["forecast"] |= {"limit": limit, "advice": f"{limit}-bound"}
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def test_a_plan_repeats_its_runs_diagnosis_and_scales_the_engines_only_if_the_trainer_waits(
    recorded_run: Path, tmp_path: Path
) -> None:
    run = measured_run(diagnosed(recorded_run, tmp_path / "busy", "trainer"))
    assert run.unaccounted_slowdown == 1  # nothing says that engines were any slower
    assert "the run itself: trainer-bound" in measured_line(run)
    predicted = predict(run.workload, run.candidate)
    assert predicted.limit in ("trainer", "balance")
    assert predicted.batch_s == pytest.approx(run.measured.batch_s, rel=0.05)


FEW = [
    "plan",
    "--engines",
    "2",
    "--max-running-turns",
    "8",
    "--mean-tokens",
    "50",
    "--tokens-max",
    "200",
]
FEW += ["--train-tokens-per-s", "2000", "--group-size", "4", "--groups-per-batch", "4"]


def test_the_command_prints_a_row_per_choice_and_one_recommendation_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = ["--picture", str(tmp_path / "plan.png")]
    more = ["--max-staleness", "0,2", "--pause-mode", "abort", "--versions", "2"]
    more += ["--engine-trainer-split", "4:1"]
    assert status_of([*FEW, *more, *picture], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("by ")] == ["by pause:", "by split:"]
    assert sum(line.startswith("*") for line in lines) == 2, "the row, and what it means"
    assert lines[-1].startswith("* max_staleness=")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_plan_json_has_one_row_per_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*FEW, "--max-staleness", "0,4", "--json", "--no-simulate"]
    assert status_of(few, monkeypatch) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["candidate"]["max_staleness"] for row in rows] == [0, 4]
    assert [row["simulated"] for row in rows] == [None, None]
    assert sum(row["is_recommended"] for row in rows) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "--engines is required; or give --from RUN"),
        ([*FEW, "--max-staleness", "two"], "--max-staleness 'two' can't be read"),
        ([*FEW, "--max-staleness", ","], "--max-staleness ',' is empty"),
        ([*FEW, "--pause-mode", "stop"], "pause_mode must be abort, keep or wait, got 'stop'"),
        ([*FEW, "--mean-tokens", "300"], "lengths need"),
        (["plan", "--from", "nowhere"], "give the directory of a recorded run"),
        (["plan", "nowhere"], "give the directory of a recorded run"),
        (["plan", "runs/one", "--from", "runs/other"], "name two runs; give one"),
    ],
)
def test_an_impossible_plan_gives_a_one_line_error(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*arguments, "--no-simulate"]
    assert status_of(arguments, monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_group_without_a_token_and_a_trainer_without_speed_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs at least one group"):
        PlanWorkload(groups=(), costs=COSTS, trainer_tokens_per_s=1.0)
    with pytest.raises(ConfigError, match="speed must be > 0"):
        replace(WORKLOAD, trainer_tokens_per_s=0.0)
