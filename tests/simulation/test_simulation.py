"""The simulation: sweeps that keep every promise, and planted bugs that it has to catch."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.command_line import status_of
from tests.simulation.mutations import MUTATIONS
from tidegate.errors import ConfigError
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.faults.faults import (
    ALL_FAULTS,
    NO_FAULTS,
    Fault,
    FaultKind,
    parse_faults,
)
from tidegate.simulation.faults.scenario import Scenario, draw_scenario, read_scenario
from tidegate.simulation.run.adapter_runs import simulate_adapters
from tidegate.simulation.run.crash_restart import simulate_crash_restarts
from tidegate.simulation.run.simulation import (
    RunReport,
    SimulationReport,
    run_scenario,
    simulate,
)
from tidegate.simulation.run.sweep import SweepSummary, run_any, shrink, sweep

pytestmark = pytest.mark.wire

SEEDS = 60
"""`make test` runs 2,000 beside these; these are for who runs only the tests."""

MUTANT_SEEDS_MAX = 1000
"""Each planted bug has to be caught within so many."""


FAILED_ONCE = {
    "a policy paused the engines that an evaluation of one version waited for": (
        '{"seed":7000251,"policy":"over-sampling","engines":2,"tasks":2,"look_ahead":1,'
        '"evaluation_tasks":1,"pins_evaluations":true}'
    ),
    "each engine was kept for evaluations when it joined, and none trained": (
        '{"seed":7000407,"group_size":2,"engines":2,"step_s":0.015,"output_tokens_max":20,'
        '"deadly_turns":0.05,"evaluation_engines":1,"faults":[{"kind":"drain","at_s":2.0355}]}'
    ),
    "a drained engine whose hello was read with its last answer joined again": (
        '{"seed":7001404,"max_staleness":2,"pausing":0.15,"credit_steps":1,"step_s":0.03,'
        '"latency_s":0.02,"tasks":3,"are_tasks_async":true,"turns_max":2,"giving_up_turns":0.2,'
        '"train_s":0.3,"evaluation_tasks":1,"evaluates_beside":true,'
        '"faults":[{"kind":"garble","after_swap":2},{"kind":"drain","at_s":1.4912}]}'
    ),
    "an engine replayed steps of a bad version after the rollback from it": (
        '{"seed":5882,"max_staleness":1,"publish_wait":"none","staging_s":0.2,"tasks":5,'
        '"turns_max":3,"write_s":0.025,"rolling_back":0.2,"faults":['
        '{"kind":"garble","after_swap":2},{"kind":"cut","at_s":0.11,"lasts_s":2.0617}]}'
    ),
    "a batch was lost while it was trained, after the answer that it was the last": (
        '{"seed":9247,"max_staleness":2,"groups_per_batch":2,"order":"window","window_groups":3,'
        '"batches_per_version":2,"publish_wait":"none","tasks":19,"failing_episodes":0.075,'
        '"train_s":0.009,"batches_per_publish":2,"publishing_twice":0.3,"look_ahead":2}'
    ),
    "an evaluation waited for an engine that had just left": (
        '{"max_staleness":1,"group_size":3,"groups_per_batch":3,"outstanding_groups_limit":4,'
        '"credit_steps":1,"engines":3,"staging_s":0.013,"latency_s":0.01,"tasks":8,"turns_max":2,'
        '"output_tokens_max":8,"scored_turns":0.15,"long_tools":0.05,"batch_poll_delay_s":0.01,'
        '"evaluation_tasks":1,"pins_evaluations":true,"is_elastic":true,'
        '"faults":[{"kind":"late","at_s":0.584}]}'
    ),
}
"""Smallest scenarios of failures that a sweep has found."""


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    return [simulate(seed) for seed in range(SEEDS)]


@pytest.mark.slow
def test_all_invariants_hold_under_all_faults(reports: list[SimulationReport]) -> None:
    failed = [f"{report.failure}; {report.replay_command}" for report in reports if report.failure]
    assert failed == []


@pytest.mark.slow
def test_the_sweep_reaches_every_coverage_mark(reports: list[SimulationReport]) -> None:
    """Or nothing that goes wrong would be noticed. A sweep of 1,000 seeds has to reach all."""
    reached = {mark for report in reports for mark in report.coverage}
    assert len(reached) > 0.7 * len(CoverageMark)
    assert max(report.oldest_staleness for report in reports) >= 2
    assert sum(report.trained_tokens for report in reports) > 10 * SEEDS
    assert len({report.digest for report in reports}) == SEEDS


@pytest.mark.parametrize("what", FAILED_ONCE)
def test_a_scenario_that_failed_once_holds_every_invariant(what: str) -> None:
    assert run_scenario(read_scenario(FAILED_ONCE[what])).failure is None


# ---------------------------------------------------------------- the same each time


@pytest.mark.parametrize(
    ("simulate_seed", "seeds", "options"),
    [
        (simulate, range(8), "--seeds 1 --faults all"),
        (simulate_crash_restarts, [5], "--seeds 0 --crash-restart-runs 1"),
        (simulate_adapters, [3], "--seeds 0 --adapter-runs 1"),
    ],
)
def test_a_seed_and_its_scenario_read_from_json_give_the_same_run_each_time(
    simulate_seed: Callable[[int], RunReport], seeds: Iterable[int], options: str
) -> None:
    for seed in seeds:
        drawn = simulate_seed(seed)
        assert simulate_seed(seed) == drawn
        again = run_any(read_scenario(drawn.scenario.to_json()))
        assert again.digest == drawn.digest
        assert drawn.replay_command == f"tidegate simulate --first-seed {seed} {options}"
        assert again.replay_command == f"tidegate simulate --replay '{drawn.scenario.to_json()}'"


def test_a_run_does_not_depend_on_how_python_hashes_strings() -> None:
    code = (
        "from tidegate.simulation.run.simulation import simulate\n"
        "print([simulate(seed).digest for seed in range(5)])"
    )
    digests = {str([simulate(seed).digest for seed in range(5)])}
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


def test_a_sweep_on_many_processes_reports_the_same_as_on_one() -> None:
    """In a process of their own: a pool's tracker ends only with the process that used the pool."""
    program = (
        "from tidegate.simulation.run.simulation import simulate\n"
        "from tidegate.simulation.run.sweep import sweep\n"
        "if __name__ == '__main__':\n"
        "    runs = (sweep(range(40, 65), simulate, workers=w) for w in (1, 2))\n"
        "    one, two = map(list, runs)\n"
        "    assert one == two\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_sweep_that_is_killed_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "tidegate.cli", "simulate", "--workers", "2"]
    with subprocess.Popen([*command, "--seeds", "5000"], stderr=subprocess.DEVNULL) as sweeping:
        process = psutil.Process(sweeping.pid)
        while len(workers := process.children()) < 2:
            assert sweeping.poll() is None
        sweeping.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


# ---------------------------------------------------------------- what goes wrong


def test_without_faults_every_task_is_trained_and_nothing_discarded() -> None:
    for seed in range(30):
        report, scenario = simulate(seed, faults=NO_FAULTS), draw_scenario(seed, NO_FAULTS)
        assert report.failure is None
        assert CoverageMark.CAME_BACK not in report.coverage
        is_dropping = scenario.deadline_policy == "drop" or scenario.policy == "tail-packing"
        if not scenario.filters_groups:
            assert report.trained_tasks == scenario.tasks
        if not scenario.filters_groups and not is_dropping:
            assert not report.coverage & {CoverageMark.DROPPED, CoverageMark.STALE}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FaultKind)
