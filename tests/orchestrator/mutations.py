"""Bugs that were made before, by us or by others: planted to see whether the simulation notices.

Each changes one decision of the real orchestrator, as a wrong line in its code would.
"""

from collections import deque
from collections.abc import Callable

import pytest

from tidegate.orchestrator import events as ev
from tidegate.orchestrator.core import Core
from tidegate.orchestrator.fleet import Engine, Fleet, Heard, step_arrived
from tidegate.orchestrator.rollout import Group, Turn
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.turns import Submission, TurnBook
from tidegate.orchestrator.weights import Outgoing, WeightCoordinator, WeightUpdate
from tidegate.policies.staleness import BoundedStaleness
from tidegate.transport.messages import FINISH_REASONS, LENGTH, STOP, Ack, Step, UpdateWeights
from tidegate.transport.streams import ReceiveWindow, Verdict

Plant = Callable[[pytest.MonkeyPatch], None]

MUTATIONS: dict[str, Plant] = {}
"""Name -> what plants the bug."""


def mutation(plant: Plant) -> Plant:
    """List a planted bug under its name."""
    MUTATIONS[plant.__name__] = plant
    return plant


# ---------------------------------------------------------------- admission and consumption


@mutation
def one_group_too_many_is_admitted(patch: pytest.MonkeyPatch) -> None:
    def outstanding(self: BoundedStaleness) -> int:
        return (self.max_staleness + 1) * self.groups_per_batch + 1

    patch.setattr(BoundedStaleness, "outstanding_groups_max", property(outstanding))


@mutation
def groups_in_training_are_not_outstanding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "outstanding_groups", property(lambda self: len(self._groups)))


@mutation
def places_are_free_before_the_version_is_live(patch: pytest.MonkeyPatch) -> None:
    def release(self: Core, commands: list[ev.Command]) -> list[ev.Command]:
        while self._training and self._training[0][0] is not None:
            self._training.popleft()
        return commands + self._hand_over()

    patch.setattr(Core, "_release", release)


@mutation
def places_are_free_once_the_first_engine_is_live(patch: pytest.MonkeyPatch) -> None:
    def raise_live_version(self: TurnBook) -> None:
        newest = max((engine.weight_version for engine in self.engines.values()), default=0)
        self.live_version = max(self.live_version, newest)

    patch.setattr(TurnBook, "_raise_live_version", raise_live_version)


@mutation
def groups_are_trained_in_the_order_of_completion(patch: pytest.MonkeyPatch) -> None:
    right = Core._finished_head

    def finished_head(self: Core) -> list[Group] | None:
        self._groups = deque(sorted(self._groups, key=lambda group: group.running > 0))
        return right(self)

    patch.setattr(Core, "_finished_head", finished_head)


@mutation
def a_batch_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = Core._train

    def train(self: Core, head: list[Group]) -> list[ev.Command]:
        commands = right(self, head)
        if head and self.trained.batches == 2:
            self._groups.appendleft(head[-1])
            self.ledger.trained -= sum(r.sampled_tokens for r in head[-1].kept)
            self.ledger.buffered += sum(r.sampled_tokens for r in head[-1].kept)
        return commands

    patch.setattr(Core, "_train", train)


@mutation
def a_dropped_group_keeps_its_tokens_buffered(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Core, group: Group, reason: str) -> list[ev.Command]:
        self._groups.remove(group)
        return [self._discard(rollout, group, reason) for rollout in group.kept]

    patch.setattr(Core, "_drop", drop)


# ---------------------------------------------------------------- turns


@mutation
def a_lost_engines_turns_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def leave(self: TurnBook, engine: str) -> list[ev.Command]:
        self.engines.pop(engine, None)
        self._raise_live_version()
        return []

    patch.setattr(TurnBook, "leave", leave)


