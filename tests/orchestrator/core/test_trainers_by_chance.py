"""Trainers of any habits against the core: worlds drawn from seeds, and planted bugs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.orchestrator.core.trainer_model import World, run_pair, run_world
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.hand_over import HandedBatch, HandOvers
from tidegate.policies.asynchrony import BoundedStaleness

WORLDS = 300


@pytest.mark.parametrize("first", range(0, WORLDS, 50))
def test_no_trainer_trains_beyond_the_bound_and_a_true_one_is_never_refused(first: int) -> None:
    for seed in range(first, first + 50):
        run_world(seed)


def test_a_resume_with_the_remainder_of_a_group_whose_task_was_put_back_waits_for_nothing() -> None:
    run_world(3426)


def test_a_trainer_that_requests_ahead_trains_no_fewer_batches() -> None:
    for seed in range(60):
        run_pair(seed)


# ---------------------------------------------------------------- planted bugs

Plant = Callable[[pytest.MonkeyPatch], None]


def unnamed_batches_count_as_trained(patch: pytest.MonkeyPatch) -> None:
    publish = HandOvers.publish

    def of_all(self: HandOvers, version: int) -> None:
        for batch in self.holding:
            batch.is_trained = True
        publish(self, version)

    patch.setattr(HandOvers, "publish", of_all)


def held_batches_are_not_planned_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "consumption_version", property(lambda self: self.trainer_version))


def any_batch_may_be_named(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "refuse_untrainable", lambda *_, **__: None)


def no_batch_is_lost_for_its_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "too_old", lambda *_: [])


def no_batch_is_too_old(patch: pytest.MonkeyPatch) -> None:
    no_batch_is_lost_for_its_age(patch)
    any_batch_may_be_named(patch)


def naming_frees_admission(patch: pytest.MonkeyPatch) -> None:
    def untrained(self: HandOvers) -> int:
        return sum(batch.num_groups for batch in self.holding if not batch.is_trained)

    patch.setattr(HandOvers, "num_groups", property(untrained))


def a_release_frees_admission(patch: pytest.MonkeyPatch) -> None:
    release = HandOvers.release
    patch.setattr(HandOvers, "release", lambda self, _: release(self, 10**9))


def requests_ahead_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        HandOvers, "batches_of_publish", lambda self, _: tuple(b.number for b in self.held)
    )


def a_rollback_loses_no_held_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandedBatch, "newest_version", property(lambda _: -1))


def statistics_keep_the_planned_age(patch: pytest.MonkeyPatch) -> None:
    name = HandOvers.name

    def unchanged(self: HandOvers, numbers: Any, version: int) -> Iterable[HandedBatch]:
        name(self, numbers, version)
        return []

    patch.setattr(HandOvers, "name", unchanged)


def an_undecided_publish_pauses_nothing(patch: pytest.MonkeyPatch) -> None:
    wants = property(lambda self: bool(self.requests) and self.offer is None)
    patch.setattr(HandOvers, "wants_batch", wants)


def a_resume_leaves_held_batches_untrained(patch: pytest.MonkeyPatch) -> None:
    def forget(self: HandOvers, _: int) -> None:
        self.requests.clear()
        self.offer, self.is_paused, self.has_lost = None, False, False

    patch.setattr(HandOvers, "resume", forget)


def a_discarded_batch_stays_held(patch: pytest.MonkeyPatch) -> None:
    handle = Core.handle

    def unmarked(self: Core, event: ev.Event) -> list[ev.Command]:
        commands = handle(self, event)
        if isinstance(event, ev.RowsDiscarded):
            self.handed[event.batch].is_trained = False
        return commands

    patch.setattr(Core, "handle", unmarked)


def fresh_groups_are_left_for_used_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedStaleness, "_ended_in_order", lambda self, waiting, groups: [])


def used_groups_are_trained_though_none_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HandOvers, "num_held", property(lambda self: 0))


PLANTED = (
    fresh_groups_are_left_for_used_ones,
    used_groups_are_trained_though_none_is_waited_for,
    unnamed_batches_count_as_trained,
    held_batches_are_not_planned_for,
    any_batch_may_be_named,
    no_batch_is_lost_for_its_age,
    no_batch_is_too_old,
    naming_frees_admission,
    a_release_frees_admission,
    requests_ahead_are_forgotten,
    a_rollback_loses_no_held_batch,
    statistics_keep_the_planned_age,
    an_undecided_publish_pauses_nothing,
    a_resume_leaves_held_batches_untrained,
    a_discarded_batch_stays_held,
)


def fails(seed: int) -> bool:
    """Whether a world finds something wrong."""
    try:
        World(seed).run()
    except Exception:  # noqa: BLE001
        return True
    return False


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(fails(seed) for seed in range(WORLDS))