def test_a_run_survives_each_kind_of_fault_alone(kind: FaultKind) -> None:
    failed = [
        report.replay_command
        for seed in range(200, 206)
        if (report := simulate(seed, faults=frozenset({kind}))).failure
    ]
    assert failed == []


def test_fault_kinds_are_parsed_from_a_list() -> None:
    assert parse_faults("all") == ALL_FAULTS
    assert parse_faults("none") == NO_FAULTS
    assert parse_faults("crash,cut") == {FaultKind.CRASH, FaultKind.CUT}
    with pytest.raises(ConfigError, match="'rain' is not a valid FaultKind; faults are all, none"):
        parse_faults("crash,rain")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MUTATIONS.is_caught(name, monkeypatch, simulate, MUTANT_SEEDS_MAX)


# ---------------------------------------------------------------- what is said of a failure


def failing(name: str, monkeypatch: pytest.MonkeyPatch) -> SimulationReport:
    MUTATIONS[name].plant(monkeypatch)
    return next(report for seed in range(100) if (report := simulate(seed)).failure)


def test_a_failed_run_reports_its_faults_waiting_tasks_and_replay_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = failing("a_late_joiner_gets_no_weights", monkeypatch)
    seed = report.scenario.seed
    assert report.replay_command == f"tidegate simulate --first-seed {seed} --seeds 1 --faults all"
    assert report == simulate(seed)
    lines = "\n".join(report.story)
    assert 'scenario: {"' in lines
    assert "planned: " in lines
    assert "waiting: engine-0: " in lines
    assert "engine-0 <- " in lines


