"""Ranks of a sharded trainer publish their parts under faults; planted bugs are found."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.simulation.sharded_publish import simulate_sharded_publishes
from tidegate.orchestrator.trainer.remote import sharded_publish, weight_transfer
from tidegate.orchestrator.trainer.remote.sharded_publish import ShardedPublishes
from tidegate.orchestrator.trainer.weight_updates import CollectedParts, PartsWanted
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


def patches_start_from_whatever_ranks_hold(patch: pytest.MonkeyPatch) -> None:
    """A rank that has kept the parts of a failed publish sends patches of these."""
    right = ShardedPublishes._collect

    async def collect(
        self: ShardedPublishes, publish: sharded_publish._PartsPublish, wanted: PartsWanted
    ) -> CollectedParts:
        if wanted.base_plan in publish.held.values():
            publish.held.update(dict.fromkeys(publish.held, wanted.base_plan))
        return await right(self, publish, wanted)

    patch.setattr(ShardedPublishes, "_collect", collect)


def parts_of_another_publish_count(patch: pytest.MonkeyPatch) -> None:
    """Late parts of a publish that has failed are taken for the present one's."""
    right = ShardedPublishes.send

    async def send(
        self: ShardedPublishes,
        rank: int,
        weights: weight_transfer.ReceivedWeights,
        ask: wire.PublishWeights,
    ) -> wire.PublishReply | wire.SendWholeParts:
        if self._current is not None:
            ask = msgspec.structs.replace(ask, plan=self._current.name)
        return await right(self, rank, weights, ask)

    patch.setattr(ShardedPublishes, "send", send)


def patches_stay_beside_whole_parts(patch: pytest.MonkeyPatch) -> None:
    """Ranks whose patches were small enough are not asked for whole parts."""

    class Kept(dict[int, list[TensorPart]]):
        def clear(self) -> None:
            """Keep all."""

    right = sharded_publish._PartsPublish

    def make(*arguments: object) -> sharded_publish._PartsPublish:
        made = right(*arguments)  # type: ignore[arg-type]
        made.sent = Kept()
        return made

    patch.setattr(sharded_publish, "_PartsPublish", make)


def elements_are_placed_as_if_each_part_were_the_first(patch: pytest.MonkeyPatch) -> None:
    def indices(self: TensorPart, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return index

    patch.setattr(TensorPart, "indices", indices)


def a_publish_goes_on_without_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    right = ShardedPublishes._wait_for_all

    async def wait_for_all(
        self: ShardedPublishes,
        publish: sharded_publish._PartsPublish,
        arrived: dict[int, Sequence[TensorPart]],
        doing: str,
    ) -> None:
        if "send" not in doing:
            return await right(self, publish, arrived, doing)
        enough = self._progress.world_size - 1
        await self._barrier.wait_until(lambda: len(arrived) >= enough, list, doing=doing)
        return None

    patch.setattr(ShardedPublishes, "_wait_for_all", wait_for_all)


MUTATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    plant.__name__: plant
    for plant in (
        patches_start_from_whatever_ranks_hold,
        parts_of_another_publish_count,
        patches_stay_beside_whole_parts,
        elements_are_placed_as_if_each_part_were_the_first,
        a_publish_goes_on_without_the_last_rank,
    )
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_of_sharded_publishes_is_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in SEEDS:
        try:
            simulate_sharded_publishes(seed)
        except Exception:  # noqa: BLE001 - an invariant, a call that never ends, or an error
            return
    pytest.fail(f"{len(SEEDS)} seeds passed")
