"""What is done for each command of the core? Messages are posted, who waits is told.

It decides nothing and waits for nothing: commands come in order, and are carried out at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import PublishNeeded, TurnRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.episodes.runner import EpisodeFunction, EpisodeRunner
from tidegate.orchestrator.feed.batch_desk import BatchDesk
from tidegate.orchestrator.feed.offers import Offers
from tidegate.orchestrator.fleet.open_sessions import OpenSessions
from tidegate.orchestrator.observing.notes import RunNotes
from tidegate.orchestrator.turns.outbox import Outbox
from tidegate.orchestrator.waiting import Waiting, fail, resolve
from tidegate.transport.messages import CancelTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Those of one run's core, and who carries them out."""

    outbox: Outbox
    sessions: OpenSessions
    waiting: Waiting
    episodes: EpisodeRunner
    batches: BatchDesk
    offers: Offers
    recorder: RunNotes | None
    on_pause: Callable[[bool], None]
    """Has all engines stand still, or go on."""
    outstanding_groups_max: Callable[[], int]
    """As the policy has it now."""

    def carry_out(self, command: ev.Command, episode: EpisodeFunction | None) -> None:
        """``episode`` runs what an event of now begins."""
        # Each rollout has these three; to match a class costs ten times as much as to name it.
        if type(command) is ev.Submit:
            self.outbox.post(command.engine, command.message)
            self.sessions.submitted(command.engine, command.message.session)
        elif type(command) is ev.EndTurns:
            waiting = self.waiting.turns
            for turn in command.turns:
                future = waiting.pop(turn.rollout_id, None)
                if future is not None and not future.done():
                    future.set_result(turn)
        elif type(command) is ev.StartEpisode:
            assert episode is not None
            self.episodes.begin(command.rollout, command.task, episode)
        else:
            self._carry_out_others(command)

    def _carry_out_others(self, command: ev.Command) -> None:
        match command:
            case ev.StartBranch(rollout=rollout):
                self.episodes.forked(rollout)
            case ev.StopEpisode(rollout=rollout):
                self.episodes.stop(rollout)
            case ev.FailTurn(turn=turn, message=why):
                fail(self.waiting.turns.pop(turn.rollout_id, None), TurnRefused(why))
            case ev.Cancel(engine=engine, handle=handle):
                self.outbox.post(engine, CancelTurn(turn=handle))
            case ev.EndEvaluation(rollout=rollout):
                resolve(self.waiting.evaluations.pop(rollout.rollout_id, None), rollout)
            case ev.RequeueTask(task=task, key=key):
                self.offers.put_back(task, key)
            case ev.Record(rollout=rollout, task=task):
                if self.recorder is not None:
                    self.recorder.rollout(rollout, task=task, advantage=None, consumed_version=None)
            case _:
                self._carry_out_rarely(command)

    def _carry_out_rarely(self, command: ev.Command) -> None:
        """Commands about batches: one in some hundred."""
        match command:
            case ev.HandOver():
                self.batches.hand_over(command)
            case ev.EndBatches():
                self.batches.end()
            case ev.RefuseBatch(unpublished_groups=groups):
                limit = self.outstanding_groups_max()
                self.batches.refuse(
                    PublishNeeded(unpublished_groups=groups, outstanding_groups_max=limit)
                )
            case ev.PauseGeneration(is_paused=is_paused):
                self.on_pause(is_paused)