@mutation
def turns_sent_before_a_reconnect_are_believed_to_have_arrived(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook.join

    def join(self: TurnBook, engine: str, version: int, slots: int) -> list[ev.Command]:
        if engine in self.engines:
            return self.swap(engine, version)
        return right(self, engine, version, slots)

    patch.setattr(TurnBook, "join", join)


@mutation
def an_aborted_turn_is_taken_for_finished(patch: pytest.MonkeyPatch) -> None:
    def finish(self: TurnBook, submission: Submission, code: int) -> list[ev.Command]:
        submission.turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return [ev.EndTurn(submission.turn)]

    patch.setattr(TurnBook, "_finish", finish)


@mutation
def a_late_joiner_with_old_weights_gets_turns(patch: pytest.MonkeyPatch) -> None:
    right = TurnBook.submit

    def submit(self: TurnBook, turn: Turn, priority: int) -> list[ev.Command]:
        live, self.live_version = self.live_version, 0
        commands = right(self, turn, priority)
        self.live_version = live
        return commands

    patch.setattr(TurnBook, "submit", submit)


@mutation
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


@mutation
def tokens_are_tagged_with_the_version_at_their_arrival(patch: pytest.MonkeyPatch) -> None:
    right = Core._on_step

    def on_step(self: Core, event: ev.StepArrived) -> list[ev.Command]:
        fields = {name: getattr(event, name) for name in ev.StepArrived.__slots__}
        return right(self, ev.StepArrived(**(fields | {"version": self.trainer_version})))

    patch.setattr(Core, "_on_step", on_step)


# ---------------------------------------------------------------- streams


@mutation
def a_step_counts_as_received_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    def hear_step(self: Fleet, name: str, engine: Engine, step: Step, heard: Heard) -> None:
        verdict = engine.window.accept(engine.hello.epoch, step.seq)
        if (seq := engine.window.acknowledgement()) is not None:
            self.send(name, Ack(seq=seq))
        if verdict is Verdict.NEW:
            heard.append(step_arrived(name, step))

    patch.setattr(Fleet, "_hear_step", hear_step)


@mutation
def a_replayed_step_is_taken_in_twice(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> Verdict:
        verdict = right(self, epoch, seq)
        return Verdict.NEW if verdict is Verdict.DUPLICATE else verdict

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation
def a_gap_in_a_stream_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> Verdict:
        if right(self, epoch, seq) is not Verdict.GAP:
            return Verdict.DUPLICATE if seq < self._next_seq - 1 else Verdict.NEW
        self._next_seq = seq + 1
        return Verdict.NEW

    patch.setattr(ReceiveWindow, "accept", accept)


# ---------------------------------------------------------------- weights


@mutation
def a_late_joiner_gets_no_weights(patch: pytest.MonkeyPatch) -> None:
    def joined(self: WeightCoordinator, engine: str, version: int) -> Outgoing:
        self.left(engine)
        self._live[engine] = version
        return [(engine, self._init)]

    patch.setattr(WeightCoordinator, "joined", joined)


@mutation
def a_lost_engine_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "left", lambda self, engine: None)


@mutation
def weights_are_overwritten_while_engines_copy_them(patch: pytest.MonkeyPatch) -> None:
    async def reserve_version(self: Scheduler) -> int:
        return self.core.trainer_version + 1

    patch.setattr(Scheduler, "reserve_version", reserve_version)


@mutation
def who_joins_while_weights_are_written_copies_them(patch: pytest.MonkeyPatch) -> None:
    def never(self: WeightCoordinator) -> bool:
        return False

    def ignore(self: WeightCoordinator, value: bool) -> None:
        """Forget it."""

    patch.setattr(WeightCoordinator, "is_reserved", property(never, ignore), raising=False)


@mutation
def an_engine_is_told_to_swap_before_it_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.publish

    def publish(self: WeightCoordinator, version: int, chunks: list[UpdateWeights]) -> Outgoing:
        outgoing = right(self, version, chunks)
        update = self.update
        assert isinstance(update, WeightUpdate)
        update.is_released = True
        return [*outgoing, *(m for e in sorted(update.staging) for m in self._swap(e))]

    patch.setattr(WeightCoordinator, "publish", publish)
