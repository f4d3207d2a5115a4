"""Planted bugs, made before by us or by others, with which the simulation's strength is tested.

Each changes one decision of the real orchestrator, as a wrong line in its code would. The seed of
each is the first that finds it, as of the last search.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import pytest

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.batches.tasks import TaskSource
from tidegate.orchestrator.core import core, filing, groups, hand_over, provenance, rollout
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.control_state import ControlledEngine
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.filing import StepCoalescer
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.hand_over import HandedBatch, HandOvers, TrainedCounts
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.provenance import KvRange, VersionSpan
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.step_checks import step_arrived
from tidegate.orchestrator.core.target_versions import WeightUpdate
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.orchestrator.core.weight_content import WeightContent
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.orchestrator.episodes import episode, runner
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.runner import EpisodeRunner
from tidegate.orchestrator.fleet.drains import Drains
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.fleet import Fleet, Received
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest, BatchRequests
from tidegate.orchestrator.scheduler.outbox import Outbox
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.orchestrator.weight_sync.control import EngineControl
from tidegate.policies import asynchrony, consumption
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling
from tidegate.simulation.run.simulation import RunReport
from tidegate.transport.messages import FINISH_REASONS, LENGTH, STOP, Ack, Hello, Prefill, Step
from tidegate.transport.streams import ReceiveWindow, StepAcceptance

Plant = Callable[[pytest.MonkeyPatch], None]
Right = Callable[..., Any]
"""The function that a planted bug stands in for."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A planted bug, and a seed that catches it."""

    plant: Plant
    seed: int


class Mutations(dict[str, Mutation]):
    """Planted bugs by name: the names of the functions decorated with :meth:`plant` and
    :meth:`instead_of`."""

    def plant(self, *, seed: int = 0) -> Callable[[Plant], Plant]:
        """Decorate a function that plants a bug."""

        def listed(plant: Plant) -> Plant:
            self[plant.__name__] = Mutation(plant, seed)
            return plant

        return listed

    def instead_of(
        self, owner: type | object, name: str, *, seed: int = 0
    ) -> Callable[[Right], Plant]:
        """Decorate the wrong version of a function, method or property.

        Its first argument is the right version (None for a property), the others are those of a
        call.
        """

        def listed(wrong: Right) -> Plant:
            def plant(patch: pytest.MonkeyPatch) -> None:
                found = inspect.getattr_static(owner, name)
                is_property = isinstance(found, property | cached_property)
                right = None if is_property else getattr(owner, name)

                def call_wrong(*arguments: Any, **options: Any) -> Any:
                    return wrong(right, *arguments, **options)

                replaced: object = property(call_wrong) if is_property else call_wrong
                is_static = isinstance(found, staticmethod)
                patch.setattr(owner, name, staticmethod(call_wrong) if is_static else replaced)

            plant.__name__ = wrong.__name__
            return self.plant(seed=seed)(plant)

        return listed

    def is_caught(
        self, name: str, patch: pytest.MonkeyPatch, simulate: Callable[[int], RunReport], seeds: int
    ) -> bool:
        """Plant a bug; return whether its seed, or another of the first ``seeds``, fails."""
        mutation = self[name]
        mutation.plant(patch)
        return any(simulate(seed).failure for seed in (mutation.seed, *range(seeds)))


MUTATIONS = Mutations()
mutation, instead_of = MUTATIONS.plant, MUTATIONS.instead_of


# ---------------------------------------------------------------- admission and consumption


@instead_of(BoundedStaleness, "outstanding_groups_max", seed=2)
def one_group_too_many_is_admitted(_: Right, self: BoundedStaleness) -> int:
    return (self.max_staleness + 1) * self.groups_per_batch + 1


@instead_of(BoundedStaleness, "admit", seed=2)
def groups_in_training_are_not_outstanding(right: Right, *of: Any, training_groups: int) -> Any:
    return right(*of, training_groups=0)


@instead_of(Core, "_release", seed=8)
def places_are_free_before_the_version_is_live(
    _: Right, self: Core, commands: list[ev.Command]
) -> list[ev.Command]:
    self.handed.release(self.trainer_version)
    return commands + self._hand_over()


@instead_of(TurnTracker, "_raise_live_version", seed=8)
def places_are_free_once_the_first_engine_is_live(_: Right, self: TurnTracker) -> None:
    newest = max((engine.weight_version for engine in self.engines.values()), default=0)
    self.live_version = max(self.live_version, newest)


@mutation(seed=0)
def groups_are_trained_in_the_order_of_completion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(asynchrony, "in_admission_order", consumption.in_completion_order)


