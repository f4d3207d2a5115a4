"""Crash-restart runs, with planted bugs that lose something with the process."""

from typing import Any

import pytest

from tests.simulation.mutations import MUTATIONS as MUTATIONS_OF_ONE_PROCESS
from tests.simulation.mutations import Mutations, Right
from tests.simulation.test_simulation import check_printed
from tidegate.orchestrator.core import core, snapshot_codec, turns
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.hand_over import HandedBatch, HandOvers, TrainedCounts
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.orchestrator.core.snapshot_codec import SavedTurns
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.journal.run_journal import RunJournal
from tidegate.orchestrator.scheduler.engine_side import EngineSide
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.scheduler.task_feed import TaskFeed
from tidegate.simulation.run.crash_restart import simulate_crash_restarts
from tidegate.transport.messages import Hello
from tidegate.transport.streams import ReceiveWindow

SEEDS = 15
"""All that a crash may do to batches happens in these. `make simulate` runs 300 seeds."""
SEEDS_TO_CATCH = 500

SHARED = {
    "a_batch_whose_request_was_cancelled_is_lost": 1,
    "batches_that_the_trainer_holds_count_no_version": 85,
}
"""Bugs that runs of one process notice too."""

MUTATIONS = Mutations()
mutation, instead_of = MUTATIONS.plant, MUTATIONS.instead_of
for name, seed in SHARED.items():
    mutation(seed=seed)(MUTATIONS_OF_ONE_PROCESS[name].plant)


@mutation(seed=5)
def steps_are_acknowledged_before_they_are_safe(patch: pytest.MonkeyPatch) -> None:
    right = EngineSide.on_frames

    def on_frames(self: EngineSide, frames: list[tuple[bytes, bytes]]) -> None:
        right(self, frames)
        self.fleet.acknowledge(self.fleet.take_acks())

    patch.setattr(EngineSide, "on_frames", on_frames)
    patch.setattr(Scheduler, "when_safe", lambda self, action: action())


@mutation(seed=4)
def handles_are_given_out_again_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(turns, "HANDLES_PER_PROCESS", 0)


@instead_of(Scheduler, "_wait_resume_durable", seed=245)
async def engines_are_sent_turns_before_a_resume_is_committed(_: Right, self: Scheduler) -> None:
    return


@mutation(seed=1)
def turns_that_were_lost_on_the_way_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "_send_missing", lambda self, name, engine: [])


@mutation(seed=10)
def the_task_of_a_group_that_is_given_up_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TakenTasks, "put_back", lambda self, key, task, body: None)


@mutation(seed=90)
def unfinished_tasks_of_an_earlier_iterator_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TakenTasks, "is_known", lambda self, key, body: False)


@instead_of(TakenTasks, "resume", seed=1654)
def returned_tasks_of_an_earlier_iterator_are_forgotten(
    right: Right, self: TakenTasks, offer: int
) -> None:
    right(self, offer)
    self.requeued = {key: task for key, task in self.requeued.items() if key.offer == offer}


@instead_of(Core, "next_version", seed=28)
def new_weights_get_the_number_of_the_restored_ones(_: Right, self: Core) -> int:
    return self.trainer_version + (not self.is_restoring)


@mutation(seed=2)
def lost_weights_are_taken_for_the_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "first_lost_version", lambda self, batches: None)


@instead_of(Fleet, "_window")
def an_engines_replay_is_taken_for_heard(_: Right, self: Fleet, hello: Hello) -> ReceiveWindow:
    credit_steps = self._settings.credit_steps
    return ReceiveWindow(credit_steps, epoch=hello.epoch, next_seq=hello.next_seq)


@instead_of(TaskFeed, "_skip_taken_tasks")
async def a_resumed_run_takes_its_tasks_from_the_start(_: Right, self: TaskFeed) -> None:
    return


@instead_of(GroupTracker, "cut")
def what_a_cut_rollout_had_sampled_stays_in_flight(
    _: Right, self: GroupTracker, event: ev.RolloutCut
) -> list[ev.Command]:
    rollout, _group = self.running[event.rollout_id]
    commands = self._turns.cancel(rollout)
    rollout.cut(turns=event.turns)
    return commands


