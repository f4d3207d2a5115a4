"""Client handles of a run in another process, for one rank of a trainer: async and sync.

    async with tidegate.connect("tcp://host:5600", curve_key_directory="trainer") as rollouts:
        async for batch in rollouts.batches():
            train_step(batch)
            await rollouts.publish(model.state_dict(), batches=[batch])

Each of several data-parallel ranks gets its part of each batch.
:class:`~tidegate.orchestrator.trainer.remote.link.TrainerLink` sends requests over ZeroMQ, and
`listener.py` answers them.
"""

import concurrent.futures
import contextlib
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import msgspec
from typing_extensions import override

from tidegate.errors import BadFrame, ConfigError, ResumeMismatch, RunLost, TidegateError
from tidegate.orchestrator.batches.tasks import NO_MORE
from tidegate.orchestrator.core.control_events import PublishWait
from tidegate.orchestrator.episodes.tracebacks import shorten_tracebacks
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.trainer.discarded_rows import NOT_TRAINED, discarded_rows
from tidegate.orchestrator.trainer.handle import (
    HELD_OUT,
    BatchesOfPublish,
    Evaluation,
    RunHandle,
    RunRequests,
    SyncHandle,
    SyncTrainerHandle,
    TrainerHandle,
    blocking,
    in_thread,
    numbers_of,
    result_of,
    run_blocking,
)
from tidegate.orchestrator.trainer.remote.columns import scores_from_wire
from tidegate.orchestrator.trainer.remote.link import ReceivedReply, RetryLater, TrainerLink
from tidegate.orchestrator.trainer.remote.progress import PublishKey
from tidegate.orchestrator.trainer.remote.weight_transfer import WeightUpload
from tidegate.transport import trainer_messages as wire
from tidegate.transport.security import EngineKeys, read_engine_keys

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.orchestrator.weight_sync.state_dict import LocalShard

RETRY_INTERVAL_S = 0.5
"""Time between two attempts to join as a rank that another process holds."""

JOIN_INTERVAL_S = 5.0
"""Time after which a join request without an answer is sent again."""


class RemoteState(msgspec.Struct, frozen=True):
    """Position in a remote run, as a trainer's checkpoint holds it."""

    run_id: str
    batches: int
    """Number of the last batch that the checkpoint's weights were made from."""
    journal: dict[str, Any] | None = None
    """State for ``serve(resume=…)``, if the run itself must be started again."""