@instead_of(asynchrony, "by_deadline", seed=1422)
def a_group_overtakes_one_that_has_no_time_left(
    _: Right, waiting: GroupTracker, groups: int, **times: int
) -> list[Group] | None:
    return consumption.in_completion_order(waiting, groups)


@instead_of(asynchrony, "in_window", seed=48)
def a_window_is_one_group_too_wide(
    right: Right, waiting: GroupTracker, groups: int, window: Window
) -> Any:
    return right(waiting, groups, Window(window.groups + 1))


@mutation(seed=45)
def masked_tokens_count_as_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollout, "masked_tokens", property(lambda self: 0))


@instead_of(Ledger, "discard_trained", seed=1)
def rows_that_the_trainer_discarded_stay_trained(
    right: Right, self: Ledger, tokens: int, reason: str
) -> None:
    if reason == groups.TOO_OLD:
        right(self, tokens, reason)


@mutation(seed=30)
def a_rollout_is_discarded_with_the_first_of_its_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hand_over, "_is_trained", lambda root: root.discard_reason is None)


@instead_of(BoundedStaleness, "oldest_trainable", seed=2)
def tokens_are_masked_one_version_too_late(
    right: Right, self: BoundedStaleness, trainer_version: int
) -> Any:
    return right(self, trainer_version - self.masks_old_tokens)


@instead_of(OneStepOffPolicy, "allowed_groups", seed=12)
def a_pipeline_of_one_step_starts_a_batch_early(_: Right, self: OneStepOffPolicy) -> int:
    return 3 * self.groups_per_batch


@instead_of(Core, "_train", seed=0)
def a_batch_is_trained_twice(right: Right, self: Core, head: list[Group]) -> Any:
    commands = right(self, head)
    if head and self.trained.batches == 2:
        self.groups.return_to_buffer([head[-1]])
    return commands


@instead_of(GroupTracker, "drop", seed=0)
def a_dropped_group_keeps_its_tokens_buffered(
    _: Right, self: GroupTracker, group: Group, reason: str
) -> list[ev.Command]:
    self._remove(group)
    return [self._discard(rollout, group, reason) for rollout in group.kept]


@instead_of(BoundedStaleness, "oldest_trainable", seed=1)
def a_group_that_is_just_fresh_enough_is_dropped(right: Right, *of: Any) -> Any:
    return right(*of) + 1


@mutation(seed=29)
def age_is_not_checked_when_a_batch_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "oldest_trainable", lambda self, trainer_version: 0)


@mutation(seed=0)
def a_group_with_one_rollout_left_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups, "KEPT_ROLLOUTS_MIN", 1)


@instead_of(BatchRequests, "close", seed=1)
def a_batch_whose_request_was_cancelled_is_lost(
    _: Right, self: BatchRequests, request: BatchRequest
) -> None:
    request.close()
    if self._open.pop(request.number, None) is not None:
        self._handle(ev.BatchRequestCancelled(request.number))
        self._handle(ev.BatchTaken(request.number))


@instead_of(Core, "_undo_hand_over", seed=563)
def the_request_of_a_withdrawn_offer_is_forgotten(
    right: Right, self: Core, event: ev.BatchReturned
) -> Any:
    return right(self, ev.BatchReturned(event.number))


@mutation(seed=8)
def batches_that_the_trainer_holds_count_no_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "consumption_version", property(lambda self: self.trainer_version))


@instead_of(HandOvers, "name", seed=19)
def a_publish_names_a_batch_that_it_was_not_told(
    right: Right, self: HandOvers, numbers: Sequence[int], trainer_version: int
) -> Any:
    held = [batch.number for batch in self.held]
    return right(self, held if numbers else (), trainer_version)


@instead_of(TrainerSide, "batches_of_publish", seed=122)
def a_publish_that_names_none_names_the_oldest_batch(
    right: Right, self: TrainerSide, batches: Sequence[int] | None
) -> Any:
    held = tuple(batch.number for batch in self.core.handed.held[:1])
    return right(self, held if batches == () else batches)


@instead_of(HandOvers, "publish", seed=19)
def a_version_contains_batches_that_no_publish_has_named(
    right: Right, self: HandOvers, version: int
) -> None:
    for batch in self.holding:
        batch.version = batch.version or version
    right(self, version)


@instead_of(HandOvers, "name", seed=8)
def a_named_batch_keeps_its_planned_age(right: Right, *of: Any) -> list[HandedBatch]:
    right(*of)
    return []


@instead_of(HandOvers, "lose", seed=122)
def a_lost_batch_keeps_its_places_in_admission(
    right: Right, self: HandOvers, batch: HandedBatch, reason: str
) -> None:
    right(self, batch, reason)
    batch.groups = []
    batch.is_trained = True
    self.holding.appendleft(batch)


