"""Handler of a remote trainer's requests: the run's single trainer, on behalf of all ranks.

The listener calls :class:`TrainerService` for each request. It requests batches and publishes once
for all ranks, and has ranks wait for each other; `ranks.py` records which process holds a rank.
:class:`TaskPipe` brings the trainer's tasks to the run.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.hand_over import batches_of_publish
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.fleet.scores import ScoreQuery
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.remote.columns import scores_to_wire
from tidegate.orchestrator.trainer.remote.progress import PublishKey, TrainerProgress
from tidegate.orchestrator.trainer.remote.ranks import Barrier, RankRegistry
from tidegate.orchestrator.trainer.remote.sharded_publish import ShardedPublishes
from tidegate.orchestrator.trainer.remote.weight_transfer import ReceivedWeights
from tidegate.orchestrator.trainer.rollouts import Rollouts
from tidegate.orchestrator.trainer.weight_updates import CollectParts
from tidegate.transport import trainer_messages as wire

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch


TASKS_WAITING_MAX = 4
"""Tasks prefetched to hide the network's latency: few, because the trainer's iterator may choose
tasks by what was trained so far."""


class TaskPipe:
    """Bounded async queue of tasks, across two event loops; the consumer iterates over it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: deque[object] = deque()
        self._changed = asyncio.Condition()
        self._is_over = False

    async def put(self, tasks: list[object], *, is_end: bool) -> bool:
        """Add tasks and wait until the queue accepts more; return False once it is closed."""
        async with self._changed:
            if self._is_over:
                return False
            self._tasks += tasks
            self._is_over = is_end
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: self._is_over or len(self._tasks) < TASKS_WAITING_MAX
            )
            return not self._is_over

    async def close(self) -> None:
        """Refuse further tasks; queued tasks can still be taken."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        """Return the next task. May be called on any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        tasks = await asyncio.wrap_future(future)
        if not tasks:
            raise StopAsyncIteration
        return tasks[0]

    async def _take(self) -> list[object]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._tasks or self._is_over)
            taken = [self._tasks.popleft()] if self._tasks else []
            self._changed.notify_all()
            return taken


AnswerAndFrames = tuple[wire.AnyTrainerReply, Sequence[bytes]]


@dataclass(slots=True)
class _Publish:
    """Outcome of one publish."""

    version: "asyncio.Future[int]"
    ranks_done: set[int] = field(default_factory=set)
    """Ranks for which a failed publish is over: they got its failure, or joined after it. If one of
    them calls again, it tries anew."""


