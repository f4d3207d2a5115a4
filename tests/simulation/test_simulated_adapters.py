"""Runs that train several adapters, with planted bugs that let one adapter reach another."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.simulation.mutations import Mutations, Right
from tests.simulation.test_simulation import check_printed
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core import core as core_module
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import snapshot_codec
from tidegate.orchestrator.core.adapter_versions import Adapters, LoraVersions
from tidegate.orchestrator.core.control_events import AdapterMemory
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.snapshot_codec import SavedCore
from tidegate.orchestrator.core.target_versions import WeightUpdate
from tidegate.orchestrator.core.turns import ReleasedVersions, TurnTracker
from tidegate.orchestrator.weight_sync.control import EngineControl
from tidegate.simulation.checks.coverage import ADAPTER_MARKS
from tidegate.simulation.run.adapter_runs import (
    draw_adapter_scenario,
    scenario_of_adapter,
    simulate_adapters,
)
from tidegate.transport.messages import HeldAdapter

SEEDS = 11
"""All marks of runs with adapters occur in these. `make simulate` runs the first hundred seeds."""

MUTATIONS = Mutations()
mutation, instead_of = MUTATIONS.plant, MUTATIONS.instead_of


@instead_of(Core, "_on_adapter_released")
def a_publish_ages_the_rollouts_of_every_adapter(
    right: Right, self: Core, name: str, version: int
) -> Any:
    commands = right(self, name, version)
    for other in self.trained_adapters.values():
        other.trainer_version = max(other.trainer_version, version)
    return commands


@instead_of(Core, "_train_adapter")
def all_adapters_share_one_record_of_their_versions(
    right: Right, self: Core, name: str, rules: Rules
) -> None:
    versions = next(iter(self.turns.adapter_versions.values()), None)
    right(self, name, rules)
    if versions is not None:
        self.turns.adapter_versions[name] = self.trained_adapters[name].versions = versions


@instead_of(TurnTracker, "_take_back", seed=6)
def a_pause_takes_the_turns_of_every_adapter_back(
    right: Right, self: TurnTracker, adapter: str
) -> list[tuple[str, int]]:
    return [place for each in self.adapter_versions for place in right(self, each)]


@instead_of(core_module, "resume", seed=4)
def adapters_resume_from_the_checkpoint_of_the_base(
    right: Right, core: Core, event: ev.RunResumed
) -> Any:
    at = dict.fromkeys(event.adapters, (event.batches, event.offer))
    return right(core, ev.RunResumed(event.batches, event.offer, at))


@instead_of(snapshot_codec, "_load_groups", seed=4)
def a_resume_counts_evaluations_once_for_each_adapter(
    right: Right, saved: SavedCore, core: Core
) -> None:
    before = Counter(core.evaluation_ledger.discarded)
    right(saved, core)
    core.evaluation_ledger.discarded.update(before)


@mutation()
def the_buffers_of_other_adapters_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "buffers", property(lambda self: frozenset()))


@instead_of(EngineControl, "_carry_out", seed=202)
def adapters_are_swapped_before_their_number_is_safe(
    right: Right, self: EngineControl, command: wc.Command
) -> None:
    right(self, command)
    if isinstance(command, wc.ReleaseVersion):
        self.handle(wc.VersionDurable(command.version, command.adapter))


@instead_of(EngineControl, "_next_version", seed=4)
def a_restarted_process_numbers_an_adapters_versions_anew(
    right: Right, self: EngineControl, adapter: str
) -> Any:
    return 1 if adapter else right(self, adapter)


@mutation(seed=186)
def engines_that_missed_a_publish_get_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReleasedVersions, "behind", property(lambda self: set()))


@instead_of(ReleasedVersions, "join", seed=186)
def a_rejoined_engine_is_said_to_hold_the_newest_version(
    right: Right, self: ReleasedVersions, engine: str, version: int | None
) -> None:
    right(self, engine, None)


@instead_of(Adapters, "join", seed=186)
def engines_that_missed_a_publish_are_not_brought_up_to_date(
    right: Right, self: Adapters, engine: str, memory: AdapterMemory
) -> None:
    loaded = [(each.name, self.get(each.name)) for each in memory.held]
    held = [HeldAdapter(name, (own and own.newest_version) or 1) for name, own in loaded]
    right(self, engine, AdapterMemory(memory.adapters_max, held))


@instead_of(LoraVersions, "_lacks", seed=174)
def an_engine_that_lacks_what_it_serves_waits_for_it_forever(
    right: Right, self: LoraVersions, engine: str, update: WeightUpdate
) -> Any:
    return self._held.get(engine) != update.version and right(self, engine, update)


@mutation(seed=191)
def a_dead_process_gives_up_engines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineControl, "close", lambda self: None)


@instead_of(Core, "_train_adapter")
def an_adapter_gets_the_rules_of_another(right: Right, self: Core, name: str, rules: Rules) -> None:
    others: Mapping[str, Core] = self.trained_adapters
    right(self, name, next((core.rules for core in others.values()), rules))


def test_adapters_keep_apart_whatever_fails_and_whenever_the_process_dies() -> None:
    reports = [simulate_adapters(seed) for seed in range(SEEDS)]
    assert [(r.seed, r.failure) for r in reports if r.failure] == []
    assert sum(report.processes for report in reports) > SEEDS
    assert sum(report.trained_tasks for report in reports) > SEEDS
    assert {mark for report in reports for mark in report.coverage} >= ADAPTER_MARKS


def test_the_rules_drawn_for_an_adapter_can_be_made_whatever_the_runs_own_are() -> None:
    for seed in range(200):
        run = draw_adapter_scenario(seed)
        for number in range(run.adapters):
            scenario_of_adapter(run, number).settings.rules()


def test_a_crash_ends_the_trainers_of_adapters_in_the_same_order_each_time() -> None:
    assert len({simulate_adapters(27).digest for _ in range(4)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_between_adapters_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MUTATIONS.is_caught(name, monkeypatch, simulate_adapters, seeds=0)


def test_a_failing_run_with_adapters_is_printed_with_its_smallest_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MUTATIONS["a_publish_ages_the_rollouts_of_every_adapter"].plant(monkeypatch)
    check_printed(simulate_adapters(0), ", with adapters", monkeypatch, capsys)