@mutation(seed=122)
def held_batches_get_too_old_with_a_publish_that_names_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "too_old", lambda self, trainer_version, bound: [])


@mutation(seed=518)
def held_batches_of_bad_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandedBatch, "newest_version", property(lambda self: -1))


@instead_of(Core, "_groups_counted_for", seed=785)
def a_short_batch_holds_no_more_places_than_it_has_groups(
    _: Right, self: Core, batch: list[Group]
) -> int:
    return sum(group.split_from is None for group in batch)


@instead_of(GroupTracker, "split", seed=45)
def the_remainder_of_a_split_group_is_taken_for_young(
    right: Right, self: GroupTracker, group: Group
) -> Any:
    part = right(self, group)
    self._raise_oldest_possible_version(group, self._versions.live_version)
    group.oldest_possible_version = self._versions.live_version
    return part


@instead_of(GroupTracker, "_fork", seed=999)
def a_branch_loses_its_pin(right: Right, *of: Any) -> Any:
    commands = right(*of)
    for command in commands:
        if isinstance(command, ev.StartBranch):
            command.rollout.pinned_version = None
    return commands


@mutation(seed=39)
def late_tokens_of_evaluations_are_trainings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(filing, "EVALUATION_HANDLES_FROM", 1 << 32)


@mutation(seed=9)
def a_task_that_was_read_ahead_is_lost_with_the_next_offer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TaskSource, "inherit", lambda self, before, next_key: None)
    patch.setattr(TaskSource, "reads_from", lambda self, tasks: False)


@mutation(seed=9)
def episodes_of_a_group_that_is_given_up_continue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EpisodeRunner, "stop", lambda self, rollout: None)


@mutation(seed=9)
def a_group_that_teaches_nothing_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicSampling, "reject", lambda self, rewards, *, running: None)


# ---------------------------------------------------------------- groups trained more than once


@mutation(seed=9)
def a_group_is_used_again_when_it_is_a_version_too_old(patch: pytest.MonkeyPatch) -> None:
    right = BoundedStaleness.refill

    def refill(
        self: BoundedStaleness,
        waiting: GroupTracker,
        used: Collection[Group],
        *,
        groups: int,
        trainer_version: int,
    ) -> list[Group] | None:
        return right(self, waiting, used, groups=groups, trainer_version=trainer_version - 1)

    patch.setattr(BoundedStaleness, "refill", refill)
    patch.setattr(Core, "_forget_old_used", lambda self: None)


@instead_of(HandOvers, "_keep_used", seed=8)
def a_group_is_used_once_too_often(right: Right, self: HandOvers, batch: HandedBatch) -> None:
    is_reusing = self._max_uses > 1
    self._max_uses += is_reusing
    right(self, batch)
    self._max_uses -= is_reusing


@mutation(seed=926)
def used_groups_make_outstanding_ones_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "_can_wait", lambda self, waiting, trained, version: True)


@instead_of(core, "discard_rows", seed=44)
def a_row_discarded_from_another_use_is_trained_no_longer(
    right: Right, batch: HandedBatch, *how: Any
) -> None:
    again = [row for row in batch.rows if row.use > 1]
    for row in again:
        row.use = 1
    right(batch, *how)
    for row in again:
        row.use = 2


@instead_of(TrainedCounts, "count", seed=8)
def further_uses_are_counted_as_first_ones(
    right: Right, self: TrainedCounts, rows: list[Rollout], trainer_version: int, times: int
) -> None:
    right(self, rows, trainer_version, times)
    self.rollouts += times * sum(row.use > 1 and row.branch_of is None for row in rows)


@instead_of(HandOvers, "add", seed=9)
def a_used_group_is_kept_before_its_version_is_released(
    right: Right, self: HandOvers, *of: Any, num_groups: int
) -> Any:
    batch = right(self, *of, num_groups=num_groups)
    self._keep_used(batch)
    return batch


@mutation(seed=270)
def used_groups_of_bad_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "forget_sampled_by", lambda self, version: None)


# ---------------------------------------------------------------- turns


@instead_of(TurnTracker, "leave", seed=1)
def a_lost_engines_turns_are_forgotten(
    _: Right, self: TurnTracker, engine: str, *, is_crash: bool
) -> list[ev.Command]:
    self.engines.pop(engine, None)
    self._raise_live_version()
    return []


@instead_of(TurnTracker, "join", seed=121)
def turns_sent_before_a_reconnect_are_assumed_to_have_arrived(
    right: Right, self: TurnTracker, event: ev.EngineJoined
) -> Any:
    known = self.engines.get(event.engine)
    if known is not None and known.epoch == event.epoch:
        return self.swap(event.engine, event.weight_version)
    return right(self, event)


