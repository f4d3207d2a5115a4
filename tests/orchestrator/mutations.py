"""Bugs that were made before, by us or by others: planted to see whether the simulation notices.

Each changes one decision of the real orchestrator, as a wrong line in its code would. The seed at
each is the first that notices it, when it was last looked for.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from tidegate.errors import WeightsRefused
from tidegate.orchestrator import events as ev
from tidegate.orchestrator import filing, groups
from tidegate.orchestrator.core import Core
from tidegate.orchestrator.filing import StepOutcome, Submission
from tidegate.orchestrator.fleet import Engine, Fleet, Heard
from tidegate.orchestrator.groups import GroupBook
from tidegate.orchestrator.publishing import Publisher
from tidegate.orchestrator.rollout import Group, Turn
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.steady import SteadySteps
from tidegate.orchestrator.step_checks import step_arrived
from tidegate.orchestrator.tasks import TaskSource
from tidegate.orchestrator.turns import TurnBook
from tidegate.orchestrator.weights import Outgoing, WeightCoordinator
from tidegate.policies.staleness import BoundedStaleness
from tidegate.transport.messages import (
    ABORT,
    FINISH_REASONS,
    LENGTH,
    STOP,
    Ack,
    Hello,
    Prefill,
    Step,
    UpdateWeights,
)
from tidegate.transport.streams import ReceiveWindow, Verdict

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug, and where it is found."""

    plant: Plant
    seed: int


MUTATIONS: dict[str, Mutation] = {}
"""By name."""


def mutation(*, seed: int) -> Callable[[Plant], Plant]:
    """List a planted bug under its name."""

    def listed(plant: Plant) -> Plant:
        MUTATIONS[plant.__name__] = Mutation(plant, seed)
        return plant

    return listed


# ---------------------------------------------------------------- admission and consumption


@mutation(seed=2)
def one_group_too_many_is_admitted(patch: pytest.MonkeyPatch) -> None:
    def outstanding(self: BoundedStaleness) -> int:
        return (self.max_staleness + 1) * self.groups_per_batch + 1

    patch.setattr(BoundedStaleness, "outstanding_groups_max", property(outstanding))


@mutation(seed=2)
def groups_in_training_are_not_outstanding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "outstanding_groups", property(lambda self: len(self.groups.queue)))


@mutation(seed=2)
def places_are_free_before_the_version_is_live(patch: pytest.MonkeyPatch) -> None:
    def release(self: Core, commands: list[ev.Command]) -> list[ev.Command]:
        while self.handed.holding and self.handed.holding[0].version is not None:
            self.handed.holding.popleft()
        return commands + self._hand_over()

    patch.setattr(Core, "_release", release)


@mutation(seed=3)
def places_are_free_once_the_first_engine_is_live(patch: pytest.MonkeyPatch) -> None:
    def raise_live_version(self: TurnBook) -> None:
        newest = max((engine.weight_version for engine in self.engines.values()), default=0)
        self.live_version = max(self.live_version, newest)

    patch.setattr(TurnBook, "_raise_live_version", raise_live_version)


@mutation(seed=0)
def groups_are_trained_in_the_order_of_completion(patch: pytest.MonkeyPatch) -> None:
    right = Core._finished_head

    def finished_head(self: Core) -> list[Group] | None:
        queue = self.groups.queue
        self.groups.queue = deque(sorted(queue, key=lambda group: group.running > 0))
        return right(self)

    patch.setattr(Core, "_finished_head", finished_head)


@mutation(seed=0)
def a_batch_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = Core._train

    def train(self: Core, head: list[Group]) -> list[ev.Command]:
        commands = right(self, head)
        if head and self.trained.batches == 2:
            self.groups.queue.appendleft(head[-1])
            self.ledger.trained -= sum(r.sampled_tokens for r in head[-1].kept)
            self.ledger.buffered += sum(r.sampled_tokens for r in head[-1].kept)
        return commands

    patch.setattr(Core, "_train", train)


@mutation(seed=0)
def a_dropped_group_keeps_its_tokens_buffered(patch: pytest.MonkeyPatch) -> None:
    def drop(self: GroupBook, group: Group, reason: str) -> list[ev.Command]:
        self.queue.remove(group)
        return [self._discard(rollout, group, reason) for rollout in group.kept]

    patch.setattr(GroupBook, "drop", drop)


