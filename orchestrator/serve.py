"""What does a trainer hold in its hands? Batches in, weights out, for async code and for sync.

    async with tidegate.serve(model=path, engines=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

The run itself lives on a thread of its own (:mod:`tidegate.orchestrator.run`), so a train step that
blocks stalls no rollout; nothing here decides anything.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from tidegate.orchestrator.client import Evaluation
from tidegate.orchestrator.config import run_settings
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.feed.left_out_rows import NOT_TRAINED, left_out_rows
from tidegate.orchestrator.feed.tasks import Tasks
from tidegate.orchestrator.fleet.sleep_call import sleep_work, wake_work
from tidegate.orchestrator.observing.off_policy import off_policy
from tidegate.orchestrator.weights.adapter_faces import AsyncAdapters, SyncAdapters
from tidegate.orchestrator.weights.publish_call import PublishCall, RollbackCall
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.orchestrator.wishes import (
    ack_work,
    evaluate_work,
    next_batch,
    observe_work,
    offer_work,
    pause_work,
)
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.feed.batches import Batch
    from tidegate.policies.diagnostics import LagBucket


class Rollouts(AsyncAdapters):
    """A run, for a trainer that is async. Use it in ``async with``."""

    async def batches(self, tasks: Tasks, *, episode: EpisodeFunction) -> AsyncIterator["Batch"]:
        """Batches made from ``tasks``, until they are used up; the last one may be smaller.

        ``tasks`` may be endless, sync or async; it is iterated, and ``episode`` runs, on the run's
        own thread. Publish after each batch: what is handed over holds its place until then.

        Raises:
            PublishNeeded: the next batch could never fill without a publish.
            EngineLost: no engine is left.
            EpisodeError: ``episode`` fails every time.
        """
        await self.offer(tasks, episode=episode)
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def offer(self, tasks: Tasks, *, episode: EpisodeFunction) -> None:
        """Take tasks from here from now on: the first half of :meth:`batches`."""
        await self._do(offer_work(tasks, episode))

    async def next_batch(self) -> "Batch | None":
        """The next batch, or None once the tasks are used up: the other half, with its errors.

        One that was cancelled while it waited costs nothing: the next call gets that batch.
        """
        self._mark("train")
        handover = await self._do(next_batch)
        self._mark("wait")
        return None if handover is None else self._batch(handover)

    async def listen(
        self,
        address: str,
        *,
        tasks: Tasks | None = None,
        episode: EpisodeFunction | str | None = None,
        episodes: Mapping[str, EpisodeFunction | str] | None = None,
        trainer_timeout_s: float = 600.0,
        rank_timeout_s: float = 60.0,
    ) -> None:
        """Give this run to a trainer in another process; return once it has done.

        It comes by ``tidegate.connect(address)``, as one process or as several ranks. An address
        that other hosts can reach needs the run's ``keys``. ``tasks`` are the run's; without, the
        trainer brings its own, plain data. ``episode`` runs them; ``episodes`` are others that it
        may ask for by name. A string ``"module:function"`` is imported.

        A trainer that vanishes may come again within ``trainer_timeout_s``; of several ranks, one
        that is silent for ``rank_timeout_s`` fails the calls of those that wait for it.

        Raises:
            TrainerLost: no trainer came, or came again.
            AddressInUse, ConfigError: nobody can listen there, or so.
            EngineLost, EpisodeError: the run has failed.
        """
        from tidegate.orchestrator.remote.listener import Listening, listen

        told = Listening(address, tasks, episode, episodes or {}, trainer_timeout_s, rank_timeout_s)
        await listen(self, told)

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor]",
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """Bring new weights to the engines, in flight; return their version.

        With ``partial`` only the tensors in it change, and the rest is that of the version before:
        the newest published that didn't fail.

        ``wait``: ``live`` returns once all engines serve it, ``staged`` once all have it beside
        their live weights, so that none can refuse it any more, ``none`` as soon as the tensors are
        copied and may change. What fails after that is raised by the next publish or batch.

        A publish during another takes its place where engines haven't staged that yet; both calls
        return when the newer weights are there. No batch is handed over before it is certain that
        the version comes, so none is counted as older than it is.

        Raises:
            WeightsRefused: names, shapes or dtypes don't fit the model; the old ones serve on.
            EngineLagging: an engine did not take them in time.
            PublishDropped: they gave way to newer ones, whose writing failed.
        """
        self._mark("train")
        publish = PublishCall(self._running, state_dict, wait, partial=partial)
        try:
            return await self._do(publish.run)
        finally:
            self._published(publish)

    async def rollback(
        self, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int | None = None
    ) -> int:
        """Have engines serve these weights in place of bad ones, under a new version; return it.

        Groups with a token of version ``first_bad`` or newer, left out the newest published, are
        discarded as ``rolled_back``, and their tasks taken anew. Engines are paused meanwhile, and
        stay so if it fails: what they serve is bad. It is a version like any other, so what waits
        for training gets older by one.

        Raises:
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        self._mark("train")
        first_bad = self._version if first_bad is None else first_bad
        call = RollbackCall(self._running, state_dict, first_bad=first_bad)
        try:
            return await self._do(call.run)
        finally:
            self._published(call)

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> None:
        """Have all engines stop generating; return once no turn runs on any, late joiners included.

        ``abort`` ends running turns now; they wait with the tokens they have, and go on from there.
        ``keep`` freezes them, KV intact; ``wait`` lets them finish. Asked again, the newer mode
        holds. Weights can be published meanwhile, and no episode's time runs.

        ``clear_cache`` has engines forget the contexts that they keep for later turns. There is no
        need to before a publish: nothing that old weights computed is used by a turn of new ones.
        """
        await self._do(pause_work(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Have all engines go on; return once they do. Harmless if they weren't paused."""
        await self._do(pause_work(None))

    async def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        mode: PauseMode = "abort",
    ) -> int:
        """Have all engines give memory back to the system; return how many bytes they did.

        They are paused by ``mode`` first, late joiners too. KV is forgotten: turns frozen by
        ``keep`` are computed again. Weights of ``level`` 1 go to a file; of level 2 nothing is
        kept, and the next publish, or at the latest ``wake()``, brings them. A publish reaches
        sleeping engines too, and wakes their weights and nothing else.

        Raises:
            ConfigError: an engine can't.
            SleepFailed: an engine could not, and says why. The others sleep.
        """
        return await self._do(sleep_work(level, tags, mode))

    async def wake(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Have all engines take memory again; without ``tags``, all that sleeps.

        Once nothing sleeps any more they go on, unless they were paused before. To wake
        ``["weights"]`` first makes room for a publish that needs no KV.

        Raises:
            SleepFailed: an engine finds no memory, or has no weights and gets none. All stay
                paused; wake again.
        """
        await self._do(wake_work(tags))

    async def ack(self, state: Mapping[str, Any]) -> None:
        """This ``state_dict()`` is on disk: nothing before it need be kept any more."""
        await self._do(ack_work(state))

    async def discard(
        self,
        batch: "Batch | int",
        rows: Sequence[SupportsIndex],
        *,
        reason: str = NOT_TRAINED,
    ) -> None:
        """Tell that these rows of ``batch``, counted from 0, were not trained on.

        Their tokens are then counted as discarded for ``reason`` and no more as trained; tasks are
        not taken again. Say so before the next batch but one, and before a checkpoint that holds
        the batch. ``batch`` may be its number.

        Raises:
            ConfigError: it is too late, or there are no such rows.
        """
        await self._do(left_out_rows(batch, rows, reason).tell)

    async def observe(
        self,
        *,
        effective_sample_size: float | None = None,
        mismatch_kl: float | None = None,
        by_lag: "Sequence[LagBucket]" = (),
    ) -> None:
        """Tell how far off-policy the last batch was, as the loss saw it.

        ``AdaptiveStaleness`` moves η by it; other policies take no notice, but a dashboard shows
        it. The share of the batch that its importance weights leave, in (0, 1], and the KL in nats
        per token: policies.diagnostics has both, and ``by_lag`` is its
        ``measure_mismatch_by_lag``, of which the dashboard draws KL, chi-squared and others.

        Raises:
            ConfigError: one of them is out of range, or no number.
        """
        await self._do(observe_work(effective_sample_size, mismatch_kl))
        self._note_off_policy(off_policy(effective_sample_size, mismatch_kl, by_lag))

    async def evaluate(self, tasks: Sequence[Any], *, episode: EpisodeFunction) -> Evaluation:
        """One episode per task with the engines' present weights; never trained on.

        The same tasks draw the same random numbers each time.
        """
        return Evaluation(await self._do(evaluate_work(tasks, episode)))


class SyncRollouts(SyncAdapters):
    """The same run, for a trainer that is not async. Use it in ``with``."""

    def batches(self, tasks: Tasks, *, episode: EpisodeFunction) -> Iterator["Batch"]:
        """As :meth:`Rollouts.batches`."""
        self._do(offer_work(tasks, episode))
        self._mark("train")
        while True:
            handover = self._do(next_batch)
            self._mark("wait")
            if handover is None:
                return
            yield self._batch(handover)
            self._mark("train")

    def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor]",
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """As :meth:`Rollouts.publish`."""
        self._mark("train")
        publish = PublishCall(self._running, state_dict, wait, partial=partial)
        try:
            return self._do(publish.run)
        finally:
            self._published(publish)

    def rollback(
        self, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int | None = None
    ) -> int:
        """As :meth:`Rollouts.rollback`."""
        self._mark("train")
        first_bad = self._version if first_bad is None else first_bad
        call = RollbackCall(self._running, state_dict, first_bad=first_bad)
        try:
            return self._do(call.run)
        finally:
            self._published(call)

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> None:
        """As :meth:`Rollouts.pause`."""
        self._do(pause_work(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """As :meth:`Rollouts.resume`."""
        self._do(pause_work(None))

    def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[MemoryTag] = MEMORY_TAGS,
        mode: PauseMode = "abort",
    ) -> int:
        """As :meth:`Rollouts.sleep`."""
        return self._do(sleep_work(level, tags, mode))

    def wake(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """As :meth:`Rollouts.wake`."""
        self._do(wake_work(tags))

    def ack(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Rollouts.ack`."""
        self._do(ack_work(state))

    def discard(
        self,
        batch: "Batch | int",
        rows: Sequence[SupportsIndex],
        *,
        reason: str = NOT_TRAINED,
    ) -> None:
        """As :meth:`Rollouts.discard`."""
        self._do(left_out_rows(batch, rows, reason).tell)

    def observe(
        self,
        *,
        effective_sample_size: float | None = None,
        mismatch_kl: float | None = None,
        by_lag: "Sequence[LagBucket]" = (),
    ) -> None:
        """As :meth:`Rollouts.observe`."""
        self._do(observe_work(effective_sample_size, mismatch_kl))
        self._note_off_policy(off_policy(effective_sample_size, mismatch_kl, by_lag))

    def evaluate(self, tasks: Sequence[Any], *, episode: EpisodeFunction) -> Evaluation:
        """As :meth:`Rollouts.evaluate`."""
        return Evaluation(self._do(evaluate_work(tasks, episode)))


def serve(*, resume: Any = None, on_batch: Any = None, **settings: Any) -> Rollouts:
    """Start a run for an async trainer; see :class:`~tidegate.RunSettings` for what can be set.

    ``resume`` goes on with the run whose journal is in ``run_directory``: from a ``state_dict()``
    of the trainer's checkpoint; or, if True, from what was acknowledged last, and from the start
    where there is no journal yet. Give the same tasks in the same order as before, and publish the
    checkpoint's weights first.

    ``on_batch`` is called with the figures of each batch just before the trainer gets it, on the
    trainer's thread: ``lambda figures: wandb.log(figures)``, for one; docs/observing.md.

    Raises:
        ConfigError: a setting is unknown, out of range or impossible.
    """
    return Rollouts(run_settings(**settings), resume, on_batch=on_batch)


def serve_sync(*, resume: Any = None, on_batch: Any = None, **settings: Any) -> SyncRollouts:
    """Start a run for a trainer that is not async; as :func:`serve` otherwise."""
    return SyncRollouts(run_settings(**settings), resume, on_batch=on_batch)
