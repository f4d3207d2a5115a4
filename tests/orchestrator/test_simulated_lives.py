"""Would the simulation of crashes notice a run that loses something with its process?"""

from collections.abc import Callable

import pytest

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import left_out
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.groups import GroupBook
from tidegate.orchestrator.core.handed_batches import HandedBatch, HandedBatches
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.trained import TrainedCounts
from tidegate.orchestrator.engine_side import EngineSide
from tidegate.orchestrator.feed.task_feed import TaskFeed
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.journal.run_journal import RunJournal
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.simulation.lives import simulate_lives
from tidegate.orchestrator.turns import turns
from tidegate.orchestrator.turns.turns import TurnBook
from tidegate.transport.messages import Hello
from tidegate.transport.streams import ReceiveWindow

SEEDS = 30
SEEDS_TO_CATCH = 300

Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: list[Mutation] = []


def mutation(function: Mutation) -> Mutation:
    """A fault, planted."""
    MUTATIONS.append(function)
    return function


@mutation
def steps_are_acknowledged_before_they_are_safe(patch: pytest.MonkeyPatch) -> None:
    right = EngineSide.on_frames

    def on_frames(self: EngineSide, frames: list[tuple[bytes, bytes]]) -> None:
        right(self, frames)
        self.fleet.acknowledge(self.fleet.take_acks())

    def when_safe(self: Scheduler, action: Callable[[], None]) -> None:
        action()

    patch.setattr(EngineSide, "on_frames", on_frames)
    patch.setattr(Scheduler, "when_safe", when_safe)


@mutation
def handles_are_given_out_again_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turns, "HANDLES_PER_PROCESS", 0)


@mutation
def turns_that_were_lost_on_the_way_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnBook, "_send_missing", lambda self, name, engine: [])


@mutation
def the_task_of_a_group_that_is_given_up_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TakenTasks, "put_back", lambda self, key: None)


@mutation
def new_weights_get_the_number_of_the_restored_ones(patch: pytest.MonkeyPatch) -> None:
    def next_version(self: Core) -> int:
        return self.trainer_version + (not self.is_restoring)

    patch.setattr(Core, "next_version", property(next_version))


@mutation
def lost_weights_are_taken_for_the_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandedBatches, "first_lost_version", lambda self, batches: None)


@mutation
def an_engines_replay_is_taken_for_heard(patch: pytest.MonkeyPatch) -> None:
    def window(self: Fleet, hello: Hello) -> ReceiveWindow:
        credit_steps = self._times.credit_steps
        return ReceiveWindow(credit_steps, epoch=hello.epoch, next_seq=hello.next_seq)

    patch.setattr(Fleet, "_window", window)


@mutation
def a_resumed_run_takes_its_tasks_from_the_start(patch: pytest.MonkeyPatch) -> None:
    async def pass_by_none(self: TaskFeed) -> None:
        return

    patch.setattr(TaskFeed, "_pass_by_the_taken", pass_by_none)


@mutation
def what_a_cut_rollout_had_sampled_stays_in_flight(patch: pytest.MonkeyPatch) -> None:
    def cut(self: GroupBook, event: ev.RolloutCut) -> list[ev.Command]:
        rollout, _ = self.running[event.rollout_id]
        commands = self._turns.cancel(rollout)
        rollout.cut(turns=event.turns, tokens=event.tokens)
        return commands

    patch.setattr(GroupBook, "cut", cut)


@mutation
def batches_to_be_handed_over_again_go_to_the_end(patch: pytest.MonkeyPatch) -> None:
    def take_back(self: GroupBook, groups: list[Group]) -> None:
        self._waiting.update({group.group_id: group for group in groups})
        self._ended.update({group.group_id: group for group in groups})
        for rollout in (rollout for group in groups for rollout in group.kept):
            rollout.state = RolloutState.FINISHED
            self.ledger.take_back(rollout.sampled_tokens)

    patch.setattr(GroupBook, "take_back", take_back)


@mutation
def rows_left_out_of_a_batch_that_is_undone_stay_discarded(patch: pytest.MonkeyPatch) -> None:
    def take_back(batch: HandedBatch, groups: GroupBook, trained: TrainedCounts) -> None:
        trained.count(batch.rows, batch.trainer_version, -1)
        groups.take_back(batch.groups)

    patch.setattr(left_out, "take_back", take_back)


@mutation
def what_was_left_out_is_not_written_down(patch: pytest.MonkeyPatch) -> None:
    right = RunJournal.log

    def log(self: RunJournal, event: ev.Event) -> None:
        if not isinstance(event, ev.RowsDiscarded):
            right(self, event)

    patch.setattr(RunJournal, "log", log)


def test_a_run_goes_on_whenever_its_process_dies() -> None:
    reports = [simulate_lives(seed) for seed in range(SEEDS)]
    assert [(r.seed, r.failure) for r in reports if r.failure] == []
    assert sum(report.lives for report in reports) > 2 * SEEDS
    assert sum(report.batches_again for report in reports) > 0
    assert sum(report.rollbacks for report in reports) > 0
    assert sum(report.left_out_tokens for report in reports) > 0


def test_a_seed_goes_the_same_way_each_time() -> None:
    assert simulate_lives(5).digest == simulate_lives(5).digest


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_planted_fault_is_caught(mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(simulate_lives(seed).failure for seed in range(SEEDS_TO_CATCH))
