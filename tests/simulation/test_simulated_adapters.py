"""Runs that train several adapters, with planted bugs that let one adapter reach another."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from tests.cli.test_cli import status_of
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core import core as core_module
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import snapshot_codec
from tidegate.orchestrator.core.adapter_versions import Adapters, LoraVersions
from tidegate.orchestrator.core.control_events import AdapterMemory
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.released_versions import ReleasedVersions
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.snapshot_codec import SavedCore
from tidegate.orchestrator.core.target_versions import WeightUpdate
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.orchestrator.weight_sync.control import EngineControl
from tidegate.simulation.checks.coverage import ADAPTER_MARKS
from tidegate.simulation.faults.scenario import read_scenario
from tidegate.simulation.run.adapter_runs import (
    draw_adapter_scenario,
    scenario_of_adapter,
    simulate_adapters,
)
from tidegate.simulation.run.sweep import run_any
from tidegate.transport.messages import HeldAdapter

SEEDS = 11
"""All marks of runs with adapters occur in these. `make simulate` runs the first hundred seeds."""

Plant = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: list[tuple[Plant, int]] = []
"""Planted bugs, each with the first seed that notices it."""


def mutation(*, seed: int) -> Callable[[Plant], Plant]:
    """List a planted bug."""

    def listed(plant: Plant) -> Plant:
        MUTATIONS.append((plant, seed))
        return plant

    return listed


@mutation(seed=0)
def a_publish_ages_the_rollouts_of_every_adapter(patch: pytest.MonkeyPatch) -> None:
    right = Core._on_adapter_released

    def released(self: Core, name: str, version: int) -> list[ev.Command]:
        commands = right(self, name, version)
        for other in self.trained_adapters.values():
            other.trainer_version = max(other.trainer_version, version)
        return commands

    patch.setattr(Core, "_on_adapter_released", released)


@mutation(seed=0)
def all_adapters_share_one_record_of_their_versions(patch: pytest.MonkeyPatch) -> None:
    right = Core._train_adapter

    def train(self: Core, name: str, rules: Rules) -> None:
        versions = next(iter(self.turns.adapter_versions.values()), None)
        right(self, name, rules)
        if versions is not None:
            self.turns.adapter_versions[name] = self.trained_adapters[name].versions = versions

    patch.setattr(Core, "_train_adapter", train)


@mutation(seed=6)
def a_pause_takes_the_turns_of_every_adapter_back(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker._take_back

    def take_back(self: TurnTracker, adapter: str) -> list[tuple[str, int]]:
        return [place for each in self.adapter_versions for place in right(self, each)]

    patch.setattr(TurnTracker, "_take_back", take_back)


@mutation(seed=4)
def adapters_resume_from_the_checkpoint_of_the_base(patch: pytest.MonkeyPatch) -> None:
    right = core_module.resume

    def resume(core: Core, event: ev.RunResumed) -> list[ev.Command]:
        at = dict.fromkeys(event.adapters, (event.batches, event.offer))
        return right(core, ev.RunResumed(event.batches, event.offer, at))

    patch.setattr(core_module, "resume", resume)


@mutation(seed=4)
def a_resume_counts_evaluations_once_for_each_adapter(patch: pytest.MonkeyPatch) -> None:
    right = snapshot_codec._load_groups

    def load(saved: SavedCore, core: Core) -> None:
        before = Counter(core.evaluation_ledger.discarded)
        right(saved, core)
        core.evaluation_ledger.discarded.update(before)

    patch.setattr(snapshot_codec, "_load_groups", load)


@mutation(seed=0)
def the_buffers_of_other_adapters_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "buffers", property(lambda self: frozenset()))


@mutation(seed=202)
def adapters_are_swapped_before_their_number_is_safe(patch: pytest.MonkeyPatch) -> None:
    right = EngineControl._carry_out

    def carry_out(self: EngineControl, command: wc.Command) -> None:
        right(self, command)
        if isinstance(command, wc.ReleaseVersion):
            self.handle(wc.VersionDurable(command.version, command.adapter))

    patch.setattr(EngineControl, "_carry_out", carry_out)


@mutation(seed=4)
def a_restarted_process_numbers_an_adapters_versions_anew(patch: pytest.MonkeyPatch) -> None:
    right = EngineControl._next_version

    def next_version(self: EngineControl, adapter: str) -> int:
        return 1 if adapter else right(self, adapter)

    patch.setattr(EngineControl, "_next_version", next_version)


@mutation(seed=186)
def engines_that_missed_a_publish_get_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReleasedVersions, "behind", property(lambda self: set()))


@mutation(seed=186)
def a_rejoined_engine_is_said_to_hold_the_newest_version(patch: pytest.MonkeyPatch) -> None:
    right = ReleasedVersions.join

    def join(self: ReleasedVersions, engine: str, version: int | None) -> None:
        right(self, engine, None)

    patch.setattr(ReleasedVersions, "join", join)


@mutation(seed=186)
def engines_that_missed_a_publish_are_not_brought_up_to_date(patch: pytest.MonkeyPatch) -> None:
    right = Adapters.join

    def join(self: Adapters, engine: str, memory: AdapterMemory) -> None:
        loaded = [(each.name, self.get(each.name)) for each in memory.held]
        held = [HeldAdapter(name, (own and own.newest_version) or 1) for name, own in loaded]
        right(self, engine, AdapterMemory(memory.adapters_max, held))

    patch.setattr(Adapters, "join", join)


@mutation(seed=174)
def an_engine_that_lacks_what_it_serves_waits_for_it_forever(patch: pytest.MonkeyPatch) -> None:
    right = LoraVersions._lacks

    def lacks(self: LoraVersions, engine: str, update: WeightUpdate) -> bool:
        return self._held.get(engine) != update.version and right(self, engine, update)

    patch.setattr(LoraVersions, "_lacks", lacks)


@mutation(seed=191)
def a_dead_process_gives_up_engines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineControl, "close", lambda self: None)


@mutation(seed=0)
def an_adapter_gets_the_rules_of_another(patch: pytest.MonkeyPatch) -> None:
    right = Core._train_adapter

    def train(self: Core, name: str, rules: Rules) -> None:
        others: Mapping[str, Core] = self.trained_adapters
        right(self, name, next((core.rules for core in others.values()), rules))

    patch.setattr(Core, "_train_adapter", train)


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


def test_a_seed_with_adapters_is_deterministic() -> None:
    assert simulate_adapters(3).digest == simulate_adapters(3).digest


def test_a_crash_ends_the_trainers_of_adapters_in_the_same_order_each_time() -> None:
    assert len({simulate_adapters(27).digest for _ in range(4)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "seed"), MUTATIONS, ids=[each.__name__ for each, _ in MUTATIONS])
def test_a_planted_fault_between_adapters_is_detected(
    plant: Plant, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert simulate_adapters(seed).failure is not None


def test_a_scenario_with_adapters_replays_from_json_as_from_its_seed() -> None:
    drawn = simulate_adapters(3)
    again = run_any(read_scenario(drawn.scenario.to_json()))
    assert again.digest == drawn.digest
    assert drawn.replay_command == "tidegate simulate --first-seed 3 --seeds 0 --adapter-runs 1"


def test_a_failing_run_with_adapters_is_printed_with_its_smallest_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_publish_ages_the_rollouts_of_every_adapter(monkeypatch)
    failed = simulate_adapters(0)
    one = ["simulate", "--seeds", "0", "--adapter-runs", "1", "--first-seed", str(failed.seed)]
    assert status_of(one, monkeypatch) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"seed {failed.seed}, with adapters")
    assert output[0].endswith(str(failed.failure))
    assert output[1] == f"  replay: {failed.replay_command}"
    smallest = output[3].removeprefix("  replay: tidegate simulate --replay '").removesuffix("'")
    assert len(smallest) < len(failed.scenario.to_json())
    again = run_any(read_scenario(smallest))
    assert again.failure is not None
    assert failed.failure is not None
    assert again.failure.kind == failed.failure.kind