class RemoteRequests(RunRequests):
    """Request interface of a run in another process: carries requests over the link."""

    def __init__(self, link: TrainerLink) -> None:
        self._link = link

    @override
    async def control(self, action: wire.ControlAction, **arguments: Any) -> Any:
        request = wire.ControlRun(action=action, arguments=arguments)
        received = await result_of(self._link.request(request))
        assert isinstance(received.reply, wire.ResultReply)
        return received.reply.value

    @override
    async def score(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        request = wire.ScoreSequences(requests=[list(astuple(query)) for query in queries])
        received = await result_of(self._link.request(request))
        assert isinstance(received.reply, wire.ScoresReply)
        return scores_from_wire(received.reply, received.frames)


class RemoteRollouts(RunHandle, TrainerHandle):
    """Async handle of a run in another process, for one rank of its trainer."""

    def __init__(
        self,
        address: str,
        *,
        keys: EngineKeys | None = None,
        rank: int = 0,
        world_size: int = 1,
        resume: Mapping[str, Any] | None = None,
        connect_timeout_s: float = 60.0,
        run_timeout_s: float = 60.0,
    ) -> None:
        TrainerHandle.__init__(self)
        self.address = address
        self.rank = rank
        self.world_size = world_size
        self._keys = keys
        self._resume = None if resume is None else _state(resume)
        self._connect_timeout_s = connect_timeout_s
        self._run_timeout_s = run_timeout_s
        self._link_or_none: TrainerLink | None = None
        self._weights = WeightUpload()
        self._welcome: wire.TrainerWelcome | None = None
        self._published_after = (0, 0)
        """Batch that the last publish followed, and number of publishes after that batch."""
        self._journal: dict[str, Any] | None = None
        self._columns_read: set[str] = set()
        """:attr:`Batch.columns_read` of all batches of this handle."""

    @property
    @override
    def is_resumed(self) -> bool:
        """Whether the trainer must publish its checkpoint's weights first.

        True if ``resume`` was given, or the run itself continues an earlier one.
        """
        return self._resume is not None or self._welcomed.is_resumed

    @override
    def state_dict(self, *, trained: "Batch | int | None" = None) -> dict[str, Any]:
        """Return this trainer's position, for its checkpoint; ``connect(resume=…)`` takes it.

        ``trained``: as of :meth:`tidegate.Rollouts.state_dict`. If the run itself must be
        restarted, pass the state's ``journal`` to ``serve(resume=…)``.
        """
        batches = self._batches_of_checkpoint(trained)
        journal = None if self._journal is None else {**self._journal, "batches": batches}
        return msgspec.structs.asdict(RemoteState(self._welcomed.run_id, batches, journal))

    # ------------------------------------------------------------ the connection

    @property
    def _link(self) -> TrainerLink:
        if self._link_or_none is None:
            raise RuntimeError("not connected; use it in a `with` statement")
        return self._link_or_none

    @property
    def _welcomed(self) -> wire.TrainerWelcome:
        if self._welcome is None:
            raise RuntimeError("not connected; use it in a `with` statement")
        return self._welcome

    def _open(self) -> None:
        """Join the run as this rank. Blocks until the run listens and the rank is free.

        Raises:
            RunLost: no run answered, or another process held the rank, until the timeout.
            ConfigError, ResumeMismatch: the run refuses this trainer.
        """
        if self._link_or_none is not None:
            raise RuntimeError("a connection can't be used twice; call connect() again")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in [0, world_size), got rank={self.rank}, "
                f"world_size={self.world_size}"
            )
        link = TrainerLink(self.address, self._keys, run_timeout_s=self._run_timeout_s)
        self._link_or_none = link
        join = wire.JoinRun(
            protocol=wire.PROTOCOL,
            rank=self.rank,
            world_size=self.world_size,
            run_id="" if self._resume is None else self._resume.run_id,
            last_batch=None if self._resume is None else self._resume.batches,
            shared_memory=self._weights.init,
        )
        until_s, why = time.monotonic() + self._connect_timeout_s, "no run answered"
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                received = link.request(join).result(min(left_s, JOIN_INTERVAL_S))
            except RetryLater as refusal:
                why = str(refusal)
                time.sleep(min(RETRY_INTERVAL_S, left_s))
                continue
            except TimeoutError:
                continue  # a run that was restarted meanwhile has not received the request
            link.has_joined = True
            self._take_welcome(received.reply)
            return
        raise RunLost(
            f"could not join the run at {self.address} within {self._connect_timeout_s:.0f} s: "
            f"{why}"
        )

    def _take_welcome(self, answer: wire.AnyTrainerReply) -> None:
        assert isinstance(answer, wire.TrainerWelcome)
        self._welcome = answer
        self._received, self._version = answer.last_batch, answer.version
        self._journal = answer.journal
        self._weights.reads_shared_memory = answer.reads_shared_memory

    @override
    async def _enter(self) -> None:
        await in_thread(self._open)

    @override
    def _exit(self, error: BaseException | None) -> None:
        if self._link_or_none is not None:
            if self._link_or_none.owner_pid != os.getpid():
                return  # a forked process: the connection is its parent's
            self._link_or_none.close(is_done=error is None)
        self._weights.close()

    def _batch(self, received: ReceivedReply) -> "Batch | None":
        from tidegate.orchestrator.trainer.remote.batch_wire import batch_from_wire  # torch

        if isinstance(received.reply, wire.NoMoreBatches):
            return None
        assert isinstance(received.reply, wire.BatchReply)
        batch = replace(
            batch_from_wire(received.reply, received.frames), columns_read=self._columns_read
        )
        self._received = batch.number
        self._is_ahead = received.reply.is_ahead
        self._version = max(self._version, received.reply.version)
        self._journal = received.reply.journal
        return batch

    def _next_batch(self) -> wire.NextBatch:
        return wire.NextBatch(
            after_batch=self._received, reads_advantages="advantages" in self._columns_read
        )

    async def _publish(
        self, state_dict: "Mapping[str, torch.Tensor | LocalShard] | None", **how: Any
    ) -> int:
        publish, answer = await in_thread(self._send_publish, state_dict, **how)
        return self._published(await result_of(answer), publish)

    def _send_publish(
        self,
        state_dict: "Mapping[str, torch.Tensor | LocalShard] | None",
        *,
        batches: list[int] | None = None,
        wait: PublishWait = "live",
        partial: bool = False,
        is_rollback: bool = False,
        first_bad: int | None = None,
    ) -> "tuple[wire.PublishWeights, concurrent.futures.Future[ReceivedReply]]":
        """Bring the weights to the run, which blocks, and request their publish."""
        number, index = self._publish_key(batches)
        publish = wire.PublishWeights(
            batch_number=number,
            publish_index=index,
            wait=wait,
            partial=partial,
            is_rollback=is_rollback,
            first_bad=first_bad,
            batches=batches,
        )
        if self.rank == 0:
            if state_dict is None:
                raise ConfigError(
                    "rank 0 publishes for all ranks, and got state_dict=None; pass the weights on "
                    "rank 0"
                )
            from tidegate.orchestrator.weight_sync.state_dict import without_shards  # torch

            publish = self._weights.send(self._link, without_shards(state_dict), publish)
        return publish, self._link.request(publish)

    def _prepare(self, *, batches: list[int] | None = None, **how: Any) -> wire.PrepareParts:
        number, index = self._publish_key(batches)
        return wire.PrepareParts(
            batch_number=number,
            publish_index=index,
            held=self._weights.held_plan,
            batches=batches,
            **how,
        )

    def _publish_key(self, batches: list[int] | None) -> PublishKey:
        """Return what the calls of all ranks for one publish have in common.

        A rank may have received more batches than another, so the named ones count if there are
        any.
        """
        number = max(batches or [self._received])
        last, publishes = self._published_after
        return number, publishes if number == last else 0

    async def _publish_sharded(
        self,
        state_dict: "Mapping[str, torch.Tensor | LocalShard] | None",
        prepare: wire.PrepareParts,
    ) -> int:
        """Publish this rank's parts together with the other ranks'; return the version."""
        if state_dict is None:
            raise ConfigError(
                "publish(sharded=True) sends each rank's own shards, and rank "
                f"{self.rank} got state_dict=None; pass its state dict on every rank"
            )
        from tidegate.orchestrator.weight_sync.state_dict import own_parts  # torch

        publish = wire.PublishWeights(
            batch_number=prepare.batch_number, publish_index=prepare.publish_index
        )
        plan = (await result_of(self._link.request(prepare))).reply
        assert isinstance(plan, wire.PartsPlan)
        parts = await in_thread(own_parts, state_dict, rank=self.rank)
        while True:
            sent = await in_thread(self._weights.send_parts, self._link, parts, plan, publish)
            received = await result_of(self._link.request(sent))
            if not isinstance(received.reply, wire.SendWholeParts):
                return self._published(received, prepare)
            plan = msgspec.structs.replace(plan, are_patches=False)

    def _published(
        self, received: ReceivedReply, publish: wire.PublishWeights | wire.PrepareParts
    ) -> int:
        assert isinstance(received.reply, wire.PublishReply)
        self._published_after = (publish.batch_number, publish.publish_index + 1)
        self._version = max(self._version, received.reply.version)
        return received.reply.version

    @property
    def _requests(self) -> RemoteRequests:
        return RemoteRequests(self._link)

    # ------------------------------------------------------------ batches

    async def batches(
        self, tasks: Iterable[Any] | None = None, *, episode: str | None = None
    ) -> AsyncIterator["Batch"]:
        """Yield this rank's part of each batch, until the run's tasks are used up.

        If the run listens without tasks, rank 0 passes them: an iterable of values that MessagePack
        can hold (tuples become lists), for an ``episode`` that the run has registered by name.

        If the trainer's processes die, those that replace them get every batch again that no
        version was made from, unless an acknowledged checkpoint has it.

        Raises:
            TrainerLost: another rank is lost.
            RunLost: the run is lost.
            EngineLost, EpisodeError, PublishNeeded: as :meth:`~tidegate.Rollouts.batches`.
        """
        feeder = None if tasks is None else await self.offer(tasks, episode)
        while (batch := await self.next_batch()) is not None:
            yield batch
        if feeder is not None:
            feeder.raise_failure()

    async def offer(self, tasks: Iterable[Any], episode: str | None) -> "TaskFeeder":
        """Open a stream of this trainer's tasks, which the run's ``episode`` function will run.

        Returns a :class:`TaskFeeder`, whose thread sends tasks as the run requests them. Afterwards
        :meth:`next_batch` returns their batches. :meth:`batches` calls both.
        """
        feeder = TaskFeeder(self._link, tasks, episode)
        await result_of(feeder.offered)
        feeder.start()
        return feeder

    async def next_batch(self) -> "Batch | None":
        """Return this rank's part of the next batch, or None once the tasks are used up."""
        return self._batch(await result_of(self._link.request(self._next_batch())))

    async def discard(
        self, batch: "Batch | int", rows: Sequence[SupportsIndex], *, reason: str = NOT_TRAINED
    ) -> None:
        """As :meth:`~tidegate.Rollouts.discard`; each rank reports rows of its own part."""
        chosen = discarded_rows(batch, rows, reason)
        await self._requests.control(
            "discard", batch=chosen.batch, rows=chosen.rows, reason=chosen.reason
        )

    async def report_off_policyness(
        self, *, effective_sample_size: float | None = None, mismatch_kl: float | None = None
    ) -> None:
        """As :meth:`~tidegate.Rollouts.report_off_policyness`."""
        await self._requests.control(
            "report_off_policyness",
            effective_sample_size=effective_sample_size,
            mismatch_kl=mismatch_kl,
        )

    async def ack(self, state: Mapping[str, Any]) -> None:
        """Acknowledge that this ``state_dict()`` is on disk; the run drops older batches."""
        saved = _state(state)
        await self._requests.control("ack", batches=saved.batches, journal=saved.journal)

    async def evaluate(
        self,
        tasks: Sequence[Any],
        *,
        episode: str | None = None,
        name: str | None = HELD_OUT,
        version: int | None = None,
    ) -> Evaluation:
        """As :meth:`~tidegate.Rollouts.evaluate`, with an episode that the run has registered by
        name."""
        request = wire.Evaluate(
            tasks=list(tasks), episode=episode or "", name=name, version=version
        )
        received = await result_of(self._link.request(request))
        assert isinstance(received.reply, wire.EvaluateReply)
        return Evaluation(received.reply.rewards)

    async def statistics(self) -> RunStatistics:
        """Return a snapshot of the run."""
        return msgspec.convert(
            await self._requests.control("statistics"), RunStatistics, strict=False
        )

    # ------------------------------------------------------------ weights

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor | LocalShard] | None" = None,
        *,
        draft: "Mapping[str, torch.Tensor] | None" = None,
        batches: BatchesOfPublish = None,
        wait: PublishWait = "live",
        partial: bool = False,
        sharded: bool = False,
    ) -> int:
        """Bring rank 0's weights to the engines once every rank is done; return their version.

        The other ranks either call this equally often, without weights, and get the same version;
        or they request the next batch instead. Otherwise as :meth:`~tidegate.Rollouts.publish`;
        the ``batches`` and the ``draft`` of rank 0 count, or the batches' numbers.

        With ``sharded``, every rank calls this with its own state dict, and sends its own shards of
        the DTensors there, and its :class:`tidegate.LocalShard` values, gathering nothing; tensors
        of other kinds are rank 0's. With ``weight_deltas="elements"`` each rank makes patches from
        a copy of its shards.

        Raises:
            TrainerLost: a rank that is waited for is lost.
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`~tidegate.Rollouts.publish`.
        """
        numbers = numbers_of(batches, None)
        named = None if numbers is None else list(numbers)
        if sharded and draft is not None:
            raise ConfigError(
                "publish(sharded=True) sends no draft model's weights; have rank 0 publish them "
                "before, by publish({}, draft=…, partial=True, batches=[])"
            )
        if draft is not None and state_dict is not None:
            from tidegate.orchestrator.weight_sync.state_dict import with_draft, without_shards

            state_dict = with_draft(without_shards(state_dict), draft)
        if sharded:
            prepare = self._prepare(wait=wait, partial=partial, batches=named)
            version = await self._publish_sharded(state_dict, prepare)
        else:
            version = await self._publish(state_dict, batches=named, wait=wait, partial=partial)
        self._named = max(self._named, *named or (), 0)
        return version

    async def rollback(
        self,
        state_dict: "Mapping[str, torch.Tensor | LocalShard] | None" = None,
        *,
        first_bad: int | None = None,
        sharded: bool = False,
    ) -> int:
        """As :meth:`~tidegate.Rollouts.rollback`, with ranks as in :meth:`publish`."""
        if sharded:
            prepare = self._prepare(is_rollback=True, first_bad=first_bad)
            return await self._publish_sharded(state_dict, prepare)
        return await self._publish(state_dict, is_rollback=True, first_bad=first_bad)

    async def train_adapter(self, name: str, **staleness: Any) -> None:
        """Refuse: a remote trainer trains the run's weights.

        Raises:
            ConfigError: always; it says where adapters are trained.
        """
        raise ConfigError(
            f"a remote trainer trains the run's weights, not adapter {name!r}; call "
            f"train_adapter({name!r}) in the process that calls serve(), which can train several"
        )