class TrainerService:
    """Handles the requests of all ranks of one trainer."""

    def __init__(
        self,
        rollouts: Rollouts,
        ranks: RankRegistry,
        barrier: Barrier,
        *,
        run_id: str,
        episodes: Mapping[str, EpisodeFunction],
        has_own_tasks: bool,
    ) -> None:
        """``episodes`` by the names that a trainer gives; the empty name is the default."""
        self._rollouts = rollouts
        self._ranks = ranks
        self._barrier = barrier
        self._run_id = run_id
        self._episodes = episodes
        self._has_own_tasks = has_own_tasks
        self.progress = TrainerProgress()
        self.progress.begin_after(rollouts.batches_received)
        self._published: dict[PublishKey, _Publish] = {}
        self._waiting: Counter[int] = Counter()
        """Number of requests for a batch that each rank waits for."""
        self._ahead: set[tuple[int, int]] = set()
        """(rank, batch) of the batches that a rank requested while it held all of a version."""
        self._repeated_to = 0
        """Number of the last batch that a restarted trainer gets again. If a version was made from
        such a batch before the restart, no publish can name the batch again."""
        self._fetching: asyncio.Task[Batch | None] | None = None
        self._has_ended = not has_own_tasks
        """Whether the run has no tasks, because they are used up or not offered yet."""
        self._pipe: tuple[str, TaskPipe] | None = None
        self._publishing = asyncio.Lock()
        self._sharded = ShardedPublishes(self.progress, barrier, self._publish_parts)

    async def close(self) -> None:
        """Cancel the pending request for a batch, and a publish of parts."""
        await self._sharded.close()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    async def answer(
        self, rank: int, weights: ReceivedWeights, ask: wire.TrainerRequest, data: bytes
    ) -> AnswerAndFrames:
        """Execute a request of a rank; return the answer and its frames.

        Raises:
            TidegateError: the request is refused, or failed.
        """
        match ask:
            case wire.NextBatch():
                if ask.reads_advantages:
                    self._rollouts.columns_read.add("advantages")
                return await self._next_batch(rank, ask.after_batch)
            case wire.PrepareParts():
                self.progress.set_ready(rank, ask.batch_number)
                return await self._sharded.prepare(rank, ask), ()
            case wire.PublishWeights() if ask.plan:
                reply = await self._sharded.send(rank, weights, ask)
                if isinstance(reply, wire.PublishReply):
                    self._set_done(rank, ask.batch_number, (await self._held())[0])
                return reply, ()
            case wire.PublishWeights():
                return wire.PublishReply(version=await self._publish(rank, weights, ask)), ()
            case wire.UploadChunk():
                weights.take(ask, data)
                return wire.ResultReply(), ()
            case wire.OpenTaskStream():
                await self._offer(rank, ask)
                return wire.ResultReply(), ()
            case wire.SendTasks():
                is_wanted = await self._pipe_of(ask.stream).put(ask.tasks, is_end=ask.is_last)
                return wire.ResultReply(value=is_wanted), ()
            case wire.Evaluate():
                evaluation = await self._rollouts.evaluate(
                    ask.tasks,
                    episode=self._episode_of(ask.episode),
                    name=ask.name,
                    version=ask.version,
                )
                return wire.EvaluateReply(rewards=evaluation.rewards), ()
            case wire.ScoreSequences():
                queries = [ScoreQuery(*fields) for fields in ask.requests]
                return scores_to_wire(await self._rollouts.score_queries(queries))
            case wire.ControlRun():
                return wire.ResultReply(value=await self._control(ask)), ()
        raise ConfigError(
            f"the run doesn't handle requests of type {type(ask).__name__}; install the same "
            "Tidegate version on both"
        )

    # ------------------------------------------------------------ ranks

    def begin(self, world_size: int) -> None:
        """Start over with a new trainer of this many ranks."""
        self.progress.begin(world_size)

    async def join(
        self, rank: int, ask: wire.JoinRun, weights: ReceivedWeights
    ) -> wire.TrainerWelcome:
        """Welcome a process that has joined as a rank; the answer says where it continues."""
        if rank == 0:
            async with self._publishing:  # an earlier process of the rank may still publish
                self._published.clear()
            self._repeated_to = self.progress.newest
        for publish in self._published.values():
            publish.ranks_done.add(rank)
        self._sharded.rank_joined(rank)
        batches = self.progress.join(rank, ask.last_batch)
        self._ahead = {each for each in self._ahead if each[0] != rank}
        if rank == 0:
            await self._settle_held(batches)
        self._barrier.notify()
        return wire.TrainerWelcome(
            run_id=self._run_id,
            version=self._rollouts.version,
            last_batch=batches,
            is_resumed=self._rollouts.is_resumed and self.progress.newest == self.progress.done,
            journal=self._journal(batches),
            reads_shared_memory=weights.reads_shared_memory,
        )

    async def _settle_held(self, batches: int) -> None:
        """Count the batches that an earlier process of rank 0 was done with as trained. No publish
        of the new process can name them: it gets none of them again."""

        async def settle(scheduler: Scheduler) -> None:
            held = scheduler.core.handed.held
            if done := tuple(each.number for each in held if each.number <= batches):
                scheduler.trainer.handle(ev.BatchesTrained(done))

        await self._rollouts._do(settle)

    def left(self, rank: int) -> None:
        """Record that a rank's process has left."""
        self.progress.leave(rank)
        self._barrier.notify()

    # ------------------------------------------------------------ batches

    async def _next_batch(self, rank: int, after: int) -> AnswerAndFrames:
        self._waiting[rank] += 1
        try:
            return await self._batch_after(rank, after)
        finally:
            self._waiting[rank] -= 1

    async def _batch_after(self, rank: int, after: int) -> AnswerAndFrames:
        progress, number = self.progress, after + 1
        progress.requested[rank] = number
        held, per_version, _ = await self._held()
        self._set_done(rank, after, held)
        if sum(each <= after for each in held) >= per_version:
            self._ahead.add((rank, number))
        while progress.newest < number:
            if self._has_ended:
                return wire.NoMoreBatches(), ()
            next_number = progress.newest + 1
            if self._fetching is None:
                await self._barrier.wait_until(
                    lambda n=next_number: (
                        progress.newest >= n  # type: ignore[misc]
                        or self._fetching is not None
                        or self._has_ended
                        or not progress.without_request(n)
                    ),
                    lambda n=next_number: progress.without_request(n),  # type: ignore[misc]
                    doing=f"waiting for all ranks to request batch {next_number}",
                )
            if progress.newest < next_number and not self._has_ended:
                await asyncio.shield(self._start_fetch())
        return self._shard(number, rank)

    def _set_done(self, rank: int, number: int, held: list[int]) -> None:
        """Record that a rank is done with this batch and all before it; rank 0 with no batch that
        no version was made from (``held``), because it may have asked ahead."""
        if rank == 0:
            number = min([number, *(each - 1 for each in held)])
        self.progress.set_consumed(rank, number)
        self._barrier.notify()

    def _shard(self, number: int, rank: int) -> AnswerAndFrames:
        from tidegate.orchestrator.trainer.remote.batch_wire import batch_to_wire  # torch

        shard = self.progress.shard(number, rank)
        return batch_to_wire(
            shard,
            self._journal(number),
            version=self._rollouts.version,
            is_ahead=(rank, number) in self._ahead,
        )

    def _start_fetch(self) -> "asyncio.Task[Batch | None]":
        """Request the run's next batch, once for all ranks. It continues if all ranks vanish."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch(), name="next batch")
            self._fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._fetching

    async def _fetch(self) -> "Batch | None":
        try:
            batch = await self._rollouts.next_batch()
            if batch is None:
                self._has_ended = True
            else:
                held, _, _ = await self._held()
                self.progress.add_batch(batch, min(held, default=batch.number))
            return batch
        finally:
            self._fetching = None
            self._barrier.notify()

    def _journal(self, trained: int) -> dict[str, Any] | None:
        if not self._rollouts.settings.records.journal:
            return None
        return self._rollouts.state_dict(trained=min(trained, self._rollouts.batches_received))

    # ------------------------------------------------------------ tasks

    async def _offer(self, rank: int, ask: wire.OpenTaskStream) -> None:
        if self._has_own_tasks:
            raise ConfigError(
                "this run has its own tasks, from listen(tasks=…); call batches() without tasks"
            )
        if rank:
            raise ConfigError(f"rank {rank} offers tasks; only rank 0 may, on behalf of all ranks")
        if self._rollouts.settings.records.journal:
            raise ConfigError(
                "a run with a journal can't use a trainer's tasks, because a resume needs the "
                "same tasks again; pass them to listen(tasks=…)"
            )
        episode = self._episode_of(ask.episode)
        before, self._pipe = self._pipe, (ask.stream, TaskPipe())
        if before is not None:
            await before[1].close()
        await self._rollouts.offer(self._pipe[1], episode=episode)
        self._has_ended = False
        self._barrier.notify()

    def _pipe_of(self, offer: str) -> TaskPipe:
        if self._pipe is None or self._pipe[0] != offer:
            raise ConfigError(
                "a later batches() of this trainer has replaced these tasks; use the later iterator"
            )
        return self._pipe[1]

    def _episode_of(self, name: str) -> EpisodeFunction:
        episode = self._episodes.get(name)
        if episode is None:
            known = ", ".join(repr(known) for known in self._episodes if known) or "none"
            raise ConfigError(
                f"the run has no episode {name!r}: listen(episode=…) sets the unnamed one, "
                f"listen(episodes=…) the named ones, which are: {known}"
            )
        return episode

    # ------------------------------------------------------------ weights

    async def _publish(self, rank: int, weights: ReceivedWeights, ask: wire.PublishWeights) -> int:
        self.progress.set_ready(rank, ask.batch_number)
        self._barrier.notify()
        key = (ask.batch_number, ask.publish_index)
        if rank:
            version = await self._published_by_rank_0(key, rank, is_named=bool(ask.batches))
        else:
            version = await self._publish_once(key, weights, ask)
        self._set_done(rank, ask.batch_number, (await self._held())[0])
        return version

    async def _publish_once(
        self, key: PublishKey, weights: ReceivedWeights, ask: wire.PublishWeights
    ) -> int:
        progress, number = self.progress, ask.batch_number

        def behind() -> list[int]:
            return [r for r in progress.behind(number) if not self._ranks.is_done(r)]

        version: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        version.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            doing = f"waiting for all ranks to be done with batch {number}, to publish"
            await self._barrier.wait_until(lambda: not behind(), behind, doing=doing)
            async with self._publishing:
                await self._give_back_orphans(number)
                version.set_result(await self._publish_received(weights, ask))
        except Exception as error:
            version.set_exception(error)
            raise
        finally:
            self._published[key] = _Publish(version)
            self._barrier.notify()
        return version.result()

    async def _give_back_orphans(self, number: int) -> None:
        """Return batches to the run that only dead processes had received.

        The weights to be published were not made from these batches, and the publish makes them one
        version older, so the run selects their groups again.
        """
        while (orphan := self.progress.orphan_after(number)) is not None:
            if not await self._rollouts.return_batch(orphan):
                return
            self.progress.returned(orphan)

    async def _publish_received(self, weights: ReceivedWeights, ask: wire.PublishWeights) -> int:
        state_dict = weights.state_dict(ask)
        if ask.is_rollback:
            return await self._rollouts.rollback(state_dict, first_bad=ask.first_bad)
        batches = await self._batches_of(ask)
        return await self._rollouts.publish(
            state_dict, batches=batches, wait=ask.wait, partial=ask.partial
        )

    async def _held(self) -> tuple[list[int], int, bool]:
        """Return the batches that no publish has named, how many a version is made from, and
        whether one was lost since the last publish."""

        async def read(scheduler: Scheduler) -> tuple[list[int], int, bool]:
            handed = scheduler.core.handed
            held = [batch.number for batch in handed.held]
            return held, scheduler.core.policy.batches_per_version, handed.has_lost

        return await self._rollouts._do(read)

    async def _batches_of(self, ask: wire.PublishWeights | wire.PrepareParts) -> Sequence[int]:
        """Return the batches that a publish of rank 0 is made from.

        What rank 0 holds is decided here, because the run's requests are made for all ranks. A
        batch that a restarted trainer trains on again is in an earlier version.

        Raises:
            PublishUnclear: rank 0 doesn't say, and it has requested a batch ahead.
        """
        if ask.batches is None and (ask.partial or ask.is_rollback):
            return ()
        held, per_version, has_lost = await self._held()
        if ask.batches is not None:
            return [n for n in ask.batches if n in held or n > self._repeated_to]
        own = [number for number in held if number <= ask.batch_number]
        is_ahead = self._waiting[0] > 0 or any((0, number) in self._ahead for number in own)
        self._ahead = {each for each in self._ahead if each[1] >= min(own, default=0)}
        return batches_of_publish(
            own, batches_per_version=per_version, is_ahead=is_ahead, has_lost=has_lost
        )

    async def _publish_parts(self, ask: wire.PrepareParts, collect: CollectParts) -> int:
        """Publish the parts of all ranks, which have announced them; return the version."""
        async with self._publishing:
            await self._give_back_orphans(ask.batch_number)
            version = await self._rollouts._publish_parts(
                collect,
                batches=await self._batches_of(ask),
                wait=ask.wait,
                partial=ask.partial,
                is_rollback=ask.is_rollback,
                first_bad=ask.first_bad,
            )
        return version

    async def _published_by_rank_0(self, key: PublishKey, rank: int, *, is_named: bool) -> int:
        """Wait for rank 0's publish; return its version, or raise its failure, once per rank."""

        def has_ended() -> bool:
            publish = self._published.get(key)
            return publish is not None and rank not in publish.ranks_done

        def was_skipped() -> bool:
            has_requested = self.progress.requested.get(0, 0) > key[0]
            may_publish = is_named and self.progress.consumed.get(0, 0) < key[0]
            return (has_requested and not may_publish) or self._ranks.is_done(0)

        await self._barrier.wait_until(
            lambda: has_ended() or was_skipped(),
            lambda: [0],
            doing=f"waiting for rank 0 to publish after batch {key[0]}",
        )
        if not has_ended():
            raise ConfigError(
                f"rank 0 has continued from batch {key[0]} without this publish; call publish() "
                f"equally often on all ranks, or on rank 0 alone; ranks that prefetch all name "
                f"the batches: publish(batches=[batch])"
            )
        publish = self._published[key]
        try:
            return publish.version.result()
        except Exception:
            publish.ranks_done.add(rank)
            raise

    # ------------------------------------------------------------ small requests

    async def _control(self, ask: wire.ControlRun) -> Any:
        run, values = self._rollouts, ask.arguments
        if ask.action == "statistics":
            return await asyncio.to_thread(run.statistics)
        if ask.action == "ack":
            self.progress.acknowledge(int(values["batches"]))
            return None if values["journal"] is None else await run.ack(values["journal"])
        return await getattr(run, ask.action)(**values)  # which checks them
