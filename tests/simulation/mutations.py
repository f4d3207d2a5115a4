"""Bugs that were made before, by us or by others: planted to see whether the simulation notices.

Each changes one decision of the real orchestrator, as a wrong line in its code would. The seed at
each is the first that finds it, as of the last search.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pytest

from tidegate.orchestrator.batches.tasks import TaskSource
from tidegate.orchestrator.core import core, filing, groups, hand_over
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.filing import StepCoalescer, StepOutcome
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.hand_over import HandedBatch, HandOvers, TrainedCounts
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.orchestrator.core.weight_content import WeightContent
from tidegate.orchestrator.episodes import episode, runner
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.runner import EpisodeRunner
from tidegate.orchestrator.fleet.drains import Drains
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest, BatchRequests
from tidegate.orchestrator.scheduler.outbox import Outbox
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.policies import asynchrony, consumption
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling
from tidegate.transport.messages import (
    FINISH_REASONS,
    LENGTH,
    STOP,
    Prefill,
    UpdateWeights,
)

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A planted bug, and a seed that catches it."""

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
    right = BoundedStaleness.admit

    def admit(self: BoundedStaleness, waiting: GroupTracker, *, training_groups: int) -> int:
        return right(self, waiting, training_groups=0)

    patch.setattr(BoundedStaleness, "admit", admit)


@mutation(seed=8)
def places_are_free_before_the_version_is_live(patch: pytest.MonkeyPatch) -> None:
    def release(self: Core, commands: list[ev.Command]) -> list[ev.Command]:
        self.handed.release(self.trainer_version)
        return commands + self._hand_over()

    patch.setattr(Core, "_release", release)


@mutation(seed=8)
def places_are_free_once_the_first_engine_is_live(patch: pytest.MonkeyPatch) -> None:
    def raise_live_version(self: TurnTracker) -> None:
        newest = max((engine.weight_version for engine in self.engines.values()), default=0)
        self.live_version = max(self.live_version, newest)

    patch.setattr(TurnTracker, "_raise_live_version", raise_live_version)


@mutation(seed=0)
def groups_are_trained_in_the_order_of_completion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(asynchrony, "in_admission_order", consumption.in_completion_order)


@mutation(seed=1422)
def a_group_overtakes_one_that_has_no_time_left(patch: pytest.MonkeyPatch) -> None:
    def by_deadline(waiting: GroupTracker, groups: int, **times: int) -> list[Group] | None:
        return consumption.in_completion_order(waiting, groups)

    patch.setattr(asynchrony, "by_deadline", by_deadline)


@mutation(seed=48)
def a_window_is_one_group_too_wide(patch: pytest.MonkeyPatch) -> None:
    right = consumption.in_window

    def in_window(waiting: GroupTracker, groups: int, window: Window) -> list[Group] | None:
        return right(waiting, groups, Window(window.groups + 1))

    patch.setattr(asynchrony, "in_window", in_window)


@mutation(seed=45)
def masked_tokens_count_as_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollout, "masked_tokens", property(lambda self: 0))


@mutation(seed=1)
def rows_that_the_trainer_discarded_stay_trained(patch: pytest.MonkeyPatch) -> None:
    right = Ledger.discard_trained

    def discard_trained(self: Ledger, tokens: int, reason: str) -> None:
        if reason == groups.TOO_OLD:
            right(self, tokens, reason)

    patch.setattr(Ledger, "discard_trained", discard_trained)


@mutation(seed=30)
def a_rollout_is_discarded_with_the_first_of_its_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hand_over, "_is_trained", lambda root: root.discard_reason is None)


@mutation(seed=2)
def tokens_are_masked_one_version_too_late(patch: pytest.MonkeyPatch) -> None:
    right = BoundedStaleness.oldest_trainable

    def oldest_trainable(self: BoundedStaleness, trainer_version: int) -> int:
        return right(self, trainer_version - self.masks_old_tokens)

    patch.setattr(BoundedStaleness, "oldest_trainable", oldest_trainable)


@mutation(seed=12)
def a_pipeline_of_one_step_starts_a_batch_early(patch: pytest.MonkeyPatch) -> None:
    def allowed_groups(self: OneStepOffPolicy) -> int:
        return 3 * self.groups_per_batch

    patch.setattr(OneStepOffPolicy, "allowed_groups", property(allowed_groups))


@mutation(seed=0)
def a_batch_is_trained_twice(patch: pytest.MonkeyPatch) -> None:
    right = Core._train

    def train(self: Core, head: list[Group]) -> list[ev.Command]:
        commands = right(self, head)
        if head and self.trained.batches == 2:
            self.groups.return_to_buffer([head[-1]])
        return commands

    patch.setattr(Core, "_train", train)