@instead_of(TurnTracker, "_finish", seed=17)
def an_aborted_turn_is_taken_for_finished(_: Right, turn: Turn, code: int) -> bool:
    turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
    return True


@instead_of(TurnTracker, "submit", seed=6)
def a_late_joiner_with_old_weights_gets_turns(right: Right, self: TurnTracker, *of: Any) -> Any:
    live, self.live_version = self.live_version, 0
    commands = right(self, *of)
    self.live_version = live
    return commands


@instead_of(TurnTracker, "submit", seed=20)
def a_turn_sent_again_counts_its_tokens_from_0(right: Right, self: TurnTracker, *of: Any) -> Any:
    commands = right(self, *of)
    for command in commands:
        if isinstance(command, ev.Submit):
            submissions = self.engines[command.engine].submissions
            submissions[command.message.turn].sampled_before = 0
    return commands


@instead_of(Core, "_on_step", seed=9)
def tokens_are_tagged_with_the_version_at_their_arrival(
    right: Right, self: Core, event: ev.StepArrived
) -> Any:
    fields = {name: getattr(event, name) for name in ev.StepArrived.__struct_fields__}
    return right(self, ev.StepArrived(**(fields | {"version": self.trainer_version})))


@mutation(seed=17)
def an_abort_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "_continue_turn", lambda self, turn: [])


@mutation(seed=0)
def a_turn_given_up_continues(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "cancel", lambda self, rollout: [])


@instead_of(TurnTracker, "_file_prefill", seed=45)
def kv_computed_again_is_taken_for_the_old(
    right: Right, turn: Turn | None, prefill: Prefill
) -> None:
    if prefill.output_tokens == 0:
        right(turn, prefill)


@instead_of(filing, "_file_uniform", seed=0)
def the_rows_of_a_step_are_mixed_up(right: Right, rows: list[Turn], *of: Any) -> Any:
    return right(rows[::-1], *of)


@instead_of(StepCoalescer, "accepts", seed=225)
def steps_of_two_versions_are_taken_for_steps_of_one(
    right: Right, self: StepCoalescer, step: ev.StepArrived, *of: Any
) -> Any:
    self._version = step.version
    return right(self, step, *of)


@instead_of(TurnTracker, "leave", seed=29)
def a_turn_that_ends_engines_is_sent_to_the_next(right: Right, *of: Any, is_crash: bool) -> Any:
    return right(*of, is_crash=False)


# ---------------------------------------------------------------- streams


@instead_of(Fleet, "_receive_step", seed=0)
def a_step_counts_as_received_before_it_is_checked(
    _: Right, self: Fleet, name: str, engine: Engine, step: Step, received: Received
) -> None:
    verdict = engine.window.accept(engine.hello.epoch, step.seq)
    if (seq := engine.window.acknowledgement()) is not None:
        self.send(name, Ack(seq=seq))
    if verdict is StepAcceptance.NEW:
        received.append(step_arrived(name, step, engine.hello.epoch))


@instead_of(ReceiveWindow, "accept", seed=1)
def a_replayed_step_is_taken_in_twice(right: Right, *of: Any) -> StepAcceptance:
    verdict: StepAcceptance = right(*of)
    return StepAcceptance.NEW if verdict is StepAcceptance.DUPLICATE else verdict


@instead_of(ReceiveWindow, "accept", seed=9)
def a_gap_in_a_stream_is_ignored(
    right: Right, self: ReceiveWindow, epoch: int, seq: int
) -> StepAcceptance:
    if right(self, epoch, seq) is not StepAcceptance.GAP:
        return StepAcceptance.DUPLICATE if seq < self._next_seq - 1 else StepAcceptance.NEW
    self._next_seq = seq + 1
    return StepAcceptance.NEW


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


@instead_of(Fleet, "_welcome", seed=69)
def a_stream_begins_anew_with_each_reconnect(
    right: Right, self: Fleet, peer: bytes, hello: Hello, *of: Any
) -> None:
    self._given_up.clear()
    self.engines.pop(hello.engine, None)
    right(self, peer, msgspec.structs.replace(hello, first_seq=0), *of)


# ---------------------------------------------------------------- weights


@instead_of(WeightContent, "_patches_after", seed=70)
def a_whole_set_is_sent_without_the_patches_after_it(
    right: Right, self: WeightContent, step: int
) -> Any:
    return right(self, step) if step else ()