def test_a_failure_shrinks_to_a_smaller_run_with_the_same_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = failing("a_lost_engines_turns_are_forgotten", monkeypatch)
    smallest = shrink(report)
    assert smallest.failure is not None
    assert report.failure is not None
    assert smallest.failure.kind == report.failure.kind
    assert len(smallest.scenario.to_json()) < len(report.scenario.to_json()) / 2
    assert len(smallest.scenario.faults) <= 1
    assert run_scenario(read_scenario(smallest.scenario.to_json())) == smallest


def test_a_run_that_passed_can_not_be_shrunk() -> None:
    with pytest.raises(ValueError, match="needs a failed run"):
        shrink(simulate(0, faults=NO_FAULTS))


def test_the_smallest_scenario_is_the_shortest_and_runs() -> None:
    assert Scenario().to_json() == "{}"
    report = run_scenario(Scenario())
    assert report.failure is None
    assert report.trained_tasks == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"rain": 1}', '{"engines": "two"}', '{"max_staleness": -1}'),
        '{"credit_steps": 0}',
    ],
)
def test_an_invalid_scenario_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_scenario(text)


def test_shrinking_drops_faults_of_removed_engines() -> None:
    crash = Fault(kind=FaultKind.CRASH, engine=2, at_s=0.1)
    assert run_scenario(Scenario(engines=1, faults=[crash])).failure is None


def test_a_sweep_counts_the_coverage_marks_of_its_runs() -> None:
    summary = SweepSummary()
    crashes = partial(simulate, faults=frozenset({FaultKind.CRASH}))
    for report in sweep(range(30), crashes, workers=1):
        assert summary.add(report) == []
    lines = "\n".join(summary.lines())
    assert lines.startswith("30 of 30 seeds passed")
    assert f"{1000 * summary.coverage[CoverageMark.CRASHED] / 30:6.0f}  an engine crashed" in lines
    assert "     0  a connection broke" in lines


# ---------------------------------------------------------------- the command


def check_printed(
    failed: RunReport,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check what the command prints for the seed of a failed run, and that its smallest replay
    fails in the same way."""
    command, _, options = failed.replay_command.partition(" simulate ")
    assert command == "tidegate"
    assert status_of(["simulate", *options.split()], monkeypatch) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"seed {failed.seed}{kind}")
    assert output[0].endswith(f": {failed.failure}")
    assert output[1] == f"  replay: {failed.replay_command}"
    smallest = output[3].removeprefix("  replay: tidegate simulate --replay '").removesuffix("'")
    assert len(smallest) < len(failed.scenario.to_json()) / 2
    again = run_any(read_scenario(smallest))
    assert failed.failure is not None
    assert again.failure is not None
    assert again.failure.kind == failed.failure.kind
    assert status_of(["simulate", "--replay", smallest], monkeypatch) == 1
    assert f"failed: {again.failure}" in capsys.readouterr().out


def test_the_command_prints_a_failing_seed_with_its_smallest_replay_and_has_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["simulate", "--seeds", "3", "--faults", "none"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("3 of 3 seeds passed")
    MUTATIONS["a_batch_is_trained_twice"].plant(monkeypatch)
    check_printed(simulate(0), "", monkeypatch, capsys)


def test_the_command_replays_a_scenario_from_a_file_or_an_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = msgspec.structs.replace(draw_scenario(3), tasks=2)
    file = tmp_path / "scenario.json"
    file.write_text(scenario.to_json())
    lines = []
    for replay in (str(file), scenario.to_json()):
        assert status_of(["simulate", "--replay", replay], monkeypatch) == 0
        lines.append(capsys.readouterr().out)
    assert (
        lines[0]
        == lines[1]
        == f"digest {run_scenario(scenario).digest}\npassed: every invariant held\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--faults", "rain"], ["--replay", "no/such.json"], ["--seeds", "0"]]
)
def test_invalid_simulate_arguments_exit_with_status_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of(["simulate", *arguments], monkeypatch) == 2