@mutation(seed=0)
def a_dropped_group_keeps_its_tokens_buffered(patch: pytest.MonkeyPatch) -> None:
    def drop(self: GroupTracker, group: Group, reason: str) -> list[ev.Command]:
        self._remove(group)
        return [self._discard(rollout, group, reason) for rollout in group.kept]

    patch.setattr(GroupTracker, "drop", drop)


@mutation(seed=1)
def a_group_that_is_just_fresh_enough_is_dropped(patch: pytest.MonkeyPatch) -> None:
    right = BoundedStaleness.oldest_trainable

    def oldest_trainable(self: BoundedStaleness, trainer_version: int) -> int:
        return right(self, trainer_version) + 1

    patch.setattr(BoundedStaleness, "oldest_trainable", oldest_trainable)


@mutation(seed=29)
def age_is_not_checked_when_a_batch_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "oldest_trainable", lambda self, trainer_version: 0)


@mutation(seed=0)
def a_group_with_one_rollout_left_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(groups, "KEPT_ROLLOUTS_MIN", 1)


@mutation(seed=1)
def a_batch_whose_request_was_cancelled_is_lost(patch: pytest.MonkeyPatch) -> None:
    def close(self: BatchRequests, request: BatchRequest) -> None:
        request.close()
        if self._open.pop(request.number, None) is not None:
            self._handle(ev.BatchRequestCancelled(request.number))
            self._handle(ev.BatchTaken(request.number))

    patch.setattr(BatchRequests, "close", close)


@mutation(seed=563)
def the_request_of_a_withdrawn_offer_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Core._undo_hand_over

    def undo_hand_over(self: Core, event: ev.BatchReturned) -> list[ev.Command]:
        return right(self, ev.BatchReturned(event.number))

    patch.setattr(Core, "_undo_hand_over", undo_hand_over)


@mutation(seed=8)
def batches_that_the_trainer_holds_count_no_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "consumption_version", property(lambda self: self.trainer_version))


