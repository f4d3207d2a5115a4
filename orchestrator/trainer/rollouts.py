"""Handles of a run in this process: batches in, weights out, for async trainers and for sync ones.

    async with tidegate.serve(model=path, engines=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

The run lives on a thread of its own (:mod:`tidegate.orchestrator.trainer.run`), so a train step
that blocks stalls no rollout. A handle submits requests to that thread, keeps the trainer's time,
and turns what the core hands over into tensors on the trainer's thread.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeVar

import msgspec
import numpy as np
from typing_extensions import override

from tidegate.errors import ConfigError, RecordingFailed, check_not_forked
from tidegate.orchestrator.batches.ages import BatchAges
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.group import Group, kept_rows
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.weight_control import PublishWait
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.fleet.pending_futures import BatchRequest
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.orchestrator.journal.resuming import Resume, ResumeToken, resume_token
from tidegate.orchestrator.scheduler.loop_watch import CHECK_INTERVAL_S
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings, cores
from tidegate.orchestrator.telemetry.forecast import Forecaster, window_groups
from tidegate.orchestrator.telemetry.off_policy import off_policy
from tidegate.orchestrator.telemetry.recorder import TrainerActivity
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.batch_metrics import (
    OnBatch,
    batch_metrics,
    refuse_unless_called,
    tokens_by_lag,
)
from tidegate.orchestrator.trainer.discarded_rows import NOT_TRAINED, discarded_rows
from tidegate.orchestrator.trainer.handle import (
    RunHandle,
    RunRequests,
    SyncHandle,
    SyncTrainerHandle,
    TrainerHandle,
    blocking,
    in_thread,
    result_of,
)
from tidegate.orchestrator.trainer.run import Run, RunParts
from tidegate.orchestrator.trainer.weight_updates import (
    AdapterPublish,
    AdapterRemoval,
    WeightPublish,
    WeightRollback,
)
from tidegate.policies.staleness import OffPolicyness
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.policies.diagnostics import LagBucket

Result = TypeVar("Result")

MakeParts = Callable[[RunSettings], RunParts]
"""Chooses a run's observers, and where its engines run, by its settings."""

log = logging.getLogger("tidegate")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one episode per task, outside training."""

    rewards: list[float | None]
    """In the order of the tasks; None where the episode failed."""

    @property
    def mean_reward(self) -> float:
        """Mean over all tasks; failed episodes count as 0."""
        return sum(reward or 0.0 for reward in self.rewards) / max(1, len(self.rewards))

    @property
    def failures(self) -> int:
        """Number of episodes that raised or timed out."""
        return sum(reward is None for reward in self.rewards)


class LocalRequests(RunRequests):
    """Request interface of a run in this process: carries requests to its event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def do(self, work: Callable[[Scheduler], Awaitable[Result]]) -> Result:
        """Run ``work`` on the run's loop, and wait for it on the caller's."""
        future = self._run.submit(work)
        try:
            return await result_of(future)
        except concurrent.futures.CancelledError:  # the run's loop has ended under it
            raise self._run.failure() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise self._run.failure() from None  # the run's loop has ended under it
            raise

    @override
    async def score(self, asked: Sequence[ScoreQuery]) -> list[Score]:
        return await self.do(lambda scheduler: scheduler.scores.submit_all(asked))

    @override
    async def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        await self.do(lambda scheduler: scheduler.control.pause(mode, clear_cache=clear_cache))

    @override
    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode) -> int:
        return await self.do(lambda scheduler: scheduler.control.sleep(level, tags, mode))

    @override
    async def wake(self, tags: Sequence[MemoryTag] | None) -> None:
        await self.do(lambda scheduler: scheduler.control.wake(tags))


