"""Ranks of a sharded trainer publish their parts under faults; planted bugs are found."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.simulation.mutations import Mutations, Right
from tests.simulation.sharded_publish import simulate_sharded_publishes
from tidegate.orchestrator.trainer.remote import sharded_publish
from tidegate.orchestrator.trainer.remote.sharded_publish import ShardedPublishes, _PartsPublish
from tidegate.orchestrator.trainer.remote.weight_transfer import ReceivedWeights
from tidegate.orchestrator.trainer.weight_updates import PartsWanted
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart
from tidegate.transport import trainer_messages as wire

SEEDS = range(60)


def test_every_version_has_all_ranks_weights_of_one_step_whatever_fails() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen += simulate_sharded_publishes(seed)
    reached = {name for name, times in seen.items() if times > 3}
    assert reached >= {
        "patched",
        "whole after dense",
        "refused",
        "died",
        "died with a reply on the way",
        "cancelled",
        "late",
        "lost message",
        "TrainerLost",
        "WeightsRefused",
    }


def test_a_seed_gives_the_same_events() -> None:
    assert simulate_sharded_publishes(3) == simulate_sharded_publishes(3)


MUTATIONS = Mutations()
mutation, instead_of = MUTATIONS.plant, MUTATIONS.instead_of


@instead_of(ShardedPublishes, "_collect")
async def patches_start_from_whatever_ranks_hold(
    right: Right, self: ShardedPublishes, publish: _PartsPublish, wanted: PartsWanted
) -> Any:
    """A rank that has kept the parts of a failed publish sends patches of these."""
    if wanted.base_plan in publish.held.values():
        publish.held.update(dict.fromkeys(publish.held, wanted.base_plan))
    return await right(self, publish, wanted)


@instead_of(ShardedPublishes, "send")
async def parts_of_another_publish_count(
    right: Right,
    self: ShardedPublishes,
    rank: int,
    weights: ReceivedWeights,
    ask: wire.PublishWeights,
) -> Any:
    """Late parts of a publish that has failed are taken for the present one's."""
    if self._current is not None:
        ask = msgspec.structs.replace(ask, plan=self._current.name)
    return await right(self, rank, weights, ask)


class Kept(dict[int, list[TensorPart]]):
    """Parts that are never forgotten."""

    def clear(self) -> None:
        """Keep all."""


@instead_of(sharded_publish, "_PartsPublish")
def patches_stay_beside_whole_parts(right: Right, *of: object) -> Any:
    """Ranks whose patches were small enough are not asked for whole parts."""
    made = right(*of)
    made.sent = Kept()
    return made


@mutation()
def elements_are_placed_as_if_each_part_were_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorPart, "indices", lambda self, index: index)


@instead_of(ShardedPublishes, "_wait_for_all")
async def a_publish_goes_on_without_the_last_rank(
    right: Right,
    self: ShardedPublishes,
    publish: _PartsPublish,
    arrived: dict[int, Sequence[TensorPart]],
    doing: str,
) -> None:
    if "send" not in doing:
        await right(self, publish, arrived, doing)
        return
    enough = self._progress.world_size - 1
    await self._barrier.wait_until(lambda: len(arrived) >= enough, list, doing=doing)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_of_sharded_publishes_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTATIONS[name].plant(monkeypatch)
    for seed in SEEDS:
        try:
            simulate_sharded_publishes(seed)
        except Exception:  # noqa: BLE001 - an invariant, a call that never ends, or an error
            return
    pytest.fail(f"{len(SEEDS)} seeds passed")
