"""Bugs in streams and weights; see :mod:`mutations`."""

import msgspec
import pytest

from tests.orchestrator.mutations import MUTATIONS, mutation
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.fleet import Fleet, Heard
from tidegate.orchestrator.turns.step_checks import step_arrived
from tidegate.orchestrator.weights.content import Change, anew
from tidegate.orchestrator.weights.publishing import Publisher, PublishWait
from tidegate.orchestrator.weights.weights import Outgoing, WeightCoordinator
from tidegate.transport.messages import Ack, Hello, Step, UpdateWeights
from tidegate.transport.streams import ReceiveWindow, Verdict

__all__ = ["MUTATIONS"]

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


@mutation(seed=90)
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


@mutation(seed=9)
def a_lost_engine_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "left", lambda self, engine: None)


@mutation(seed=104)
def weights_that_late_joiners_need_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightCoordinator, "kept_version", None)


@mutation(seed=19)
def a_withdrawn_version_is_swapped_in_all_the_same(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.withdraw

    def withdraw(self: WeightCoordinator) -> None:
        right(self)
        if self.update is not None:
            self.update.is_released, self.update.is_withdrawn = True, False

    patch.setattr(WeightCoordinator, "withdraw", withdraw)


@mutation(seed=3)
def engines_swap_before_every_engine_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.publish

    def publish(
        self: WeightCoordinator, version: int, chunks: list[UpdateWeights], change: Change
    ) -> Outgoing:
        outgoing = right(self, version, chunks, change)
        assert self.update is not None
        self.update.is_released = True
        return outgoing

    patch.setattr(WeightCoordinator, "publish", publish)


@mutation(seed=122)
def refused_weights_are_published_all_the_same(patch: pytest.MonkeyPatch) -> None:
    def refused(self: WeightCoordinator, engine: str, version: int, message: str) -> bool:
        if (update := self._update(version)) is not None:
            update.strike(engine)
            self._live[engine] = version  # so it is not asked again
        return False

    patch.setattr(WeightCoordinator, "refused", refused)


@mutation(seed=122)
def a_failed_version_gives_its_number_to_nobody(patch: pytest.MonkeyPatch) -> None:
    right = Publisher.publish

    async def publish(
        self: Publisher,
        version: int,
        chunks: list[UpdateWeights],
        wait: PublishWait = "live",
        change: Change = anew,
    ) -> None:
        try:
            await right(self, version, chunks, wait, change)
        except WeightsRefused:
            self._shell.handle([ev.VersionPublished(version)])
            raise

    patch.setattr(Publisher, "publish", publish)


@mutation(seed=2)
def an_engine_is_told_to_swap_before_it_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightCoordinator.publish

    def publish(
        self: WeightCoordinator, version: int, chunks: list[UpdateWeights], change: Change
    ) -> Outgoing:
        outgoing = right(self, version, chunks, change)
        update = self.update
        assert update is not None
        update.is_released, update.staged, update.staging = True, update.staging, set()
        return [*outgoing, *self.swaps()]

    patch.setattr(WeightCoordinator, "publish", publish)
