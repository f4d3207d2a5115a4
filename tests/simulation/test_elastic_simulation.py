"""Runs whose policy adds and retires engines by chance, with all faults: no promise is broken."""

from functools import partial

import msgspec
import pytest

from tests.simulation.mutations import Mutations, Right
from tidegate.orchestrator.fleet.drains import Drains
from tidegate.orchestrator.scheduler.elastic_fleet import ElasticFleet
from tidegate.orchestrator.scheduler.engine_side import EngineSide
from tidegate.policies.elasticity import Elastic, Scaling
from tidegate.simulation.checks.coverage import ELASTIC_MARKS
from tidegate.simulation.faults.faults import ALL_FAULTS, NO_FAULTS, FaultKind
from tidegate.simulation.faults.scenario import ElasticByChance, draw_scenario
from tidegate.simulation.run.simulation import SimulationReport, run_scenario

pytestmark = [pytest.mark.wire, pytest.mark.slow]

SEEDS = 30


def elastic_run(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> SimulationReport:
    """Run a drawn scenario with three engines, and long enough that they come and go."""
    drawn = draw_scenario(seed, kinds)
    tasks = drawn.tasks + 4 * drawn.groups_per_batch
    return run_scenario(
        msgspec.structs.replace(drawn, is_elastic=True, engines=max(3, drawn.engines), tasks=tasks)
    )


def test_all_invariants_hold_while_a_policy_adds_and_retires_engines() -> None:
    reports = [elastic_run(seed) for seed in range(SEEDS)]
    failed = [f"{each.failure}; {each.replay_command}" for each in reports if each.failure]
    assert failed == []
    assert {mark for each in reports for mark in each.coverage} >= ELASTIC_MARKS


MUTATIONS = Mutations()
mutation, instead_of = MUTATIONS.plant, MUTATIONS.instead_of


@instead_of(ElasticByChance, "decide")
def limits_are_ignored(_: Right, self: Elastic, run: object, *, quiet_s: float) -> Scaling:
    return Scaling(self.engines_max, self.engines_max + 1, "a bug")


@instead_of(EngineSide, "scale")
async def one_engine_more_than_decided_is_retired(
    right: Right, self: EngineSide, engines: int, within_s: float
) -> None:
    await right(self, max(0, engines - 1), within_s)


@mutation()
def engines_kept_for_evaluations_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineSide, "reserved", 0)


@mutation()
def an_engine_ends_without_handing_back_its_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drains, "_end_time", Drains._leave)


@instead_of(ElasticFleet, "decide")
def it_is_decided_while_engines_are_to_come_or_go(
    _: Right, self: ElasticFleet, run: object
) -> None:
    self.wanted = 0
    self._pending.notify()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_of_elasticity_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MUTATIONS.is_caught(name, monkeypatch, partial(elastic_run, kinds=NO_FAULTS), SEEDS)
