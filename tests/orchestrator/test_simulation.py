"""Does the simulation keep the promises, and would it notice if they were broken?"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.orchestrator.mutations import MUTATIONS
from tests.orchestrator.test_cli import status_of
from tidegate.errors import ConfigError
from tidegate.orchestrator.faults import ALL_FAULTS, NO_FAULTS, FaultKind, parse_faults
from tidegate.orchestrator.simulation import SimulationReport, simulate

SEEDS = 150
MUTANT_SEEDS_MAX = 300
"""Each planted bug has to be caught within so many."""


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    return [simulate(seed) for seed in range(SEEDS)]


@pytest.mark.slow
def test_every_promise_is_kept_whatever_goes_wrong(reports: list[SimulationReport]) -> None:
    failed = [f"{report.failure}; {report.replay_command}" for report in reports if report.failure]
    assert failed == []


@pytest.mark.slow
def test_the_runs_reach_what_is_hard(reports: list[SimulationReport]) -> None:
    """Or nothing that goes wrong would be noticed."""
    assert max(report.oldest_staleness for report in reports) >= 2
    assert any(report.oldest_staleness == report.max_staleness > 0 for report in reports)
    assert sum(report.trained_tokens for report in reports) > 10 * SEEDS
    assert len({report.digest for report in reports}) == SEEDS


@pytest.mark.parametrize("seed", range(12))
def test_the_same_seed_is_the_same_run_bit_for_bit(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_without_faults_every_task_is_trained_and_nothing_is_thrown_away() -> None:
    for seed in range(20):
        report = simulate(seed, faults=NO_FAULTS)
        assert report.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_of_fault_alone_is_survived(kind: FaultKind) -> None:
    failed = [
        report.replay_command
        for seed in range(200, 215)
        if (report := simulate(seed, faults=frozenset({kind}))).failure
    ]
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("plant", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(MUTANT_SEEDS_MAX):
        if simulate(seed).failure is not None:
            return
    pytest.fail(f"{MUTANT_SEEDS_MAX} seeds did not catch it")


def test_a_failed_run_says_what_was_planned_what_waits_and_how_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    MUTATIONS["a_lost_engines_turns_are_forgotten"](monkeypatch)
    seed, report = next((s, r) for s in range(100) if (r := simulate(s)).failure)
    assert report.replay_command == f"tidegate simulate --first-seed {seed} --seeds 1 --faults all"
    assert report == simulate(seed)
    said = "\n".join(report.story)
    assert "settings: " in said
    assert "planned: " in said
    assert "waiting: engine-0: " in said
    assert "engine-0 <- " in said


def test_faults_are_read_from_a_list() -> None:
    assert parse_faults("all") == ALL_FAULTS
    assert parse_faults("none") == NO_FAULTS
    assert parse_faults("crash,cut") == {FaultKind.CRASH, FaultKind.CUT}
    with pytest.raises(ConfigError, match="'rain' is not a valid FaultKind; faults are all, none"):
        parse_faults("crash,rain")


def test_the_command_prints_a_failing_seed_with_its_replay_and_has_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["simulate", "--seeds", "3", "--faults", "none"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("3 of 3 seeds kept every promise")
    MUTATIONS["a_batch_is_trained_twice"](monkeypatch)
    assert status_of(["simulate", "--seeds", "3"], monkeypatch) == 1
    assert "replay: tidegate simulate --first-seed 0 --seeds 1" in capsys.readouterr().out


def test_a_fault_that_there_is_not_is_refused_with_status_2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert status_of(["simulate", "--faults", "rain"], monkeypatch) == 2
