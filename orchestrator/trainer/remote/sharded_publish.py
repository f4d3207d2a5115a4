"""Publishes of a sharded trainer, whose ranks each send their own parts of the weights.

`service.py` passes the requests of ranks to :class:`ShardedPublishes`. Every rank announces its
part (``PrepareParts``) and waits for the plan: the reserved version, and whether to send patches.
Patches are asked for if all ranks hold the parts of the version that engines' patches would start
from. Then every rank sends its parts (``PublishWeights``) and waits for the version. If any rank's
patches are too large, all ranks send whole parts.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidegate.errors import ConfigError, TrainerLost, WeightsRefused
from tidegate.orchestrator.trainer.remote.progress import TrainerProgress
from tidegate.orchestrator.trainer.remote.ranks import Barrier
from tidegate.orchestrator.trainer.remote.weight_transfer import ReceivedWeights
from tidegate.orchestrator.trainer.weight_updates import CollectedParts, CollectParts, PartsWanted
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart
from tidegate.transport import trainer_messages as wire

WHOLE_AFTER_DENSE = 15
"""Number of publishes of whole parts after one whose patches were too large. Making patches that
are not sent costs CPU time, and learning rates change slowly."""

PublishOnce = Callable[[wire.PrepareParts, CollectParts], Coroutine[Any, Any, int]]
"""Publishes the parts that are collected, and returns their version."""


@dataclass(slots=True)
class _PartsPublish:
    """One publish, from the first rank's announcement until its version is known."""

    name: str
    plan: "asyncio.Future[wire.PartsPlan]"
    outcome: "asyncio.Future[wire.PublishReply | wire.SendWholeParts]"
    """Answer to the parts sent last; replaced if whole parts are to be sent."""
    held: dict[int, str] = field(default_factory=dict)
    """Plan whose parts each rank holds, of the ranks that have announced a part."""
    sent: dict[int, list[TensorPart]] = field(default_factory=dict)
    """Parts of each rank that has sent them."""
    too_dense: set[int] = field(default_factory=set)
    """Ranks whose patches are too large."""
    replaced: set[int] = field(default_factory=set)
    """Ranks whose calls are over: cancelled, or of a process that another has replaced."""
    batches: set[int] = field(default_factory=set)
    """Numbers of the batches that ranks publish after; more than one is an error."""
    named: list[int] | None = None
    """Batches that rank 0 says the version is made from; None if it does not say."""

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in every rank's call."""
        for future in (self.plan, self.outcome):
            if not future.done():
                future.set_exception(error)
                future.exception()  # no rank may be waiting for this one


