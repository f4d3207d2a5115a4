"""Bugs in streams and weights; see :mod:`mutations`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.simulation.mutations import MUTATIONS, mutation
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import provenance, rollout
from tidegate.orchestrator.core.control_events import PublishWait
from tidegate.orchestrator.core.control_state import ControlledEngine
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionRun, VersionSpan
from tidegate.orchestrator.core.step_checks import step_arrived
from tidegate.orchestrator.core.target_versions import WeightUpdate
from tidegate.orchestrator.core.weight_content import Change, replace_all
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.fleet import Fleet, Received
from tidegate.orchestrator.weight_sync.control import EngineControl
from tidegate.transport.messages import Ack, Hello, Step, UpdateWeights
from tidegate.transport.streams import ReceiveWindow, StepAcceptance

__all__ = ["MUTATIONS"]

# ---------------------------------------------------------------- streams


@mutation(seed=0)
def a_step_counts_as_received_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    def receive_step(
        self: Fleet, name: str, engine: Engine, step: Step, received: Received
    ) -> None:
        verdict = engine.window.accept(engine.hello.epoch, step.seq)
        if (seq := engine.window.acknowledgement()) is not None:
            self.send(name, Ack(seq=seq))
        if verdict is StepAcceptance.NEW:
            received.append(step_arrived(name, step, engine.hello.epoch))

    patch.setattr(Fleet, "_receive_step", receive_step)


@mutation(seed=1)
def a_replayed_step_is_taken_in_twice(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> StepAcceptance:
        verdict = right(self, epoch, seq)
        return StepAcceptance.NEW if verdict is StepAcceptance.DUPLICATE else verdict

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=9)
def a_gap_in_a_stream_is_ignored(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> StepAcceptance:
        if right(self, epoch, seq) is not StepAcceptance.GAP:
            return StepAcceptance.DUPLICATE if seq < self._next_seq - 1 else StepAcceptance.NEW
        self._next_seq = seq + 1
        return StepAcceptance.NEW

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=147)
def a_gap_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    right = ReceiveWindow.accept

    def accept(self: ReceiveWindow, epoch: int, seq: int) -> StepAcceptance:
        verdict = right(self, epoch, seq)
        if verdict is StepAcceptance.GAP:
            patch.setattr(self, "acknowledgement", lambda: seq)
        return verdict

    patch.setattr(ReceiveWindow, "accept", accept)


@mutation(seed=0)
def credit_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "take_acks", lambda self: [])


@mutation(seed=69)
def a_stream_begins_anew_with_each_reconnect(patch: pytest.MonkeyPatch) -> None:
    right = Fleet._welcome

    def welcome(self: Fleet, peer: bytes, hello: Hello, now_s: float, received: Received) -> None:
        self._given_up.clear()
        self.engines.pop(hello.engine, None)
        right(self, peer, msgspec.structs.replace(hello, first_seq=0), now_s, received)

    patch.setattr(Fleet, "_welcome", welcome)


# ---------------------------------------------------------------- weights


@mutation(seed=9)
def a_late_joiner_gets_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "catch_up", lambda self, engine=None: None)


@mutation(seed=9)
def a_lost_engine_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    def remove(self: WeightControl, engine: str) -> None:
        self.shared.engines.pop(engine, None)
        self.pauses.remove(engine)

    patch.setattr(WeightControl, "_remove", remove)


@mutation(seed=104)
def weights_that_late_joiners_need_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "kept_buffers", frozenset())


@mutation(seed=9)
def a_withdrawn_version_is_swapped_in_all_the_same(patch: pytest.MonkeyPatch) -> None:
    right = WeightVersions._withdraw

    def withdraw(self: WeightVersions) -> None:
        right(self)
        if self.update is not None:
            self.update.is_released, self.update.is_withdrawn = True, False
            self.update.is_durable = True

    patch.setattr(WeightVersions, "_withdraw", withdraw)


@mutation(seed=0)
def engines_swap_before_every_engine_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightVersions._stage

    def stage(self: WeightVersions, engines: Iterable[str], update: WeightUpdate) -> None:
        update.is_released = update.is_durable = True
        right(self, engines, update)

    patch.setattr(WeightVersions, "_stage", stage)


@mutation(seed=13)
def refused_weights_are_published_all_the_same(patch: pytest.MonkeyPatch) -> None:
    def on_refused(self: WeightVersions, engine: str, version: int, why: str) -> bool:
        if (update := self.update_of(version)) is not None:
            update.remove(engine)
            self._state.engines[engine].version = version  # so it is not asked again
        return False

    patch.setattr(WeightVersions, "on_refused", on_refused)


@mutation(seed=20)
def a_failed_version_reserves_its_number_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = EngineControl.publish

    async def publish(
        self: EngineControl,
        version: int,
        chunks: list[UpdateWeights],
        wait: PublishWait = "live",
        change: Change = replace_all,
        **of_adapter: Any,
    ) -> None:
        try:
            await right(self, version, chunks, wait, change, **of_adapter)
        except WeightsRefused:
            self._run.handle(ev.VersionPublished(version))
            raise

    patch.setattr(EngineControl, "publish", publish)


@mutation(seed=2)
def an_engine_is_sent_finish_before_it_has_staged(patch: pytest.MonkeyPatch) -> None:
    right = WeightVersions._stage

    def stage(self: WeightVersions, engines: Iterable[str], update: WeightUpdate) -> None:
        right(self, engines, update)
        update.is_released = update.is_durable = True
        update.staged |= update.staging
        update.staging.clear()

    patch.setattr(WeightVersions, "_stage", stage)


@mutation(seed=1043)
def an_answer_to_an_earlier_start_of_a_version_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlledEngine, "is_outdated", lambda self, version: False)


@mutation(seed=158)
def the_kv_of_a_turn_that_moves_is_taken_from_its_former_engine(patch: pytest.MonkeyPatch) -> None:
    right = provenance.spans_of

    def spans_of(
        runs: Sequence[VersionRun], prefills: Sequence[TurnPrefill], length: int
    ) -> Iterator[VersionSpan]:
        kv: KvRange | None = None
        for span in right(runs, prefills, length):
            if span.kv is None and kv is not None:
                kv = KvRange(min(kv.oldest, span.version), max(kv.newest, span.version))
                yield replace(span, kv=kv)
            else:
                kv = span.kv
                yield span

    patch.setattr(rollout, "spans_of", spans_of)