@instead_of(WeightContent, "_step_from", seed=19)
def an_engine_that_lacks_several_patches_gets_only_the_newest(
    right: Right, self: WeightContent, live: int | None
) -> int | None:
    return None if right(self, live) is None else len(self.patches) - 1


@instead_of(WeightContent, "buffers", seed=295)
def a_buffer_of_patches_that_others_follow_is_overwritten(
    _: Right, self: WeightContent
) -> set[int]:
    return {part.version for part in (*(self.whole or ()), *self._patches_after(0)[-1:])}


@mutation(seed=9)
def a_late_joiner_gets_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "catch_up", lambda self, engine=None: None)


@instead_of(WeightControl, "_remove", seed=9)
def a_lost_engine_is_waited_for(_: Right, self: WeightControl, engine: str, **how: bool) -> None:
    self.shared.engines.pop(engine, None)
    self.pauses.remove(engine)


@mutation(seed=104)
def weights_that_late_joiners_need_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightVersions, "kept_buffers", frozenset())


@instead_of(WeightVersions, "_withdraw", seed=9)
def a_withdrawn_version_is_swapped_in_all_the_same(right: Right, self: WeightVersions) -> None:
    right(self)
    if self.update is not None:
        self.update.is_released, self.update.is_withdrawn = True, False
        self.update.is_durable = True


@instead_of(WeightVersions, "_stage", seed=0)
def engines_swap_before_every_engine_has_staged(
    right: Right, self: WeightVersions, engines: Collection[str], update: WeightUpdate
) -> None:
    update.is_released = update.is_durable = True
    right(self, engines, update)


@instead_of(WeightVersions, "on_refused", seed=15)
def refused_weights_are_published_all_the_same(
    _: Right, self: WeightVersions, engine: str, version: int, why: str
) -> bool:
    if (update := self.update_of(version)) is not None:
        update.remove(engine)
        self._state.engines[engine].version = version  # so it is not asked again
    return False


@instead_of(EngineControl, "publish", seed=20)
async def a_failed_version_reserves_its_number_for_ever(
    right: Right, self: EngineControl, version: int, *of: Any, **of_adapter: Any
) -> None:
    try:
        await right(self, version, *of, **of_adapter)
    except WeightsRefused:
        self._run.handle(ev.VersionPublished(version))
        raise


@instead_of(WeightVersions, "_stage", seed=2)
def an_engine_is_sent_finish_before_it_has_staged(
    right: Right, self: WeightVersions, engines: Collection[str], update: WeightUpdate
) -> None:
    right(self, engines, update)
    update.is_released = update.is_durable = True
    update.staged |= update.staging
    update.staging.clear()


@mutation(seed=174)
def an_answer_to_an_earlier_start_of_a_version_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlledEngine, "is_outdated", lambda self, version: False)


@mutation(seed=158)
def the_kv_of_a_turn_that_moves_is_taken_from_its_former_engine(patch: pytest.MonkeyPatch) -> None:
    def spans_of(*of: Any) -> Iterator[VersionSpan]:
        kv: KvRange | None = None
        for span in provenance.spans_of(*of):
            if span.kv is None and kv is not None:
                kv = KvRange(min(kv.oldest, span.version), max(kv.newest, span.version))
                yield replace(span, kv=kv)
            else:
                kv = span.kv
                yield span

    patch.setattr(rollout, "spans_of", spans_of)


# ---------------------------------------------------------------- engines that leave


@mutation(seed=17)
def a_draining_engine_gets_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "drain", lambda self, name: None)


@mutation(seed=235)
def a_drained_engine_ends_before_it_has_handed_back_its_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drains, "_end_time", Drains._leave)


@mutation(seed=150)
def a_drained_process_that_has_lost_its_connection_joins_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "retire", lambda self, name: None)


# ---------------------------------------------------------------- episodes


@instead_of(ScoreDispatcher, "_choose", seed=24)
def engines_with_old_weights_are_asked_for_scores(
    right: Right, self: ScoreDispatcher, want: str
) -> Any:
    live_version, self._live_version = self._live_version, lambda: 0
    try:
        return right(self, want)
    finally:
        self._live_version = live_version


@instead_of(Episode, "fork", seed=9)
def a_branch_begins_a_token_short(_: Right, self: Episode) -> Episode:
    return self.branch(self.token_ids[:-1] or self.token_ids, "asked", media=self.media)


@mutation(seed=0)
def a_turn_that_no_frame_holds_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(episode, "CONTEXT_TOKENS_MAX", 1 << 31)
    patch.setattr(runner, "refuse_too_large", lambda *_: None)
    patch.setattr(Outbox, "_send_or_refuse", lambda self, *sent: self._send(*sent))