class ShardedPublishes:
    """Collects the parts of all ranks; at most one publish is under way."""

    def __init__(self, progress: TrainerProgress, barrier: Barrier, publish: PublishOnce) -> None:
        self._progress = progress
        self._barrier = barrier
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._current: _PartsPublish | None = None
        self._task: asyncio.Task[None] | None = None
        self._whole_left = 0
        """Number of publishes that are not tried with patches."""

    async def close(self) -> None:
        """Cancel the publish under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def rank_joined(self, rank: int) -> None:
        """Fail the publish that an earlier process of this rank took part in."""
        if self._current is not None and rank in self._current.held:
            self._current.replaced.add(rank)

    async def prepare(self, rank: int, ask: wire.PrepareParts) -> wire.PartsPlan:
        """Announce a rank's part; return the plan once all ranks have."""
        publish = self._current
        while publish is not None and not publish.outcome.done() and rank in publish.held:
            # The rank's earlier call was cancelled, or was another process's.
            publish.replaced.add(rank)
            self._barrier.notify()
            await self._barrier.wait_until(publish.outcome.done, list, doing="publishing again")
            publish = self._current
        if publish is None or publish.outcome.done():
            publish = self._current = self._begin(ask)
        publish.batches.add(ask.batch_number)
        publish.held[rank] = ask.held
        if rank == 0:
            publish.named = ask.batches
        self._barrier.notify()
        return await asyncio.shield(publish.plan)

    async def send(
        self, rank: int, weights: ReceivedWeights, ask: wire.PublishWeights
    ) -> wire.PublishReply | wire.SendWholeParts:
        """Take a rank's parts; return the version once all parts are published."""
        publish = self._current
        if publish is None or publish.name != ask.plan:
            raise WeightsRefused(
                "the publish that these parts belong to has failed on another rank; publish again"
            )
        if not publish.outcome.done():
            publish.sent[rank] = [] if ask.is_too_dense else weights.parts(ask)
            if ask.is_too_dense:
                publish.too_dense.add(rank)
        outcome = publish.outcome
        self._barrier.notify()
        return await asyncio.shield(outcome)

    def _begin(self, ask: wire.PrepareParts) -> _PartsPublish:
        loop = self._loop
        publish = _PartsPublish(uuid.uuid4().hex, loop.create_future(), loop.create_future())
        self._task = asyncio.create_task(self._run(publish, ask), name="sharded publish")
        return publish

    async def _run(self, publish: _PartsPublish, ask: wire.PrepareParts) -> None:
        async def collect(wanted: PartsWanted) -> CollectedParts:  # on the run's event loop
            future = asyncio.run_coroutine_threadsafe(self._collect(publish, wanted), self._loop)
            return await asyncio.wrap_future(future)

        try:
            doing = f"waiting for all ranks to publish their parts after batch {ask.batch_number}"
            await self._wait_for_all(publish, publish.held, doing)
            if len(publish.batches) > 1:
                raise ConfigError(
                    f"ranks call publish(sharded=True) after different batches, "
                    f"{sorted(publish.batches)}; call it after the same batch on every rank"
                )
            named = msgspec.structs.replace(ask, batches=publish.named)
            version = await self._publish(named, collect)
        except BaseException as error:
            publish.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            publish.outcome.set_result(wire.PublishReply(version=version))
        finally:
            publish.sent.clear()
            self._barrier.notify()

    async def _collect(self, publish: _PartsPublish, wanted: PartsWanted) -> CollectedParts:
        held = set(publish.held.values())
        are_patches = held == {wanted.base_plan} != {""} and not self._whole_left
        self._whole_left = max(0, self._whole_left - 1)
        plan = wire.PartsPlan(
            plan=publish.name,
            version=wanted.version,
            are_patches=are_patches,
            keep_copy=wanted.keep_copy,
            has_checksums=wanted.has_checksums,
        )
        publish.plan.set_result(plan)
        doing = f"waiting for all ranks to send their parts of version {wanted.version}"
        await self._wait_for_all(publish, publish.sent, doing)
        if publish.too_dense:
            self._whole_left = WHOLE_AFTER_DENSE
            publish.sent.clear()
            publish.too_dense.clear()
            answered, publish.outcome = publish.outcome, self._loop.create_future()
            answered.set_result(wire.SendWholeParts())
            await self._wait_for_all(publish, publish.sent, doing)
        parts = [part for rank in sorted(publish.sent) for part in publish.sent[rank]]
        return CollectedParts(publish.name, parts)

    async def _wait_for_all(
        self, publish: _PartsPublish, arrived: dict[int, Any], doing: str
    ) -> None:
        progress, number = self._progress, max(publish.batches)

        def missing() -> list[int]:
            return [rank for rank in range(progress.world_size) if rank not in arrived]

        def skipped() -> list[int]:
            return [rank for rank in missing() if progress.requested.get(rank, 0) > number]

        await self._barrier.wait_until(
            lambda: bool(publish.replaced) or bool(skipped()) or not missing(),
            missing,
            doing=doing,
        )
        if publish.replaced:
            raise TrainerLost(
                ranks=sorted(publish.replaced),
                world_size=progress.world_size,
                doing=doing,
                why="has begun another publish, or another process has taken its place; publish "
                "again on every rank",
            )
        if skipped():
            raise ConfigError(
                f"rank {skipped()[0]} has continued from batch {number} without this publish; call "
                "publish(sharded=True) equally often on all ranks"
            )