@mutation(seed=19)
def a_publish_names_a_batch_that_it_was_not_told(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers.name

    def name(self: HandOvers, numbers: Sequence[int], trainer_version: int) -> list[HandedBatch]:
        held = [batch.number for batch in self.held]
        return right(self, held if numbers else (), trainer_version)

    patch.setattr(HandOvers, "name", name)


@mutation(seed=122)
def a_publish_that_names_none_names_the_oldest_batch(patch: pytest.MonkeyPatch) -> None:
    right = TrainerSide.batches_of_publish

    def batches_of_publish(self: TrainerSide, batches: Sequence[int] | None) -> Sequence[int]:
        held = tuple(batch.number for batch in self.core.handed.held[:1])
        return right(self, held if batches == () else batches)

    patch.setattr(TrainerSide, "batches_of_publish", batches_of_publish)


@mutation(seed=19)
def a_version_contains_batches_that_no_publish_has_named(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers.publish

    def publish(self: HandOvers, version: int) -> None:
        for batch in self.holding:
            batch.version = batch.version or version
        right(self, version)

    patch.setattr(HandOvers, "publish", publish)


@mutation(seed=8)
def a_named_batch_keeps_its_planned_age(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers.name

    def name(self: HandOvers, numbers: Sequence[int], trainer_version: int) -> list[HandedBatch]:
        right(self, numbers, trainer_version)
        return []

    patch.setattr(HandOvers, "name", name)


@mutation(seed=122)
def a_lost_batch_keeps_its_places_in_admission(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers.lose

    def lose(self: HandOvers, batch: HandedBatch, reason: str) -> None:
        right(self, batch, reason)
        batch.groups = []
        batch.is_trained = True
        self.holding.appendleft(batch)

    patch.setattr(HandOvers, "lose", lose)


@mutation(seed=122)
def held_batches_get_too_old_with_a_publish_that_names_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "too_old", lambda self, trainer_version, bound: [])


@mutation(seed=518)
def held_batches_of_bad_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandedBatch, "newest_version", property(lambda self: -1))


@mutation(seed=785)
def a_short_batch_holds_no_more_places_than_it_has_groups(patch: pytest.MonkeyPatch) -> None:
    def places_of(self: Core, batch: list[Group]) -> int:
        return sum(group.split_from is None for group in batch)

    patch.setattr(Core, "_groups_counted_for", places_of)


@mutation(seed=45)
def the_remainder_of_a_split_group_is_taken_for_young(patch: pytest.MonkeyPatch) -> None:
    right = GroupTracker.split

    def split(self: GroupTracker, group: Group) -> Group:
        part = right(self, group)
        self._raise_oldest_possible_version(group, self._versions.live_version)
        group.oldest_possible_version = self._versions.live_version
        return part

    patch.setattr(GroupTracker, "split", split)


@mutation(seed=999)
def a_branch_loses_its_pin(patch: pytest.MonkeyPatch) -> None:
    right = GroupTracker._fork

    def fork(self: GroupTracker, event: ev.RolloutForked) -> list[ev.Command]:
        commands = right(self, event)
        for command in commands:
            if isinstance(command, ev.StartBranch):
                command.rollout.pinned_version = None
        return commands

    patch.setattr(GroupTracker, "_fork", fork)


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


@mutation(seed=8)
def a_group_is_used_once_too_often(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers._keep_used

    def keep_used(self: HandOvers, batch: HandedBatch) -> None:
        is_reusing = self._max_uses > 1
        self._max_uses += is_reusing
        right(self, batch)
        self._max_uses -= is_reusing

    patch.setattr(HandOvers, "_keep_used", keep_used)


@mutation(seed=926)
def used_groups_make_outstanding_ones_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "_can_wait", lambda self, waiting, trained, version: True)


@mutation(seed=44)
def a_row_discarded_from_another_use_is_trained_no_longer(patch: pytest.MonkeyPatch) -> None:
    right = hand_over.discard_rows

    def discard_rows(
        batch: HandedBatch,
        indices: Sequence[int],
        reason: str,
        groups: GroupTracker,
        trained: TrainedCounts,
    ) -> None:
        again = [row for row in batch.rows if row.use > 1]
        for row in again:
            row.use = 1
        right(batch, indices, reason, groups, trained)
        for row in again:
            row.use = 2

    patch.setattr(core, "discard_rows", discard_rows)


@mutation(seed=8)
def further_uses_are_counted_as_first_ones(patch: pytest.MonkeyPatch) -> None:
    right = TrainedCounts.count

    def count(self: TrainedCounts, rows: list[Rollout], trainer_version: int, times: int) -> None:
        right(self, rows, trainer_version, times)
        self.rollouts += times * sum(row.use > 1 and row.branch_of is None for row in rows)

    patch.setattr(TrainedCounts, "count", count)


@mutation(seed=9)
def a_used_group_is_kept_before_its_version_is_released(patch: pytest.MonkeyPatch) -> None:
    right = HandOvers.add

    def add(
        self: HandOvers, groups: list[Group], trainer_version: int, *, num_groups: int
    ) -> HandedBatch:
        batch = right(self, groups, trainer_version, num_groups=num_groups)
        self._keep_used(batch)
        return batch

    patch.setattr(HandOvers, "add", add)


@mutation(seed=270)
def used_groups_of_bad_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "forget_sampled_by", lambda self, version: None)


# ---------------------------------------------------------------- turns


@mutation(seed=1)
def a_lost_engines_turns_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def leave(self: TurnTracker, engine: str, *, is_crash: bool) -> list[ev.Command]:
        self.engines.pop(engine, None)
        self._raise_live_version()
        return []

    patch.setattr(TurnTracker, "leave", leave)


@mutation(seed=121)
def turns_sent_before_a_reconnect_are_assumed_to_have_arrived(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker.join

    def join(self: TurnTracker, event: ev.EngineJoined) -> list[ev.Command]:
        known = self.engines.get(event.engine)
        if known is not None and known.epoch == event.epoch:
            return self.swap(event.engine, event.weight_version)
        return right(self, event)

    patch.setattr(TurnTracker, "join", join)


@mutation(seed=13)
def an_aborted_turn_is_taken_for_finished(patch: pytest.MonkeyPatch) -> None:
    def finish(turn: Turn, code: int) -> bool:
        turn.finish_reason = FINISH_REASONS[STOP if code == STOP else LENGTH]
        return True

    patch.setattr(TurnTracker, "_finish", staticmethod(finish))


@mutation(seed=6)
def a_late_joiner_with_old_weights_gets_turns(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker.submit

    def submit(self: TurnTracker, turn: Turn, priority: int) -> list[ev.Command]:
        live, self.live_version = self.live_version, 0
        commands = right(self, turn, priority)
        self.live_version = live
        return commands

    patch.setattr(TurnTracker, "submit", submit)


@mutation(seed=20)
def a_turn_sent_again_counts_its_tokens_from_0(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker.submit

    def submit(self: TurnTracker, turn: Turn, priority: int) -> list[ev.Command]:
        commands = right(self, turn, priority)
        for command in commands:
            if isinstance(command, ev.Submit):
                submissions = self.engines[command.engine].submissions
                submissions[command.message.turn].sampled_before = 0
        return commands

    patch.setattr(TurnTracker, "submit", submit)


@mutation(seed=9)
def tokens_are_tagged_with_the_version_at_their_arrival(patch: pytest.MonkeyPatch) -> None:
    right = Core._on_step

    def on_step(self: Core, event: ev.StepArrived) -> list[ev.Command]:
        fields = {name: getattr(event, name) for name in ev.StepArrived.__struct_fields__}
        return right(self, ev.StepArrived(**(fields | {"version": self.trainer_version})))

    patch.setattr(Core, "_on_step", on_step)


@mutation(seed=17)
def an_abort_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "_continue_turn", lambda self, turn: [])


@mutation(seed=0)
def a_turn_given_up_continues(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnTracker, "cancel", lambda self, rollout: [])


@mutation(seed=45)
def kv_computed_again_is_taken_for_the_old(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker._file_prefill

    def file_prefill(turn: Turn | None, prefill: Prefill) -> None:
        if prefill.output_tokens == 0:
            right(turn, prefill)

    patch.setattr(TurnTracker, "_file_prefill", staticmethod(file_prefill))


@mutation(seed=0)
def the_rows_of_a_step_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    right = filing._file_uniform

    def file_each(rows: list[Turn], event: ev.StepArrived, tokens_per_row: int) -> StepOutcome:
        return right(rows[::-1], event, tokens_per_row)

    patch.setattr(filing, "_file_uniform", file_each)


@mutation(seed=225)
def steps_of_two_versions_are_taken_for_steps_of_one(patch: pytest.MonkeyPatch) -> None:
    right = StepCoalescer.accepts

    def accepts(
        self: StepCoalescer,
        step: ev.StepArrived,
        tokens_per_row: int,
        submissions: dict[int, Turn],
    ) -> bool:
        self._version = step.version
        return right(self, step, tokens_per_row, submissions)

    patch.setattr(StepCoalescer, "accepts", accepts)


@mutation(seed=29)
def a_turn_that_ends_engines_is_sent_to_the_next(patch: pytest.MonkeyPatch) -> None:
    right = TurnTracker.leave

    def leave(self: TurnTracker, engine: str, *, is_crash: bool) -> list[ev.Command]:
        return right(self, engine, is_crash=False)

    patch.setattr(TurnTracker, "leave", leave)


# ---------------------------------------------------------------- weights


@mutation(seed=70)
def a_whole_set_is_sent_without_the_patches_after_it(patch: pytest.MonkeyPatch) -> None:
    right = WeightContent._patches_after

    def patches_after(self: WeightContent, step: int) -> tuple[UpdateWeights, ...]:
        return right(self, step) if step else ()

    patch.setattr(WeightContent, "_patches_after", patches_after)


@mutation(seed=19)
def an_engine_that_lacks_several_patches_gets_only_the_newest(patch: pytest.MonkeyPatch) -> None:
    right = WeightContent._step_from

    def step_from(self: WeightContent, live: int | None) -> int | None:
        return None if right(self, live) is None else len(self.patches) - 1

    patch.setattr(WeightContent, "_step_from", step_from)


@mutation(seed=295)
def a_buffer_of_patches_that_others_follow_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    def buffers(self: WeightContent) -> set[int]:
        return {part.version for part in (*(self.whole or ()), *self._patches_after(0)[-1:])}

    patch.setattr(WeightContent, "buffers", property(buffers))


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


@mutation(seed=24)
def engines_with_old_weights_are_asked_for_scores(patch: pytest.MonkeyPatch) -> None:
    right = ScoreDispatcher._choose

    def choose(self: ScoreDispatcher, want: str) -> str | None:
        live_version, self._live_version = self._live_version, lambda: 0
        try:
            return right(self, want)
        finally:
            self._live_version = live_version

    patch.setattr(ScoreDispatcher, "_choose", choose)


@mutation(seed=9)
def a_branch_begins_a_token_short(patch: pytest.MonkeyPatch) -> None:
    def fork(self: Episode) -> Episode:
        return self.branch(self.token_ids[:-1] or self.token_ids, "asked", media=self.media)

    patch.setattr(Episode, "fork", fork)


@mutation(seed=0)
def a_turn_that_no_frame_holds_is_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(episode, "CONTEXT_TOKENS_MAX", 1 << 31)
    patch.setattr(runner, "refuse_too_large", lambda *_: None)
    patch.setattr(Outbox, "_send_or_refuse", lambda self, *sent: self._send(*sent))