@mutation(seed=20)
def a_cut_keeps_given_tokens_that_no_event_has_reported(patch: pytest.MonkeyPatch) -> None:
    right = GroupTracker.cut

    def cut(self: GroupTracker, event: ev.RolloutCut) -> list[ev.Command]:
        rollout, _ = self.running[event.rollout_id]
        context = rollout.token_ids[: event.tokens]
        commands = right(self, event)
        rollout.extend(context[rollout.sampled_end :])
        return commands

    def stop_replay(self: Episode) -> None:
        past, self._replay = self._replay, None
        if past is not None:
            self._backend.cut(self._rollout, turns=past.turns, tokens=past.tokens)

    patch.setattr(GroupTracker, "cut", cut)
    patch.setattr(Episode, "_stop_replay", stop_replay)


@instead_of(GroupTracker, "return_to_buffer", seed=1)
def batches_to_be_handed_over_again_go_to_the_end(
    _: Right, self: GroupTracker, groups: list[Group]
) -> None:
    self._outstanding.update({group.group_id: group for group in groups})
    self._ended.update({group.group_id: group for group in groups})
    for rollout in (rollout for group in groups for rollout in group.kept):
        rollout.state = RolloutState.FINISHED
        self.ledger.untrain(rollout.sampled_tokens)


@mutation(seed=19)
def batches_to_be_handed_over_again_are_selected_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "_undone_batch", lambda self: None)


@instead_of(core, "undo_batch", seed=2)
def rows_discarded_from_a_batch_that_is_undone_stay_discarded(
    _: Right, batch: HandedBatch, groups: GroupTracker, trained: TrainedCounts
) -> None:
    trained.count(batch.rows, batch.trainer_version, -1)
    groups.return_to_buffer(batch.groups)


@instead_of(RunJournal, "log", seed=4)
def discarded_rows_are_not_journalled(right: Right, self: RunJournal, event: ev.Event) -> None:
    if not isinstance(event, ev.RowsDiscarded):
        right(self, event)


@instead_of(HandOvers, "resume", seed=94)
def batches_of_the_checkpoint_stay_untrained_after_a_resume(
    _: Right, self: HandOvers, batches: int
) -> None:
    self.requests.clear()
    self.offer, self.is_paused = None, False


@instead_of(HandOvers, "resume")
def a_resume_keeps_the_requests_of_the_trainer_before(
    right: Right, self: HandOvers, batches: int
) -> None:
    requests = self.requests.copy()
    right(self, batches)
    self.requests = requests


@instead_of(snapshot_codec, "_turns", seed=125)
def engines_are_restored_in_the_order_of_their_names(right: Right, core: Core) -> SavedTurns:
    saved: SavedTurns = right(core)
    saved.engines.sort(key=lambda engine: engine.name)
    return saved


@instead_of(HandOvers, "resume", seed=94)
def a_resume_grants_another_use(right: Right, self: HandOvers, batches: int) -> None:
    right(self, batches)
    for batch in self.kept:
        self._keep_used(batch)


@mutation(seed=84)
def a_resume_takes_a_use_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "return_used", HandOvers.forget_used)


@instead_of(snapshot_codec, "_reuse", seed=203)
def groups_that_may_be_used_again_are_not_saved(right: Right, core: Core) -> dict[str, Any]:
    return {**right(core), "used": []}


def test_a_run_continues_whenever_its_process_dies() -> None:
    reports = [simulate_crash_restarts(seed) for seed in range(SEEDS)]
    assert [(r.seed, r.failure) for r in reports if r.failure] == []
    assert sum(report.processes for report in reports) > 2 * SEEDS
    assert sum(report.batches_repeated for report in reports) > 0
    assert sum(report.rollbacks for report in reports) > 0
    assert sum(report.discarded_tokens for report in reports) > 0
    assert sum(report.batches_returned for report in reports) > 0
    assert sum(report.reused_groups for report in reports) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MUTATIONS.is_caught(name, monkeypatch, simulate_crash_restarts, SEEDS_TO_CATCH)


@pytest.mark.parametrize("seed", [900035, 913686, 914062, 917716, 918593, 919485])
def test_resumed_processes_resend_turns_in_the_same_order(seed: int) -> None:
    """The order in which engines joined decides it, so a saved core has to keep that order."""
    assert simulate_crash_restarts(seed).failure is None


@pytest.mark.slow
def test_a_failing_crash_restart_run_is_printed_with_its_smallest_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutation = MUTATIONS["the_task_of_a_group_that_is_given_up_is_skipped"]
    mutation.plant(monkeypatch)
    failed = simulate_crash_restarts(mutation.seed)
    check_printed(failed, ", with crash-restarts", monkeypatch, capsys)