@mutation(seed=1)
def a_group_that_is_just_fresh_enough_is_dropped(patch: pytest.MonkeyPatch) -> None:
    def is_fresh(self: BoundedStaleness, *, oldest_version: int, trainer_version: int) -> bool:
        return trainer_version - oldest_version < self.max_staleness

    patch.setattr(BoundedStaleness, "is_fresh", is_fresh)


@mutation(seed=29)
def age_is_not_checked_when_a_batch_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "is_fresh", lambda self, **versions: True)


@mutation(seed=0)
def a_group_with_one_rollout_left_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups, "KEPT_ROLLOUTS_MIN", 1)


@mutation(seed=201)
def a_batch_that_nobody_waited_for_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.next_batch

    async def next_batch(self: Scheduler) -> ev.HandOver | None:
        self._undelivered.clear()
        return await right(self)

    patch.setattr(Scheduler, "next_batch", next_batch)


@mutation(seed=9)
def a_task_that_was_looked_at_is_lost_with_the_next_offer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TaskSource, "goes_on_with", lambda self, tasks: False)


# ---------------------------------------------------------------- turns


@mutation(seed=1)
def a_lost_engines_turns_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def leave(self: TurnBook, engine: str) -> list[ev.Command]:
        self.engines.pop(engine, None)
        self._raise_live_version()
        return []

    patch.setattr(TurnBook, "leave", leave)


@mutation(seed=165)
def turns_sent_before_a_reconnect_are_believed_to_have_arrived(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook.join

    def join(self: TurnBook, event: ev.EngineJoined) -> list[ev.Command]:
        known = self.engines.get(event.engine)
        if known is not None and known.epoch == event.epoch:
            return self.swap(event.engine, event.weight_version)
        return right(self, event)

    patch.setattr(TurnBook, "join", join)


@mutation(seed=22)
def an_aborted_turn_is_taken_for_finished(patch: pytest.MonkeyPatch) -> None:
    def finish(self: TurnBook, submission: Submission, code: int) -> list[ev.Command]:
        submission.turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return [ev.EndTurn(submission.turn)]

    patch.setattr(TurnBook, "_finish", finish)


@mutation(seed=6)
def a_late_joiner_with_old_weights_gets_turns(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook.submit

    def submit(self: TurnBook, turn: Turn, priority: int) -> list[ev.Command]:
        live, self.live_version = self.live_version, 0
        commands = right(self, turn, priority)
        self.live_version = live
        return commands

    patch.setattr(TurnBook, "submit", submit)


@mutation(seed=1)
def a_turn_sent_again_counts_its_tokens_from_0(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook.submit

    def submit(self: TurnBook, turn: Turn, priority: int) -> list[ev.Command]:
        commands = right(self, turn, priority)
        for command in commands:
            if isinstance(command, ev.Submit):
                submissions = self.engines[command.engine].submissions
                submissions[command.message.turn].sampled_before = 0
        return commands

    patch.setattr(TurnBook, "submit", submit)


@mutation(seed=0)
def tokens_are_tagged_with_the_version_at_their_arrival(patch: pytest.MonkeyPatch) -> None:
    right = Core._on_step

    def on_step(self: Core, event: ev.StepArrived) -> list[ev.Command]:
        fields = {name: getattr(event, name) for name in ev.StepArrived.__slots__}
        return right(self, ev.StepArrived(**(fields | {"version": self.trainer_version})))

    patch.setattr(Core, "_on_step", on_step)


@mutation(seed=22)
def an_abort_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook._finish

    def finish(self: TurnBook, submission: Submission, code: int) -> list[ev.Command]:
        return [] if code == ABORT else right(self, submission, code)

    patch.setattr(TurnBook, "_finish", finish)


@mutation(seed=0)
def a_turn_given_up_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnBook, "cancel", lambda self, rollout: [])


@mutation(seed=32)
def kv_computed_again_is_taken_for_the_old(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook._file_prefill

    def file_prefill(submission: Submission | None, prefill: Prefill) -> None:
        if prefill.at == 0:
            right(submission, prefill)

    patch.setattr(TurnBook, "_file_prefill", staticmethod(file_prefill))


@mutation(seed=0)
def the_rows_of_a_step_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    right = filing._file_each

    def file_each(rows: list[Submission], event: ev.StepArrived, tokens_each: int) -> StepOutcome:
        return right(rows[::-1], event, tokens_each)

    patch.setattr(filing, "_file_each", file_each)


@mutation(seed=32)
def steps_of_two_versions_are_taken_for_steps_of_one(patch: pytest.MonkeyPatch) -> None:
    right = SteadySteps.takes

    def takes(
        self: SteadySteps,
        step: ev.StepArrived,
        tokens_each: int,
        submissions: dict[int, Submission],
    ) -> bool:
        self._version = step.version
        return right(self, step, tokens_each, submissions)

    patch.setattr(SteadySteps, "takes", takes)


# ---------------------------------------------------------------- streams


@mutation(seed=0)
def a_step_counts_as_received_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    def hear_step(self: Fleet, name: str, engine: Engine, step: Step, heard: Heard) -> None:
        verdict = engine.window.accept(engine.hello.epoch, step.seq)
        if (seq := engine.window.acknowledgement()) is not None:
            self.send(name, Ack(seq=seq))
        if verdict is Verdict.NEW:
            heard.append(step_arrived(name, step, engine.hello.epoch))

    patch.setattr(Fleet, "_hear_step", hear_step)


@mutation(seed=9)
def a_replayed_step_is_taken_in_twice(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> Verdict:
        verdict = right(self, epoch, seq)
        return Verdict.NEW if verdict is Verdict.DUPLICATE else verdict

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=9)
def a_gap_in_a_stream_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> Verdict:
        if right(self, epoch, seq) is not Verdict.GAP:
            return Verdict.DUPLICATE if seq < self._next_seq - 1 else Verdict.NEW
        self._next_seq = seq + 1
        return Verdict.NEW

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=9)
def a_gap_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> Verdict:
        verdict = right(self, epoch, seq)
        if verdict is Verdict.GAP:
            patch.setattr(self, "acknowledgement", lambda: seq)
        return verdict

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=0)
def credit_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "take_acks", lambda self: [])