class Scorer(RunHandle):
    """A run that scores, such as engines of a frozen reference model. Use it in ``async with``."""

    def __init__(self, settings: RunSettings, make_parts: MakeParts, resume: Resume = None) -> None:
        self.settings = settings
        self._make_parts = make_parts
        self._resume = resume
        self._run: Run | None = None
        self._final: RunStatistics | None = None
        self._old_sigterm: Any = None
        self._keeper = Timekeeper(None)
        self._forecaster = Forecaster()
        self._ages = BatchAges()
        self._batch_callback_errors = 0

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wrap_future(self._start())
        except BaseException as error:
            self._stop(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(error)

    @property
    def run_directory(self) -> Path | None:
        """Directory of the run's records; None if it keeps none."""
        return self.settings.records.run_directory

    def statistics(self) -> RunStatistics:
        """Return a snapshot of the run; after it has ended, the one of its end."""
        if self._final is not None:
            return self._final
        return self._read(self._statistics_of)

    @property
    def dashboard_url(self) -> str | None:
        """Address of the run's dashboard, with the token if one is needed; None: there is none."""
        observers = self._running.observers
        return observers.url if observers is not None else None

    def raise_if_over(self) -> None:
        """Raise the run's failure, or RunClosed, if the run has ended."""
        if self._running.has_ended:
            raise self._running.failure()

    def note(self, **facts: object) -> None:
        """Add facts to the run's record, e.g. ``reward_before=…``."""
        if self._running.recorder is not None:
            self._running.recorder.finish(self.statistics(), **facts)

    def refuse_blocking_call(self) -> None:
        """Raise RuntimeError on the run's own thread, which would wait for itself."""
        if self._run is not None:
            self._run.refuse_own_thread()

    # ------------------------------------------------------------ the run

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise RuntimeError("the run has not been started; use it in a `with` statement")
        check_not_forked(self._run.owner_pid)
        return self._run

    @property
    def _requests(self) -> LocalRequests:
        return LocalRequests(self._running)

    def _make_run(self) -> Run:
        return Run(self.settings, self._make_parts(self.settings), self._resume)

    def _start(self) -> "concurrent.futures.Future[None]":
        if self._run is not None:
            raise RuntimeError("a run is used once; call serve() again for another")
        self._run = self._make_run()
        self._keeper = Timekeeper(self._run.recorder)
        self._exit_on_sigterm()
        self._run.start()
        self._run.show(read=self._read, statistics=self._statistics_of)
        return self._run.ready

    def _stop(self, error: BaseException | None = None) -> None:
        """End the run. ``error`` is what the caller's block raised, which must not be replaced."""
        if self._run is None or self._run.owner_pid != os.getpid():
            return  # a forked process leaves the run, its records and its engines to its parent
        if self._final is None:
            self._run.hide()
            self._run.stop()
            scheduler = self._run.scheduler
            if scheduler is not None:
                self._final = self._statistics_of(scheduler)
            self._close_recorder(error)
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    def _close_recorder(self, error: BaseException | None) -> None:
        recorder = self._running.recorder
        if recorder is None:
            return
        if self._final is not None:
            recorder.finish(self._final)
        try:
            recorder.close()
        except RecordingFailed:
            if error is None:
                raise  # else it is logged already, and must not hide why the block ended

    def _sync_records(self) -> None:
        """Wait until what was recorded, and the statistics as of now, survive a crash."""
        recorder = self._running.recorder
        if recorder is not None:
            recorder.statistics(self.statistics())
            recorder.sync()

    def _exit_on_sigterm(self) -> None:
        """End the program on SIGTERM as on Ctrl-C, engines first, unless it has its own handler."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def _read(self, read: Callable[[Scheduler], Result]) -> Result:
        """Run ``read`` on the run's loop and return its result; on this thread if the loop is
        blocked."""
        scheduler = self._running.scheduler
        if self._running.is_own_thread and scheduler is not None:
            return read(scheduler)

        async def work(scheduler: Scheduler) -> Result:
            return read(scheduler)

        future = self._running.submit(work)
        while not future.done():
            if self._running.loop_watch.blocked is not None and scheduler is not None:
                with contextlib.suppress(RuntimeError):  # it has just resumed, and changed things
                    return read(scheduler)
            concurrent.futures.wait([future], CHECK_INTERVAL_S)
        return future.result()

    def _statistics_of(self, scheduler: Scheduler) -> RunStatistics:
        core, usage = scheduler.core, self._keeper.usage()
        staleness, ledger = core.trained.staleness, core.ledger.snapshot()
        return RunStatistics(
            wall_s=usage.wall_s,
            trainer_version=core.trainer_version,
            live_version=core.turns.live_version,
            admissible_groups=core.admissible_groups,
            running_groups=core.running_groups,
            buffered_groups=core.buffered_groups,
            training_groups=core.training_groups,
            batches=core.trained.batches,
            trained_rollouts=core.trained.rollouts,
            mixed_version_rollouts=core.trained.mixed_version,
            discarded_rollouts=dict(core.discarded_rollouts),
            max_staleness_seen=max(staleness, default=0),
            staleness_bound=core.policy.guaranteed_bound,
            mean_staleness=sum(s * n for s, n in staleness.items()) / max(1, core.trained.rollouts),
            staleness_histogram=dict(sorted(staleness.items())),
            trainer_idle_share=usage.trainer_idle_share,
            engine_idle_share=usage.engine_idle_share,
            tokens_per_s=usage.tokens_per_s,
            ledger=ledger,
            evaluation_ledger=core.evaluation_ledger.snapshot(),
            engines=scheduler.fleet.statistics(),
            pause_mode=scheduler.control.state.pause_mode,
            asleep=scheduler.control.state.asleep,
            staging_version=scheduler.control.state.staging_version,
            publish_failure=_text_of(scheduler.control.state.failure),
            stuck=(*filter(None, [self._running.loop_watch.blocked]), *scheduler.stuck),
            discards=core.groups.discards.by_reason(generated_tokens=ledger.generated),
            length_bias=core.groups.discards.length_bias(),
            context_tokens=scheduler.fleet.context_tokens,
            cached_context_tokens=scheduler.fleet.cached_context_tokens,
            parked_episodes=scheduler.parked_episodes,
            staleness_from_generation=dict(sorted(self._ages.in_flight.items())),
            staleness_from_queue=dict(sorted(self._ages.in_queue.items())),
            straggler_wait_groups=self._ages.groups,
            straggler_wait_s=self._ages.straggler_wait_s,
            episode_activity_s=scheduler.episode_seconds(),
            trainer_activity_s=self._keeper.spent_s(),
            publishes=self._keeper.publishes,
            event_loop_longest_block_s=self._running.loop_watch.longest_block_s,
            batch_callback_errors=self._batch_callback_errors,
            forecast=self._forecaster.forecast(
                ledger,
                outstanding_groups_max=core.policy.outstanding_groups_max,
                window_groups=window_groups(core.policy),
            ),
        )


class Rollouts(Scorer, TrainerHandle):
    """A run, for a trainer that is async. Use it in ``async with``."""

    def __init__(
        self,
        settings: RunSettings,
        make_parts: MakeParts,
        resume: Resume = None,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        super().__init__(settings, make_parts, resume)
        if on_batch is not None:
            refuse_unless_called(on_batch)
        self._on_batch = on_batch
        self._mismatch_figures: dict[str, float] = {}
        """Off-policy figures that the trainer gave for the batch before; the next batch's metrics
        carry them."""
        self._version = 0
        self._batches = 0
        self._batches_call = 0
        """Number of the newest call of ``batches()``: the one whose tasks are taken."""
        self._waiting_calls = 0
        """Number of ``batches()`` calls that wait for a batch now."""
        self._has_checked_threads = False

    @property
    @override
    def version(self) -> int:
        """The newest weight version published; 0 is the model directory's."""
        return self._version

    @property
    def batches_received(self) -> int:
        """Number of batches handed to the trainer, those before a resume included."""
        return self._batches

    @property
    @override
    def is_resumed(self) -> bool:
        """Whether this continues an earlier run; then publish the checkpoint's weights first."""
        return self._running.resumed is not None

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's position in the run, to be saved in its checkpoint.

        Take it when the batch last received is trained. Save it atomically with the weights made
        from that batch, before you publish them. ``serve(resume=…)`` takes it.

        Raises:
            ConfigError: the run keeps no journal, so it can't be resumed.
        """
        if not self._running.run_id:
            raise ConfigError("a run without a journal can't be resumed; give serve() journal=True")
        scheduler = self._running.scheduler
        offer = scheduler.core.tasks.offer if scheduler is not None else 0
        token = ResumeToken(self._running.run_id, self._batches, self._version, max(0, offer))
        return msgspec.structs.asdict(token)

    # ------------------------------------------------------------ batches

    async def batches(self, tasks: Tasks, *, episode: EpisodeFunction) -> AsyncIterator["Batch"]:
        """Yield batches made from ``tasks``, until they are used up; the last may be smaller.

        ``tasks`` may be endless, sync or async; it is iterated, and ``episode`` runs, on the run's
        own thread. Publish after each batch: until then its groups
        count against the staleness bound.

        After this iterator ends, or you break out of it, you may call ``batches()`` again; the new
        iterator also trains the unfinished tasks of the earlier one. Two at once are refused.

        Raises:
            PublishNeeded: the next batch could never fill without a publish.
            EngineLost: no engine is left.
            EpisodeError: ``episode`` fails every time.
            ConfigError: another ``batches()`` waits for a batch, or has replaced these tasks.
        """
        call = self._begin_batches()
        await self.offer(tasks, episode=episode)
        while (batch := await self._next_batch_of(call)) is not None:
            yield batch

    async def offer(self, tasks: Tasks, *, episode: EpisodeFunction) -> None:
        """Replace the run's tasks and episode; :meth:`next_batch` then returns the batches made.

        :meth:`batches` does both.
        """

        async def work(scheduler: Scheduler) -> None:
            scheduler.offer(tasks, episode)

        await self._requests.do(work)

    async def next_batch(self) -> "Batch | None":
        """Return the next batch, or None once the tasks are used up; raises as :meth:`batches`.

        A call that is cancelled costs nothing: its batch goes back, and a later call gets it if it
        is young enough by then. A trainer may ask ahead, during its train step; then it publishes
        after each batch, and each batch's staleness is counted at the version that will train it.
        """
        self._mark("train")
        request = BatchRequest()
        try:
            while await self._requests.do(lambda scheduler: scheduler.wait_for_batch(request)):
                if (batch := self._taken(request)) is not None:
                    return batch
        except BaseException:
            self._close_request(request)
            raise
        self._mark("wait")
        return None

    async def give_back(self, number: int) -> bool:
        """Give the newest batch back, on which nobody has trained: the next call gets it anew.

        Returns False if it is not the newest any more, or another call waits for a batch.
        """

        async def work(scheduler: Scheduler) -> bool:
            return scheduler.give_back(number)

        if not await self._requests.do(work):
            return False
        self._batches = number - 1
        return True

    async def discard(
        self,
        batch: "Batch | int",
        rows: Sequence[SupportsIndex],
        *,
        reason: str = NOT_TRAINED,
    ) -> None:
        """Report that the trainer did not train on these rows of ``batch``, counted from 0.

        Their tokens then count as discarded for ``reason``, and no longer as trained; their tasks
        are not taken again. Report them before the next batch but one, and before a checkpoint that
        holds the batch. ``batch`` may be its number.

        Raises:
            ConfigError: it is too late, or there are no such rows.
        """
        await self._requests.do(discarded_rows(batch, rows, reason).report)

    async def observe(
        self,
        *,
        effective_sample_size: float | None = None,
        mismatch_kl: float | None = None,
        by_lag: "Sequence[LagBucket]" = (),
    ) -> None:
        """Report how far off-policy the last batch was, as the loss measured it.

        ``AdaptiveStaleness`` moves η by it; other policies ignore it, and dashboards show it.

        Args:
            effective_sample_size: share of the batch that its importance weights leave, in (0, 1].
            mismatch_kl: nats per token. policies.diagnostics computes both.
            by_lag: what ``policies.diagnostics.measure_mismatch_by_lag`` returned.

        Raises:
            ConfigError: a value is out of range, or no number.
        """
        measured = OffPolicyness(
            effective_sample_size=effective_sample_size, mismatch_kl=mismatch_kl
        )

        async def work(scheduler: Scheduler) -> None:
            ess, kl = measured.effective_sample_size, measured.mismatch_kl
            scheduler.handle([ev.OffPolicynessMeasured(ess, kl)])

        await self._requests.do(work)
        reported = off_policy(effective_sample_size, mismatch_kl, by_lag)
        self._mismatch_figures = reported.figures()
        if self._running.recorder is not None:
            self._running.recorder.off_policy(reported)

    async def ack(self, state: Mapping[str, Any]) -> None:
        """Acknowledge that this ``state_dict()`` is on disk: nothing before it need be kept.

        Returns once what the run has recorded so far survives a crash, too: trajectories, metrics
        of batches, statistics, weights.

        Raises:
            RecordingFailed: the disk refuses the run's records.
        """
        token = resume_token(state)
        await in_thread(self._sync_records)
        await self._requests.do(lambda scheduler: scheduler.make_safe(token.batches, token.offer))

    async def evaluate(self, tasks: Sequence[Any], *, episode: EpisodeFunction) -> Evaluation:
        """Run one episode per task with the engines' present weights; never trained on.

        The same tasks draw the same random numbers each time.
        """

        async def work(scheduler: Scheduler) -> list[float | None]:
            rollouts: list[Rollout] = await scheduler.evaluate(list(tasks), episode)
            return [rollout.reward for rollout in rollouts]

        return Evaluation(await self._requests.do(work))

    # ------------------------------------------------------------ weights

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor]",
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """Bring new weights to the engines while they decode; return the weights' version.

        With ``partial`` only the tensors in it change, and the rest is that of the version before:
        the newest published that didn't fail.

        ``wait``: ``live`` returns once all engines serve it, ``staged`` once all have it beside
        their live weights, so that none can refuse it any more, ``none`` as soon as the tensors are
        copied and may change. What fails after that is raised by the next publish or batch.

        A publish started during another one replaces it on engines that have not staged it yet;
        both calls return when the newer weights are there. Until it is certain that the version
        comes, no batch is handed over, so no batch's staleness is overstated.

        Raises:
            WeightsRefused: names, shapes or dtypes don't fit the model; the old weights stay live.
            EngineLagging: an engine did not take them in time.
            PublishDropped: a newer publish replaced this one, and writing its weights failed.
        """
        return await self._publish(WeightPublish(self._running, state_dict, wait, partial=partial))

    async def rollback(
        self, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int | None = None
    ) -> int:
        """Have engines serve these weights in place of bad ones, under a new version; return it.

        Groups with a token of version ``first_bad`` or newer (default: the newest published) are
        discarded as ``rolled_back``, and their tasks taken anew. Engines are paused meanwhile, and
        stay so if it fails: what they serve is bad. It is a version like any other, so what waits
        for training gets older by one.

        Raises:
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        first_bad = self._version if first_bad is None else first_bad
        return await self._publish(WeightRollback(self._running, state_dict, first_bad=first_bad))

    async def publish_adapter(
        self,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        config: object = None,
        wait: PublishWait = "live",
    ) -> int:
        """Bring a LoRA adapter to the engines, or new tensors for one; return the version.

        ``adapter`` is a directory that PEFT's ``save_pretrained`` wrote; or tensors, as
        ``peft.get_peft_model_state_dict`` gives them, with their ``config``: a ``LoraConfig``, or a
        mapping with ``r`` and ``lora_alpha``. Only these travel. It is a version like any other,
        made of the version before and this adapter. Turns ask for it by ``generate(adapter=name)``,
        or all do, by ``serve(adapter=name)``.

        Raises:
            ConfigError: it is no LoRA adapter, or asks for more than engines have.
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        return await self._publish(AdapterPublish(self._running, name, adapter, config, wait))

    async def unload_adapter(self, name: str, *, wait: PublishWait = "live") -> int:
        """Have engines drop an adapter; return the version without it.

        Running turns that use it are refused.

        Raises:
            WeightsRefused: there is none of this name; else as :meth:`publish`.
        """
        return await self._publish(AdapterRemoval(self._running, name, wait))

    async def _publish(self, call: WeightPublish) -> int:
        self._mark("train")
        try:
            return await self._requests.do(call.run)
        finally:
            self._published(call)

    # ------------------------------------------------------------ the trainer's time and batches

    def _start(self) -> "concurrent.futures.Future[None]":
        ready = super()._start()
        if self._running.resumed is not None:
            self._batches = self._running.resumed.batches
            self._version = self._running.newest_version
        return ready

    def _mark(self, ended: TrainerActivity) -> None:
        """Record in the time statistics that this activity of the trainer ends now."""
        scheduler = self._running.scheduler
        engines = scheduler.fleet.work() if scheduler is not None else {}
        self._keeper.mark(ended, self._version, engines)

    def _published(self, call: WeightPublish) -> None:
        """Note the end of a publish, whether it succeeded or not."""
        if not call.may_be_served:
            return  # it failed before any engine swapped
        self._version = max(self._version, call.version)
        self._mark("publish")
        if self._running.recorder is not None:
            self._running.recorder.weights(call.version, call.state_dict, call.parts)

    def _begin_batches(self) -> int:
        """Begin another call of ``batches()``, whose tasks replace those of the one before.

        Raises:
            ConfigError: another call waits for a batch; its tasks would never be taken.
        """
        if self._waiting_calls:
            raise ConfigError(
                "batches() was called while another batches() of this run waits for a batch: one "
                "run takes tasks from one iterator at a time. Join them (itertools.chain), or "
                "break out of the first"
            )
        self._batches_call += 1
        return self._batches_call

    async def _next_batch_of(self, call: int) -> "Batch | None":
        """Return the next batch to this call of ``batches()``.

        Raises:
            ConfigError: a later call has replaced its tasks.
        """
        if call != self._batches_call:
            raise ConfigError(
                "another batches() of this run was called meanwhile, and its tasks took the place "
                "of these: what was taken of these is trained there, and the rest is not taken. "
                "Go on with the newer one; to train on both, join them (itertools.chain)"
            )
        self._waiting_calls += 1
        try:
            return await self.next_batch()
        finally:
            self._waiting_calls -= 1

    def _taken(self, request: BatchRequest) -> "Batch | None":
        """Take the batch on offer to a request; None: it was withdrawn, wait for the next offer.

        The batch is built before it is taken, and acknowledged last: whatever is raised in between,
        :meth:`_close_request` can give it back.
        """
        from tidegate.orchestrator.batches.batches import batch_of_rows  # imports torch

        handover = request.batch
        if handover is None:
            return None
        self._mark("wait")
        if not self._has_checked_threads:
            self._has_checked_threads = True
            warn_if_oversubscribed(self.settings)
        rows, version = kept_rows(handover.groups), handover.trainer_version
        batch = batch_of_rows(rows, handover.groups, version, handover.number)
        if not request.take(handover):
            return None
        self._batches = handover.number
        self._forecast_from(batch)
        self._record_batch(handover, batch, rows)
        self._post(lambda scheduler: scheduler.acknowledge_batch(request))
        return batch

    def _close_request(self, request: BatchRequest) -> None:
        """End a call for a batch without one: what was offered to it, or taken, goes back."""
        if (handover := request.batch) is not None:
            self._batches = min(self._batches, handover.number - 1)
        self._post(lambda scheduler: scheduler.close_batch_request(request))

    def _post(self, action: Callable[[Scheduler], object]) -> None:
        """Have something done on the run's loop after all that was asked for so far."""

        async def work(scheduler: Scheduler) -> None:
            action(scheduler)

        with contextlib.suppress(Exception):  # the run has ended, and says by itself of what
            self._running.submit(work)

    def _record_batch(
        self, handover: ev.HandOver, batch: "Batch", rows: Sequence[tuple[Rollout, Group]]
    ) -> None:
        scheduler = self._running.scheduler
        ages: dict[str, float] = {}
        if scheduler is not None:
            ages = self._ages.note([row for row, _ in rows], batch, scheduler.published)
        recorder = self._running.recorder
        if recorder is None and self._on_batch is None:
            return
        metrics = {**batch_metrics(batch, self._keeper.usage()), **ages, **self._mismatch_figures}
        self._mismatch_figures = {}
        if recorder is not None:
            advantages, version = batch.advantages.tolist(), handover.trainer_version
            kept = [(row, group.task) for row, group in rows]
            recorder.trained(kept, advantages=advantages, consumed_version=version)
            recorder.batch(metrics)
            recorder.trained_lags(tokens_by_lag(batch))
            if recorder.wants_statistics:
                self._post(lambda scheduler: recorder.statistics(self._statistics_of(scheduler)))
        if self._on_batch is not None:
            self._call_on_batch(self._on_batch, metrics)

    def _call_on_batch(self, on_batch: OnBatch, metrics: dict[str, float]) -> None:
        """Call the user's callback; the trainer gets its batch whatever that raises."""
        try:
            on_batch(metrics)
        except Exception as error:
            self._batch_callback_errors += 1
            log.error("on_batch raised; the trainer gets its batch all the same", exc_info=error)

    def _forecast_from(self, batch: "Batch") -> None:
        scheduler = self._running.scheduler
        self._forecaster.note_batch(
            np.count_nonzero(batch.weight_versions.numpy() >= 0, axis=1),
            batch.group_ids.numpy(),
            batch.staleness.numpy(),
            batch.rollout_ids.numpy(),
            trainer_version=batch.trainer_version,
            usage=self._keeper.usage(),
            engines=scheduler.fleet.statistics() if scheduler is not None else (),
        )


class SyncScorer(SyncHandle[Scorer]):
    """A :class:`Scorer`, for code that is not async. Use it in ``with``."""

    def __enter__(self) -> Self:
        try:
            self._handle._start().result()
        except BaseException as error:
            self._handle._stop(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle._stop(error)

    @property
    def settings(self) -> RunSettings:
        """The run's settings."""
        return self._handle.settings

    @property
    def run_directory(self) -> Path | None:
        """As :attr:`Scorer.run_directory`."""
        return self._handle.run_directory

    @property
    def dashboard_url(self) -> str | None:
        """As :attr:`Scorer.dashboard_url`."""
        return self._handle.dashboard_url

    def statistics(self) -> RunStatistics:
        """As :meth:`Scorer.statistics`."""
        return self._handle.statistics()

    def raise_if_over(self) -> None:
        """As :meth:`Scorer.raise_if_over`."""
        self._handle.raise_if_over()

    def note(self, **facts: object) -> None:
        """As :meth:`Scorer.note`."""
        self._handle.note(**facts)

    async def score_queries(self, asked: Sequence[ScoreQuery]) -> list[Score]:
        """As :meth:`RunHandle.score_queries`, which code on any event loop may await."""
        return await self._handle.score_queries(asked)


class SyncRollouts(SyncTrainerHandle, SyncScorer):
    """A run, for a trainer that is not async: :class:`Rollouts`, whose calls block.

    Use it in ``with``.
    """

    _handle: Rollouts

    def __init__(self, handle: Rollouts) -> None:
        super().__init__(handle)

    @property
    def batches_received(self) -> int:
        """As :attr:`Rollouts.batches_received`."""
        return self._handle.batches_received

    def batches(self, tasks: Tasks, *, episode: EpisodeFunction) -> Iterator["Batch"]:
        """As :meth:`Rollouts.batches`."""
        call = self._handle._begin_batches()
        self.offer(tasks, episode=episode)
        while (batch := self._next_batch_of(call)) is not None:
            yield batch

    offer = blocking(Rollouts.offer)
    next_batch = blocking(Rollouts.next_batch)
    _next_batch_of = blocking(Rollouts._next_batch_of)
    discard = blocking(Rollouts.discard)
    observe = blocking(Rollouts.observe)
    ack = blocking(Rollouts.ack)
    evaluate = blocking(Rollouts.evaluate)
    publish = blocking(Rollouts.publish)
    rollback = blocking(Rollouts.rollback)
    publish_adapter = blocking(Rollouts.publish_adapter)
    unload_adapter = blocking(Rollouts.unload_adapter)


def warn_if_oversubscribed(settings: RunSettings) -> None:
    """Warn if torch has more threads in the trainer's process than engines leave cores free.

    OpenMP's threads spin while they wait for each other; with fewer cores than threads, each waits
    for one that isn't running, and a run was seen to take eight times as long.
    """
    import torch

    if not settings.engine_processes or settings.engine.device != "cpu":
        return
    in_engines = settings.engine_processes * settings.engine_threads
    left = max(1, cores() - in_engines)
    if (threads := torch.get_num_threads()) > left:
        log.warning(
            "torch_threads=%d cores=%d engine_threads=%d: the trainer's torch and the engines have "
            "more threads than there are cores, and slow each other down; set OMP_NUM_THREADS=%d, "
            "or call torch.set_num_threads(%d)",
            threads,
            cores(),
            in_engines,
            left,
            left,
        )


def _text_of(error: Exception | None) -> str | None:
    return str(error) if error is not None else None
