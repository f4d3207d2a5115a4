"""What does a trainer in another process hold in its hands? The same as one beside the run.

    async with tidegate.connect("tcp://host:5600", keys="trainer") as rollouts:
        async for batch in rollouts.batches():
            train_step(batch)
            await rollouts.publish(model.state_dict())

As one of several data-parallel ranks it gets its part of each batch. Nothing here decides anything.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

from tidegate.orchestrator.client import Evaluation
from tidegate.orchestrator.feed.left_out_rows import NOT_TRAINED
from tidegate.orchestrator.fleet.scores import (
    Pooling,
    Readout,
    TokenScores,
    ask_embeddings,
    ask_logprobs,
    ask_rewards,
)
from tidegate.orchestrator.remote.remote_run import (
    RemoteRun,
    rewards_of,
    scores_of,
    statistics_of,
    value_of,
)
from tidegate.orchestrator.statistics import RunStatistics
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.transport.messages import PauseMode
from tidegate.transport.security import EngineKeys
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.feed.batches import Batch


class SyncRemoteRollouts(RemoteRun):
    """A run in another process, for a trainer that is not async. Use it in ``with``."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._close(is_done=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(is_done=kind is None)

    def batches(
        self, tasks: Iterable[Any] | None = None, *, episode: str | None = None
    ) -> Iterator["Batch"]:
        """This rank's part of each batch, until the run's tasks are used up.

        Where the run listens without tasks, rank 0 gives them: an iterable of plain data (what
        MessagePack holds; tuples become lists), for an ``episode`` that the run knows by name.

        A batch that this process had and had not done with when it died is the first of the next
        one's. It is done with once this asks for another, or has published after it.

        Raises:
            TrainerLost: another rank is gone.
            RunLost: the run is.
            EngineLost, EpisodeError, PublishNeeded: as :meth:`~tidegate.Rollouts.batches`.
        """
        feeder = None
        if tasks is not None:
            feeder = self._feed(tasks, episode)
            feeder.offered.result()
            feeder.start()
        while (batch := self._batch(self._link.ask(self._next_batch()).result())) is not None:
            yield batch
        if feeder is not None:
            feeder.raise_failure()

    def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor] | None" = None,
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """Bring new weights to the engines, once every rank has done with its part; the version.

        Rank 0's are published. The others either call this too, as often, without weights, and get
        the same version; or they ask for the next batch, which says as much. As
        :meth:`~tidegate.Rollouts.publish` otherwise.

        Raises:
            TrainerLost: a rank that is waited for is gone.
            WeightsRefused, EngineLagging, PublishDropped: as there.
        """
        return self._published(self._publish(state_dict, wait=wait, partial=partial).result())

    def rollback(
        self,
        state_dict: "Mapping[str, torch.Tensor] | None" = None,
        *,
        first_bad: int | None = None,
    ) -> int:
        """As :meth:`~tidegate.Rollouts.rollback`, with ranks as in :meth:`publish`."""
        asked = self._publish(state_dict, is_rollback=True, first_bad=first_bad)
        return self._published(asked.result())

    def evaluate(self, tasks: Sequence[Any], *, episode: str | None = None) -> Evaluation:
        """As :meth:`~tidegate.Rollouts.evaluate`, by an episode that the run knows by name."""
        return Evaluation(rewards_of(self._evaluate(tasks, episode).result()))

    def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> list[TokenScores]:
        """As :meth:`~tidegate.Rollouts.score`."""
        asked = self._score(ask_logprobs(sequences, start, top_logprobs, temperature))
        return cast("list[TokenScores]", scores_of(asked.result()))

    def embed(
        self,
        sequences: Sequence[Any],
        *,
        pooling: Pooling = "last",
        start: int | Sequence[int] = 0,
    ) -> list[Readout]:
        """As :meth:`~tidegate.Rollouts.embed`."""
        asked = self._score(ask_embeddings(sequences, pooling, start))
        return cast("list[Readout]", scores_of(asked.result()))

    def reward(self, sequences: Sequence[Any]) -> list[Readout]:
        """As :meth:`~tidegate.Rollouts.reward`."""
        return cast("list[Readout]", scores_of(self._score(ask_rewards(sequences)).result()))

    def statistics(self) -> RunStatistics:
        """The run as of now."""
        return statistics_of(self._control("statistics").result())

    def ack(self, state: Mapping[str, Any]) -> None:
        """This ``state_dict()`` is on disk: no batch before it need be kept any more."""
        self._ack(state).result()

    def discard(
        self, batch: "Batch | int", rows: Sequence[SupportsIndex], *, reason: str = NOT_TRAINED
    ) -> None:
        """As :meth:`~tidegate.Rollouts.discard`; each rank says it of its own part."""
        self._discard(batch, rows, reason).result()

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> None:
        """As :meth:`~tidegate.Rollouts.pause`."""
        self._control("pause", mode=mode, clear_cache=clear_cache).result()

    def resume(self) -> None:
        """As :meth:`~tidegate.Rollouts.resume`."""
        self._control("resume").result()

    def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        mode: PauseMode = "abort",
    ) -> int:
        """As :meth:`~tidegate.Rollouts.sleep`."""
        asked = self._control("sleep", level=level, tags=list(tags), mode=mode)
        return int(value_of(asked.result()))

    def wake(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """As :meth:`~tidegate.Rollouts.wake`."""
        self._control("wake", tags=None if tags is None else list(tags)).result()

    def observe(
        self, *, effective_sample_size: float | None = None, mismatch_kl: float | None = None
    ) -> None:
        """As :meth:`~tidegate.Rollouts.observe`."""
        self._control(
            "observe", effective_sample_size=effective_sample_size, mismatch_kl=mismatch_kl
        ).result()


class RemoteRollouts(RemoteRun):
    """The same, for a trainer that is async. Use it in ``async with``."""

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self._open)
        except BaseException:
            self._close(is_done=False)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(is_done=kind is None)

    async def batches(
        self, tasks: Iterable[Any] | None = None, *, episode: str | None = None
    ) -> AsyncIterator["Batch"]:
        """As :meth:`SyncRemoteRollouts.batches`."""
        feeder = None
        if tasks is not None:
            feeder = self._feed(tasks, episode)
            await asyncio.wrap_future(feeder.offered)
            feeder.start()
        while True:
            batch = self._batch(await asyncio.wrap_future(self._link.ask(self._next_batch())))
            if batch is None:
                break
            yield batch
        if feeder is not None:
            feeder.raise_failure()

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor] | None" = None,
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """As :meth:`SyncRemoteRollouts.publish`."""
        asked = await asyncio.to_thread(self._publish, state_dict, wait=wait, partial=partial)
        return self._published(await asyncio.wrap_future(asked))

    async def rollback(
        self,
        state_dict: "Mapping[str, torch.Tensor] | None" = None,
        *,
        first_bad: int | None = None,
    ) -> int:
        """As :meth:`SyncRemoteRollouts.rollback`."""
        asked = await asyncio.to_thread(
            self._publish, state_dict, is_rollback=True, first_bad=first_bad
        )
        return self._published(await asyncio.wrap_future(asked))

    async def evaluate(self, tasks: Sequence[Any], *, episode: str | None = None) -> Evaluation:
        """As :meth:`SyncRemoteRollouts.evaluate`."""
        return Evaluation(rewards_of(await asyncio.wrap_future(self._evaluate(tasks, episode))))

    async def score(
        self,
        sequences: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        top_logprobs: int = 0,
        temperature: float = 1.0,
    ) -> list[TokenScores]:
        """As :meth:`SyncRemoteRollouts.score`."""
        asked = self._score(ask_logprobs(sequences, start, top_logprobs, temperature))
        return cast("list[TokenScores]", scores_of(await asyncio.wrap_future(asked)))

    async def embed(
        self,
        sequences: Sequence[Any],
        *,
        pooling: Pooling = "last",
        start: int | Sequence[int] = 0,
    ) -> list[Readout]:
        """As :meth:`SyncRemoteRollouts.embed`."""
        asked = self._score(ask_embeddings(sequences, pooling, start))
        return cast("list[Readout]", scores_of(await asyncio.wrap_future(asked)))

    async def reward(self, sequences: Sequence[Any]) -> list[Readout]:
        """As :meth:`SyncRemoteRollouts.reward`."""
        asked = self._score(ask_rewards(sequences))
        return cast("list[Readout]", scores_of(await asyncio.wrap_future(asked)))

    async def statistics(self) -> RunStatistics:
        """The run as of now."""
        return statistics_of(await asyncio.wrap_future(self._control("statistics")))

    async def ack(self, state: Mapping[str, Any]) -> None:
        """As :meth:`SyncRemoteRollouts.ack`."""
        await asyncio.wrap_future(self._ack(state))

    async def discard(
        self, batch: "Batch | int", rows: Sequence[SupportsIndex], *, reason: str = NOT_TRAINED
    ) -> None:
        """As :meth:`SyncRemoteRollouts.discard`."""
        await asyncio.wrap_future(self._discard(batch, rows, reason))

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> None:
        """As :meth:`~tidegate.Rollouts.pause`."""
        await asyncio.wrap_future(self._control("pause", mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """As :meth:`~tidegate.Rollouts.resume`."""
        await asyncio.wrap_future(self._control("resume"))

    async def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        mode: PauseMode = "abort",
    ) -> int:
        """As :meth:`~tidegate.Rollouts.sleep`."""
        asked = self._control("sleep", level=level, tags=list(tags), mode=mode)
        return int(value_of(await asyncio.wrap_future(asked)))

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """As :meth:`~tidegate.Rollouts.wake`."""
        tags = None if tags is None else list(tags)
        await asyncio.wrap_future(self._control("wake", tags=tags))

    async def observe(
        self, *, effective_sample_size: float | None = None, mismatch_kl: float | None = None
    ) -> None:
        """As :meth:`~tidegate.Rollouts.observe`."""
        asked = self._control(
            "observe", effective_sample_size=effective_sample_size, mismatch_kl=mismatch_kl
        )
        await asyncio.wrap_future(asked)


def connect(
    address: str,
    *,
    keys: str | Path | EngineKeys | None = None,
    rank: int = 0,
    world_size: int = 1,
    resume: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 60.0,
    run_timeout_s: float = 60.0,
) -> RemoteRollouts:
    """Be the trainer of a run in another process, which calls ``listen(address)``; for async code.

    ``keys`` is a directory that ``tidegate keys`` made, for addresses on other hosts. Each of
    ``world_size`` data-parallel processes connects with its own ``rank`` and gets its part of each
    batch. ``resume`` goes on from a ``state_dict()`` of the trainer's checkpoint: what was handed
    over after it comes again, as long as the run keeps it.

    The run need not be there yet: it, and the seat of a process that has died, are waited for
    ``connect_timeout_s``. A run that is silent for ``run_timeout_s`` is given up.

    Raises:
        ConfigError: nobody can connect there, or so.
    """
    return RemoteRollouts(
        address,
        keys=keys,
        rank=rank,
        world_size=world_size,
        resume=resume,
        connect_timeout_s=connect_timeout_s,
        run_timeout_s=run_timeout_s,
    )


def connect_sync(
    address: str,
    *,
    keys: str | Path | EngineKeys | None = None,
    rank: int = 0,
    world_size: int = 1,
    resume: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 60.0,
    run_timeout_s: float = 60.0,
) -> SyncRemoteRollouts:
    """As :func:`connect`, for code that is not async."""
    return SyncRemoteRollouts(
        address,
        keys=keys,
        rank=rank,
        world_size=world_size,
        resume=resume,
        connect_timeout_s=connect_timeout_s,
        run_timeout_s=run_timeout_s,
    )