@mutation(seed=69)
def a_stream_begins_anew_with_each_reconnect(patch: pytest.MonkeyPatch) -> None:
    right = Fleet._welcome

    def welcome(self: Fleet, peer: bytes, hello: Hello, now_s: float, heard: Heard) -> None:
        self._given_up.clear()
        self.engines.pop(hello.engine, None)
        right(self, peer, msgspec.structs.replace(hello, first_seq=0), now_s, heard)

    patch.setattr(Fleet, "_welcome", welcome)


# ---------------------------------------------------------------- weights


@mutation(seed=9)
def a_late_joiner_gets_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "catch_up", lambda self: [])


@mutation(seed=1)
def a_lost_engine_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "left", lambda self, engine: None)


@mutation(seed=80)
def weights_that_late_joiners_need_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "kept_version", None)


@mutation(seed=18)
def a_withdrawn_version_is_swapped_in_all_the_same(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.withdraw

    def withdraw(self: WeightCoordinator) -> None:
        right(self)
        if self.update is not None:
            self.update.is_released, self.update.is_withdrawn = True, False

    patch.setattr(WeightCoordinator, "withdraw", withdraw)


@mutation(seed=13)
def engines_swap_before_every_engine_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.publish

    def publish(self: WeightCoordinator, version: int, chunks: list[UpdateWeights]) -> Outgoing:
        outgoing = right(self, version, chunks)
        assert self.update is not None
        self.update.is_released = True
        return outgoing

    patch.setattr(WeightCoordinator, "publish", publish)


@mutation(seed=122)
def refused_weights_are_published_all_the_same(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.refused

    def refused(self: WeightCoordinator, engine: str, version: int, message: str) -> bool:
        is_lost = right(self, engine, version, message)
        for update in self._updates:
            update.refusals.clear()
        return is_lost

    patch.setattr(WeightCoordinator, "refused", refused)


@mutation(seed=52)
def a_failed_version_gives_its_number_to_nobody(patch: pytest.MonkeyPatch) -> None:
    right = Publisher.publish

    async def publish(self: Publisher, version: int, chunks: list[UpdateWeights]) -> None:
        try:
            await right(self, version, chunks)
        except WeightsRefused:
            self._shell.handle([ev.VersionPublished(version)])
            raise

    patch.setattr(Publisher, "publish", publish)


@mutation(seed=2)
def an_engine_is_told_to_swap_before_it_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.publish

    def publish(self: WeightCoordinator, version: int, chunks: list[UpdateWeights]) -> Outgoing:
        outgoing = right(self, version, chunks)
        update = self.update
        assert update is not None
        update.is_released, update.staged, update.staging = True, update.staging, set()
        return [*outgoing, *self.swaps()]

    patch.setattr(WeightCoordinator, "publish", publish)