class SyncRemoteRollouts(SyncTrainerHandle, SyncHandle[RemoteRollouts]):
    """Sync variant of :class:`RemoteRollouts`, whose calls block."""

    _handle: RemoteRollouts

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._handle.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the trainer."""
        return self._handle.world_size

    def batches(
        self, tasks: Iterable[Any] | None = None, *, episode: str | None = None
    ) -> Iterator["Batch"]:
        """As :meth:`RemoteRollouts.batches`."""
        feeder = None if tasks is None else self.offer(tasks, episode)
        while (batch := self.next_batch()) is not None:
            yield batch
        if feeder is not None:
            feeder.raise_failure()

    offer = blocking(RemoteRollouts.offer)
    next_batch = blocking(RemoteRollouts.next_batch)
    discard = blocking(RemoteRollouts.discard)
    report_off_policyness = blocking(RemoteRollouts.report_off_policyness)
    ack = blocking(RemoteRollouts.ack)
    evaluate = blocking(RemoteRollouts.evaluate)
    statistics = blocking(RemoteRollouts.statistics)
    publish = blocking(RemoteRollouts.publish)
    rollback = blocking(RemoteRollouts.rollback)

    def train_adapter(self, name: str, **staleness: Any) -> None:
        """As :meth:`RemoteRollouts.train_adapter`."""
        run_blocking(self._handle.train_adapter(name, **staleness))


class TaskFeeder:
    """Thread that sends a trainer's own tasks to the run, as fast as the run accepts them."""

    def __init__(self, link: TrainerLink, tasks: Iterable[Any], episode: str | None) -> None:
        self._link = link
        self._tasks = iter(tasks)
        self._stream = uuid.uuid4().hex
        self.offered = link.request(wire.OpenTaskStream(stream=self._stream, episode=episode or ""))
        """Done once the run has accepted the offer."""
        self.failure: BaseException | None = None
        """Error of the iterator, or of a task that can't be encoded; None if there was none."""

    def start(self) -> None:
        """Start the thread. It ends after the last task, on disconnect, or at the next offer."""
        threading.Thread(target=self._run, name="tidegate tasks", daemon=True).start()

    def raise_failure(self) -> None:
        """Raise the error that ended the tasks, if one did."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        is_end = False
        try:
            while not is_end:
                # One at a time, because the iterator may wait for results of its last task.
                task = next(self._tasks, NO_MORE)
                is_end = task is NO_MORE
                is_wanted = self._send([] if is_end else [task], is_end=is_end)
                is_end = is_end or not is_wanted
        except (TidegateError, concurrent.futures.CancelledError) as error:
            if isinstance(error, BadFrame):
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - of the user's iterator: batches() raises it
            self._fail(error)

    def _send(self, tasks: list[Any], *, is_end: bool) -> bool:
        request = wire.SendTasks(stream=self._stream, tasks=tasks, is_last=is_end)
        answer = self._link.request(request).result().reply
        return isinstance(answer, wire.ResultReply) and bool(answer.value)

    def _fail(self, error: Exception) -> None:
        """End the tasks. Once the sent tasks are trained, ``batches()`` raises ``error``."""
        self.failure = error
        with contextlib.suppress(TidegateError):  # the run is lost, too
            self._send([], is_end=True)


def _state(state: Mapping[str, Any]) -> RemoteState:
    try:
        return msgspec.convert(dict(state), RemoteState)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ResumeMismatch(
            f"resume must be a result of a remote run's state_dict(), got {state!r:.200}: {error}"
        ) from None


def connect(
    address: str,
    *,
    curve_key_directory: str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    resume: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 60.0,
    run_timeout_s: float = 60.0,
) -> RemoteRollouts:
    """Connect as the trainer of a run in another process, which calls ``listen(address)``.

    ``curve_key_directory``, made by ``tidegate keys``, is needed for addresses on other hosts. Each
    of ``world_size`` data-parallel processes connects with its own ``rank`` and gets its part of
    each batch. ``resume`` continues from a ``state_dict()`` of the trainer's checkpoint: the run
    hands later batches over again, as long as it keeps them.

    For up to ``connect_timeout_s``, entering the handle waits for the run to listen, and for the
    rank to become free if a dead process still holds it. Calls fail with ``RunLost`` if the run
    sends nothing for ``run_timeout_s``.

    Raises:
        ConfigError: the address, the keys or the rank are wrong.
    """
    shorten_tracebacks()
    keys = None if curve_key_directory is None else read_engine_keys(Path(curve_key_directory))
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
    curve_key_directory: str | Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    resume: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 60.0,
    run_timeout_s: float = 60.0,
) -> SyncRemoteRollouts:
    """As :func:`connect`, for code that is not async."""
    return SyncRemoteRollouts(
        connect(
            address,
            curve_key_directory=curve_key_directory,
            rank=rank,
            world_size=world_size,
            resume=resume,
            connect_timeout_s=connect_timeout_s,
            run_timeout_s=run_timeout_s,
        )
    )
