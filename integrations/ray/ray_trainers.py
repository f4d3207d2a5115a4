"""Trainer ranks on a Ray cluster: actors, placed all at once, that connect to the run.

Users call :func:`train_on_ray` with a run and their training function. Each rank gets the run's
address, keys, its rank, and the variables of ``torch.distributed``. Batches and weights travel as
for any trainer in another process.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError, TrainerLost
from tidegate.integrations.ray.ray_resources import (
    RayPlacement,
    RayResources,
    connected_ray,
    error_line,
    node_address,
)
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.trainer.remote.listener import listen
from tidegate.orchestrator.trainer.remote.rollouts import RemoteRollouts, SyncRemoteRollouts
from tidegate.transport.security import EngineKeys, ephemeral_keys

if TYPE_CHECKING:
    from tidegate.orchestrator.trainer.rollouts import Rollouts

Train = Callable[[SyncRemoteRollouts], Any]
"""Function of a rank; called with its open connection, which has ``rank`` and ``world_size``."""


async def train_on_ray(
    rollouts: "Rollouts",
    train: Train,
    *,
    world_size: int = 1,
    resources: RayResources | None = None,
    tasks: Tasks | None = None,
    episode: EpisodeFunction | str | None = None,
    episodes: Mapping[str, EpisodeFunction | str] | None = None,
    trainer_timeout_s: float = 600.0,
    rank_timeout_s: float = 60.0,
) -> list[Any]:
    """Run ``train(rollouts)`` in ``world_size`` ranks on Ray's nodes; return their results by rank.

    Each rank is an actor with the GPUs of ``resources``, and the variables that
    ``torch.distributed.init_process_group()`` needs. Its ``rollouts`` is a
    ``tidegate.connect_sync`` connection. Ray serialises ``train``. The other arguments are those of
    ``Rollouts.listen``.

    A rank that fails ends the others. The run stays intact: call this again with a ``train`` that
    resumes from a checkpoint. Cancelling the call ends the ranks.

    Raises:
        TrainerLost: a rank failed, its node was lost, or Ray found no resources for all ranks.
        ConfigError: ``world_size`` is below 1, Ray is missing, there is no such placement group, or
            as for ``listen``.
        EngineLost, EpisodeError: the run has failed.
    """
    if world_size < 1:
        raise ConfigError(
            f"world_size (the number of trainer ranks) must be at least 1, got {world_size}"
        )
    ray = connected_ray()
    keys, rank_keys = ephemeral_keys()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    listening = listen(
        rollouts,
        node_address(ray),
        tasks=tasks,
        episode=episode,
        episodes=episodes,
        trainer_timeout_s=trainer_timeout_s,
        rank_timeout_s=rank_timeout_s,
        keys=keys,
        on_bound=bound.set_result,
    )
    placement = RayPlacement(ray, resources or RayResources(), gang_size=world_size)
    ranks = _Ranks(ray, placement, world_size, rank_keys)
    try:
        rendezvous = await ranks.meet(trainer_timeout_s)
        return await _trained(ranks, train, rendezvous, bound, asyncio.ensure_future(listening))
    finally:
        listening.close()  # no effect if it has returned
        ranks.end()


async def _trained(
    ranks: "_Ranks",
    train: Train,
    rendezvous: tuple[str, int],
    bound: "asyncio.Future[str]",
    listening: "asyncio.Future[None]",
) -> list[Any]:
    """Wait until the run has no trainer and all ranks have returned, or one of them fails."""
    training: asyncio.Future[list[Any]] | None = None
    until_bound: list[asyncio.Future[Any]] = [bound, listening]
    try:
        await asyncio.wait(until_bound, return_when=asyncio.FIRST_COMPLETED)
        if not bound.done():
            await listening  # raises its error
        training = asyncio.ensure_future(ranks.train(train, bound.result(), rendezvous))
        until_done: list[asyncio.Future[Any]] = [listening, training]
        await asyncio.wait(until_done, return_when=asyncio.FIRST_EXCEPTION)
        for ended in (training, listening):
            if ended.done():
                ended.result()
        return await training
    finally:
        left = [task for task in (listening, training) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Ranks:
    """Ray actors of all trainer ranks, one each."""

    def __init__(
        self, ray: Any, placement: RayPlacement, world_size: int, keys: EngineKeys
    ) -> None:
        self._ray, self._placement = ray, placement
        self._actors = [
            ray.remote(RayTrainer)
            .options(max_restarts=0, **placement.options(rank))
            .remote(rank, world_size, keys)
            for rank in range(world_size)
        ]

    async def meet(self, timeout_s: float) -> tuple[str, int]:
        """Return an address and port of rank 0's node, once all actors are placed.

        Raises:
            TrainerLost: not all were placed in time, or one failed to start.
        """
        try:
            async with asyncio.timeout(timeout_s):
                points = await self._all([actor.rendezvous.remote() for actor in self._actors])
        except TimeoutError:
            raise TrainerLost(
                ranks=list(range(len(self._actors))),
                world_size=len(self._actors),
                doing="train_on_ray()",
                why=f"Ray found no resources in {timeout_s:.0f} s; run `ray status` to see what is "
                f"free",
            ) from None
        address, port = points[0]
        return str(address), int(port)

    async def train(self, train: Train, address: str, rendezvous: tuple[str, int]) -> list[Any]:
        """Return each rank's result.

        Raises:
            TrainerLost: a rank failed.
        """
        # Stored once: Ray warns about a large function that is sent repeatedly.
        sent = self._ray.put(train)
        return await self._all([a.train.remote(sent, address, rendezvous) for a in self._actors])

    async def _all(self, references: list[Any]) -> list[Any]:
        futures: list[Future[Any]] = [reference.future() for reference in references]
        waiting = [asyncio.wrap_future(future) for future in futures]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for rank, ended in enumerate(waiting):
                if ended.done() and (error := ended.exception()) is not None:
                    raise TrainerLost(
                        ranks=[rank],
                        world_size=len(waiting),
                        doing="train_on_ray()",
                        why=f"failed: {error_line(error)}",
                    ) from error
            return [ended.result() for ended in waiting]
        finally:
            for ended in waiting:
                ended.cancel()

    def end(self) -> None:
        """Kill all actors, and free their placement group."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._placement.remove_all()


class RayTrainer:
    """Ray actor that is one trainer rank."""

    def __init__(self, rank: int, world_size: int, keys: EngineKeys) -> None:
        """Take the rank and keys; the keys are never written to disk."""
        self._rank, self._world_size, self._keys = rank, world_size, keys

    def rendezvous(self) -> tuple[str, int]:
        """Return this node's address, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def train(self, train: Train, address: str, rendezvous: tuple[str, int]) -> Any:
        """Run ``train`` with a connection to the run at ``address``."""
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK="0",  # Ray shows this process only its own GPUs
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=rendezvous[0],
            MASTER_PORT=str(rendezvous[1]),
        )
        connection = RemoteRollouts(
            address, keys=self._keys, rank=self._rank, world_size=self._world_size
        )
        with SyncRemoteRollouts(connection) as rollouts:
            return train(rollouts)
