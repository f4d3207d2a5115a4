"""Handles of a run in this process: batches in, weights out, for async trainers and for sync ones.

    async with tidegate.serve(model=path, engines=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

The run lives on a thread of its own (:mod:`tidegate.orchestrator.trainer.run`), so a train step
that blocks stalls no rollout. A handle submits requests to that thread, keeps the trainer's time,
and turns what the core hands over into tensors on the trainer's thread. Depends on :class:`Run`
(the thread), ``batches.py`` (tensors) and ``weight_updates.py`` (publishing).
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import msgspec
import numpy as np
from typing_extensions import override

from tidegate.errors import ConfigError, RecordingFailed, VersionUnavailable, check_not_forked
from tidegate.orchestrator.batches.ages import BatchAges
from tidegate.orchestrator.batches.tasks import Tasks, num_tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.failure_counts import failure_statistics
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
from tidegate.orchestrator.telemetry.html_tables import html_table, line
from tidegate.orchestrator.telemetry.off_policy import off_policy
from tidegate.orchestrator.telemetry.recorder import TrainerActivity
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.adapters import AdapterHandle, SyncAdapterHandle
from tidegate.orchestrator.trainer.batch_metrics import (
    OnBatch,
    batch_metrics,
    check_callback,
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
    CollectParts,
    ShardedPublish,
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

HELD_OUT = "held_out"
"""Name of an evaluation, unless given; reports and comparisons show it."""

log = logging.getLogger("tidegate")


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """Rewards of one episode per task, outside training."""

    rewards: list[float | None]
    """Reward of each task, in the order of the tasks; None where the episode failed."""

    @property
    def mean_reward(self) -> float:
        """Mean over all tasks; failed episodes count as 0."""
        return sum(reward or 0.0 for reward in self.rewards) / max(1, len(self.rewards))

    @property
    def failures(self) -> int:
        """Number of episodes that raised or timed out."""
        return sum(reward is None for reward in self.rewards)

    def __repr__(self) -> str:
        return line("Evaluation", self._figures())

    def _repr_html_(self) -> str:
        return html_table("Evaluation", self._figures())

    def _figures(self) -> dict[str, object]:
        return {
            "mean reward": f"{self.mean_reward:.3f}",
            "tasks": len(self.rewards),
            "failures": self.failures,
        }


@dataclass(slots=True)
class _RepeatedEvaluation:
    """Tasks that a run evaluates every ``versions`` versions."""

    versions: int
    tasks: Sequence[Any]
    episode: EpisodeFunction
    evaluated_version: int | None = None
    """Version evaluated last; None before the first evaluation."""

    def is_due(self, version: int, *, is_last: bool) -> bool:
        """Return whether ``version`` is to be evaluated now; ``is_last``: no batch follows."""
        if self.evaluated_version is None:
            return True
        new_versions = version - self.evaluated_version
        return new_versions > 0 if is_last else new_versions >= self.versions


@dataclass(slots=True)
class _BegunEvaluation:
    """A running evaluation, and its record for the run's directory."""

    name: str | None
    """Name to record it by; None: it is not recorded."""
    version: int
    batches: int
    """Number of batches received before."""
    seconds: float = 0.0

    def work(
        self, tasks: Sequence[Any], episode: EpisodeFunction, pinned_version: int | None
    ) -> "Callable[[Scheduler], Awaitable[Evaluation]]":
        """Return the work for the run's loop; ``pinned_version`` must sample all tokens."""

        async def evaluate(scheduler: Scheduler) -> Evaluation:
            started_s = time.monotonic()
            rollouts = await scheduler.evaluate(list(tasks), episode, pinned_version)
            self.seconds = time.monotonic() - started_s
            return Evaluation([rollout.reward for rollout in rollouts])

        return evaluate


class LocalRequests(RunRequests):
    """Request interface of a run in this process: carries requests to its event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def do(self, work: Callable[[Scheduler], Awaitable[Result]]) -> Result:
        """Run ``work`` on the run's loop, and wait for it on the caller's."""
        future = self._run.submit(work)
        try:
            return await result_of(future)
        except concurrent.futures.CancelledError:  # the run's loop ended during the work
            raise self._run.failure() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise self._run.failure() from None  # the run's loop ended during the work
            raise

    @override
    async def score(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        return await self.do(lambda scheduler: scheduler.scores.submit_all(queries))

    @override
    async def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> None:
        await self.do(lambda scheduler: scheduler.control.pause(mode, clear_cache=clear_cache))

    @override
    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode) -> int:
        return await self.do(lambda scheduler: scheduler.control.sleep(level, tags, mode))

    @override
    async def wake(self, tags: Sequence[MemoryTag] | None) -> None:
        await self.do(lambda scheduler: scheduler.control.wake(tags))

    @override
    async def drain(self, engine: str, within_s: float) -> int:
        return await self.do(lambda scheduler: scheduler.engines.drains.drain(engine, within_s))

    @override
    async def scale(self, engines: int, within_s: float) -> None:
        await self.do(lambda scheduler: scheduler.engines.scale(engines, within_s))


class Scorer(RunHandle):
    """Async handle of a run that only scores, e.g. with a frozen reference model."""

    def __init__(self, settings: RunSettings, make_parts: MakeParts, resume: Resume = None) -> None:
        self.settings = settings
        self._make_parts = make_parts
        self._resume = resume
        self._run: Run | None = None
        self._final: RunStatistics | None = None
        self._old_sigterm: Any = None
        self._timekeeper = Timekeeper(None)
        self._forecaster = Forecaster()
        self._ages = BatchAges()
        self._batch_callback_errors = 0

    @property
    def run_directory(self) -> Path | None:
        """Directory of the run's records; None if it keeps none."""
        return self.settings.records.run_directory

    def statistics(self) -> RunStatistics:
        """Return a snapshot of the run; once it has ended or failed, the final one."""
        if self._final is not None:
            return self._final
        try:
            return self._read(self._statistics_of)
        except Exception:
            run = self._running
            if not run.has_ended or run.scheduler is None or run.is_own_thread:
                raise
            run.stop()  # its thread ends anyway, and nothing changes afterwards
            return self._statistics_of(run.scheduler)

    @property
    def engines(self) -> tuple[EngineStatistics, ...]:
        """Connected engines: name, state, weight version, running turns, device and counters."""
        return self.statistics().engines

    @property
    def dashboard_url(self) -> str | None:
        """Address of the run's dashboard, with the token if one is needed; None: there is none."""
        observers = self._running.observers
        return observers.url if observers is not None else None

    def raise_if_ended(self) -> None:
        """Raise the run's failure, or RunClosed, if the run has ended."""
        if self._running.has_ended:
            raise self._running.failure()

    def record_facts(self, **facts: object) -> None:
        """Add facts to the run's record, e.g. ``warm_up={"steps": 200}``."""
        if self._running.recorder is not None:
            self._running.recorder.finish(self.statistics(), **facts)

    def _figures(self) -> dict[str, object]:
        """Return what ``repr`` shows, without a call to the run's loop."""
        if self._run is None:
            state = "not started"
        else:
            state = "ended" if self._run.has_ended or self._final is not None else "running"
        return {
            "state": state,
            "model": self.settings.model,
            "engines": self.settings.fleet.engines_started,
            "records": self.run_directory or "none",
        }

    def __repr__(self) -> str:
        return line(type(self).__name__, self._figures())

    def _repr_html_(self) -> str:
        figures = self._figures()
        if self._run is not None:
            with contextlib.suppress(Exception):  # a run that could not start has no statistics
                figures |= _figures_of(self.statistics())
                figures["dashboard"] = self.dashboard_url or "none"
        return html_table(type(self).__name__, figures)

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
        """Return the run and start the trainer's clock; simulated runs override it."""
        run = Run(self.settings, self._make_parts(self.settings), self._resume)
        self._timekeeper = Timekeeper(run.recorder)
        return run

    @override
    async def _enter(self) -> None:
        if self._run is not None:
            raise RuntimeError("a run can't be started twice; call serve() again")
        self._run = self._make_run()
        self._exit_on_sigterm()
        self._run.start()
        self._run.show(read=self._read, statistics=self._statistics_of)
        await result_of(self._run.ready)

    @override
    def _exit(self, error: BaseException | None = None) -> None:
        """End the run. ``error`` is what the caller's block raised, which must not be replaced."""
        if self._run is None or self._run.owner_pid != os.getpid():
            return  # a forked process leaves the run, its records and its engines to its parent
        if self._final is None:
            self._run.hide(error)
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
                raise  # otherwise it is logged already, and must not hide why the block ended

    def _sync_records(self) -> None:
        """Record the current statistics, and wait until all records survive a crash."""
        recorder = self._running.recorder
        if recorder is not None:
            recorder.statistics(self.statistics())
            recorder.sync()

    def _exit_on_sigterm(self) -> None:
        """End the program on SIGTERM as on Ctrl-C, engines first, unless a handler is installed."""
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
                # A loop that resumes just now may change a collection while it is read.
                with contextlib.suppress(RuntimeError):
                    return read(scheduler)
            concurrent.futures.wait([future], CHECK_INTERVAL_S)
        return future.result()

    def _statistics_of(self, scheduler: Scheduler) -> RunStatistics:
        core, usage = scheduler.core, self._timekeeper.usage()
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
            staleness_from_generation=dict(sorted(self._ages.from_generation.items())),
            staleness_from_queue=dict(sorted(self._ages.from_queue.items())),
            straggler_wait_groups=self._ages.groups,
            straggler_wait_s=self._ages.straggler_wait_s,
            episode_activity_s=scheduler.episode_seconds(),
            trainer_activity_s=self._timekeeper.spent_s(),
            publishes=self._timekeeper.publishes,
            event_loop_longest_block_s=self._running.loop_watch.longest_block_s,
            batch_callback_errors=self._batch_callback_errors,
            tool_call_turns=scheduler.tool_calls.turns,
            parsed_tool_call_turns=scheduler.tool_calls.parsed_turns,
            episode_failures=failure_statistics(core.groups.failures),
            forecast=self._forecaster.forecast(
                ledger,
                outstanding_groups_max=core.policy.outstanding_groups_max,
                window_groups=window_groups(core.policy),
            ),
        )


class Rollouts(Scorer, TrainerHandle):
    """Async handle of a run in this process, for its trainer."""

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
            check_callback(on_batch)
        self._on_batch = on_batch
        self._reported_figures: dict[str, float] = {}
        """Figures of evaluations, and off-policy metrics that the trainer reported for the last
        batch. They are added to the next batch's metrics."""
        self._evaluations: dict[str, _RepeatedEvaluation] = {}
        """Evaluations that the run repeats, by their names."""
        self._version = 0
        self._batches = 0
        self._adapters: dict[str, AdapterHandle] = {}
        self._begun: dict[str, tuple[_BegunEvaluation, concurrent.futures.Future[Evaluation]]] = {}
        """Evaluations of :meth:`evaluate_every` that run beside training, by name."""
        self._batches_call = 0
        """Number of the newest call of ``batches()``, whose tasks the run takes."""
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
        """Whether the run continues an earlier one; then publish the checkpoint's weights first."""
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
            raise ConfigError(
                "state_dict() needs a journal, without which a run can't be resumed; pass "
                "journal=True to serve()"
            )
        scheduler = self._running.scheduler
        offer = scheduler.core.tasks.offer if scheduler is not None else 0
        token = ResumeToken(self._running.run_id, self._batches, self._version, max(0, offer))
        return msgspec.structs.asdict(token)

    @override
    def _figures(self) -> dict[str, object]:
        return {
            **super()._figures(),
            "weight version": self._version,
            "batches": self._batches,
        }

    # ------------------------------------------------------------ batches

    async def batches(self, tasks: Tasks, *, episode: EpisodeFunction) -> AsyncIterator["Batch"]:
        """Yield batches made from ``tasks`` until the tasks are used up; the last may be smaller.

        ``tasks`` may be endless, sync or async. The run's own thread iterates over it and runs
        ``episode``. Publish after each batch: until then the batch's groups count against the
        staleness bound.

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
        if self._running.recorder is not None:
            self._running.recorder.offered(num_tasks(tasks))

    async def next_batch(self) -> "Batch | None":
        """Return the next batch, or None once the tasks are used up; raises as :meth:`batches`.

        Evaluations of :meth:`evaluate_every` that are due run first.

        A cancelled call loses no batch: the batch goes back to the run, and a later call gets it
        unless its groups are too stale by then. A trainer may call this during a train step,
        to prefetch. Provided that it publishes after each batch, a prefetched batch's staleness
        includes the publish of that step.
        """
        await self._evaluate_if_due()
        self._mark("train")
        request = BatchRequest()
        try:
            while await self._requests.do(lambda scheduler: scheduler.batch_requests.wait(request)):
                if (batch := self._take(request)) is not None:
                    return batch
        except BaseException:
            self._close_request(request)
            raise
        self._mark("wait")
        await self._evaluate_if_due(is_last=True)
        return None

    async def return_batch(self, number: int) -> bool:
        """Give the newest batch, which was not trained on, back to the run for the next call.

        Returns False if the batch is not the newest any more, or another call waits for a batch.
        """

        async def work(scheduler: Scheduler) -> bool:
            return scheduler.return_batch(number)

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

        The rows' tokens then count as discarded for ``reason``, and no longer as trained; their
        tasks are not repeated. Call this before two further batches have been handed over, and
        before a checkpoint that includes the batch. ``batch`` may be the batch's number.

        Raises:
            ConfigError: the run no longer keeps the batch, or the batch has no such rows.
        """
        await self._requests.do(discarded_rows(batch, rows, reason).report)

    async def report_off_policyness(
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
            mismatch_kl: KL divergence in nats per token. ``policies.diagnostics`` computes both.
            by_lag: result of ``policies.diagnostics.measure_mismatch_by_lag``.

        Raises:
            ConfigError: a value is out of range, or not a number.
        """
        measured = OffPolicyness(
            effective_sample_size=effective_sample_size, mismatch_kl=mismatch_kl
        )

        async def work(scheduler: Scheduler) -> None:
            ess, kl = measured.effective_sample_size, measured.mismatch_kl
            scheduler.handle([ev.OffPolicynessMeasured(ess, kl)])

        await self._requests.do(work)
        reported = off_policy(effective_sample_size, mismatch_kl, by_lag)
        self._reported_figures |= reported.figures()
        if self._running.recorder is not None:
            self._running.recorder.off_policy(reported)

    async def ack(self, state: Mapping[str, Any]) -> None:
        """Acknowledge that this ``state_dict()`` is on disk, so that the run may drop older state.

        Returns once the run's records so far survive a crash too: trajectories, batch metrics,
        statistics, weights.

        Raises:
            RecordingFailed: the run's records can't be written to disk.
        """
        token = resume_token(state)
        await in_thread(self._sync_records)
        await self._requests.do(
            lambda scheduler: scheduler.mark_checkpointed(token.batches, token.offer)
        )

    async def evaluate(
        self,
        tasks: Sequence[Any],
        *,
        episode: EpisodeFunction,
        name: str | None = HELD_OUT,
        version: int | None = None,
    ) -> Evaluation:
        """Run one episode per task, and never train on them.

        With ``version``, or with the setting ``evaluation_engines`` (then by default the newest
        published version), that version samples every token: engines are pinned to it while others
        go on with training and take newer weights. Without both, engines evaluate with their
        present weights, before their turns of training. Without ``evaluation_engines``, one of
        several engines is pinned, and its turns of training move to the others.

        Each call with the same tasks uses the same sampling seeds. The mean reward is recorded as
        ``name`` at the newest published version, for reports, curves and comparisons, and is in the
        next batch's figures as ``NAME_reward``. With None nothing is recorded.

        Raises:
            VersionUnavailable: no engine can be pinned to ``version``. The message lists versions.
        """
        pinned = version
        if pinned is None and self.settings.fleet.evaluation_engines:
            pinned = self._version
        begun = _BegunEvaluation(name, self._version if pinned is None else pinned, self._batches)
        evaluation = await self._requests.do(begun.work(tasks, episode, pinned))
        self._record_evaluation(begun, evaluation)
        return evaluation

    def evaluate_every(
        self,
        versions: int,
        tasks: Sequence[Any],
        *,
        episode: EpisodeFunction,
        name: str = HELD_OUT,
    ) -> None:
        """Have the run evaluate ``tasks`` by itself: before the first batch, whenever ``versions``
        more versions are published, and after the last batch.

        The trainer's request for a batch waits meanwhile, unless the setting ``evaluation_engines``
        keeps engines for evaluations: then they run beside training, each pinned to the version
        that was newest, and only the last ones are waited for. While one runs, no other of its name
        begins. A second call of the same name replaces the first.

        Raises:
            ConfigError: ``versions`` is less than 1, or there are no tasks.
        """
        if versions < 1:
            raise ConfigError(f"evaluations are at least 1 version apart, got {versions}")
        if not len(tasks):
            raise ConfigError("evaluate_every() needs at least one task, got none")
        self._evaluations[name] = _RepeatedEvaluation(versions, tasks, episode)

    async def _evaluate_if_due(self, *, is_last: bool = False) -> None:
        if self.settings.fleet.evaluation_engines:
            await self._evaluate_beside(is_last=is_last)
            return
        for name, each in self._evaluations.items():
            if each.is_due(self._version, is_last=is_last):
                version = self._version
                # Before the first batch, and after the last, the trainer's time is not measured.
                is_measured = self._timekeeper.is_open and not is_last
                if is_measured:
                    self._mark("train")
                await self.evaluate(each.tasks, episode=each.episode, name=name)
                each.evaluated_version = version
                if is_measured:
                    self._mark("evaluate")

    async def _evaluate_beside(self, *, is_last: bool) -> None:
        """Record the evaluations that have ended, and begin those that are due."""
        for name, each in list(self._evaluations.items()):
            if name in self._begun and (is_last or self._begun[name][1].done()):
                await self._end_evaluation(name)
            if name in self._begun or not each.is_due(self._version, is_last=is_last):
                continue
            begun = _BegunEvaluation(name, self._version, self._batches)
            work = begun.work(each.tasks, each.episode, self._version)
            self._begun[name] = begun, self._running.submit(work)
            each.evaluated_version = self._version
            if is_last:
                await self._end_evaluation(name)

    async def _end_evaluation(self, name: str) -> None:
        """Wait for an evaluation beside training, and record it."""
        begun, future = self._begun.pop(name)
        try:
            self._record_evaluation(begun, await result_of(future))
        except VersionUnavailable as error:
            log.warning("evaluation=%s skipped: %s", name, error)

    def _record_evaluation(self, begun: "_BegunEvaluation", evaluation: Evaluation) -> None:
        if (name := begun.name) is None:
            return
        self._reported_figures[f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_reward"] = (
            evaluation.mean_reward
        )
        if self._running.recorder is not None:
            self._running.recorder.evaluation(
                {
                    "name": name,
                    "version": begun.version,
                    "batches": begun.batches,
                    "reward": evaluation.mean_reward,
                    "tasks": len(evaluation.rewards),
                    "failures": evaluation.failures,
                    "seconds": round(begun.seconds, 3),
                }
            )

    # ------------------------------------------------------------ weights

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor]",
        *,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """Bring new weights to the engines while they decode; return the weights' version.

        With ``partial``, only the tensors in ``state_dict`` change; all others keep their values of
        the newest version whose publish did not fail.

        ``wait``: ``live`` returns once all engines serve the weights; ``staged`` once all engines
        hold them beside their live weights, after which no engine can refuse them; ``none`` as soon
        as the tensors are copied, so that the caller may change them. Later failures are raised by
        the next publish or batch.

        A publish started during another one replaces it on engines that have not staged it yet;
        both calls return when the newer weights arrive. Batches are held back until the version is
        certain to succeed; a version that fails adds nothing to any batch's staleness.

        Raises:
            WeightsRefused: names, shapes or dtypes don't fit the model; the old weights stay live.
            EngineLagging: an engine did not receive the weights in time.
            PublishDropped: a newer publish replaced this one, and writing its weights failed.
        """
        return await self._publish(WeightPublish(self._running, state_dict, wait, partial=partial))

    async def rollback(
        self, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int | None = None
    ) -> int:
        """Have engines serve these weights in place of bad ones, under a new version; return it.

        Groups with a token of version ``first_bad`` or newer (default: the newest published) are
        discarded as ``rolled_back``, and their tasks are repeated. Engines are paused meanwhile,
        and stay paused if the rollback fails, because the weights they serve are bad. The new
        version counts like any other, so groups that wait for training age by one version.

        Raises:
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        first_bad = self._version if first_bad is None else first_bad
        return await self._publish(WeightRollback(self._running, state_dict, first_bad=first_bad))

    async def publish_parts(
        self,
        collect: CollectParts,
        *,
        wait: PublishWait = "live",
        partial: bool = False,
        is_rollback: bool = False,
        first_bad: int | None = None,
    ) -> int:
        """Publish weights that the ranks of a remote trainer send in parts; return the version.

        ``collect`` is awaited on the run's event loop once the version is reserved. Otherwise as
        :meth:`publish` and :meth:`rollback`.
        """
        if is_rollback and first_bad is None:
            first_bad = self._version
        call = ShardedPublish(self._running, collect, wait, partial=partial, first_bad=first_bad)
        return await self._publish(call)

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
        mapping with ``r`` and ``lora_alpha``. Only the adapter's tensors are sent. The new weight
        version consists of the previous version and this adapter. Turns select the adapter by
        ``generate(adapter=name)``, or all turns do with ``serve(adapter=name)``.

        Raises:
            ConfigError: it is not a LoRA adapter, or needs features that engines lack.
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        return await self._publish(AdapterPublish(self._running, name, adapter, config, wait))

    async def unload_adapter(self, name: str, *, wait: PublishWait = "live") -> int:
        """Have engines drop an adapter; return the version without it.

        Running turns that use it are refused.

        Raises:
            WeightsRefused: no adapter has this name; otherwise as :meth:`publish`.
        """
        return await self._publish(AdapterRemoval(self._running, name, wait))

    def adapter(self, name: str) -> AdapterHandle:
        """Return the handle of a LoRA adapter with weight versions of its own.

        Unlike :meth:`publish_adapter`, its publishes neither pause nor recompute nor age anything
        but the adapter's own turns.
        """
        if name not in self._adapters:
            self._adapters[name] = AdapterHandle(self._running, name, self._requests.do)
        return self._adapters[name]

    async def _publish(self, call: WeightPublish) -> int:
        self._mark("train")
        try:
            return await self._requests.do(call.run)
        finally:
            self._published(call)

    # ------------------------------------------------------------ the trainer's time and batches

    @override
    async def _enter(self) -> None:
        await super()._enter()
        if self._running.resumed is not None:
            self._batches = self._running.resumed.batches
            self._version = self._running.newest_version

    def _mark(self, ended: TrainerActivity) -> None:
        """Record in the time statistics that this activity of the trainer ends now."""
        scheduler = self._running.scheduler
        engines = scheduler.fleet.work() if scheduler is not None else {}
        self._timekeeper.mark(ended, self._version, engines)

    def _published(self, call: WeightPublish) -> None:
        """Update version, time statistics and records after a publish, successful or failed."""
        if not call.may_be_served:
            return  # failed before any engine swapped
        self._version = max(self._version, call.version)
        self._mark("publish")
        if self._running.recorder is not None:
            self._running.recorder.weights(call.version, call.state_dict, call.parts)

    def _begin_batches(self) -> int:
        """Begin another call of ``batches()``, whose tasks replace the previous call's.

        Raises:
            ConfigError: another call waits for a batch; its tasks would never be used.
        """
        if self._waiting_calls:
            raise ConfigError(
                "batches() was called while another batches() of this run waits for a batch, and a "
                "run takes tasks from one iterator at a time; join the tasks with itertools.chain, "
                "or break out of the first loop"
            )
        self._batches_call += 1
        return self._batches_call

    async def _next_batch_of(self, call: int) -> "Batch | None":
        """Return the next batch for this call of ``batches()``.

        Raises:
            ConfigError: a later call has replaced its tasks.
        """
        if call != self._batches_call:
            raise ConfigError(
                "a later batches() of this run has replaced these tasks; the tasks already started "
                "are trained by the later one, the others are skipped. Use the later iterator; to "
                "train on both, join the tasks with itertools.chain"
            )
        self._waiting_calls += 1
        try:
            return await self.next_batch()
        finally:
            self._waiting_calls -= 1

    def _take(self, request: BatchRequest) -> "Batch | None":
        """Take the batch offered to a request; return None if the offer was withdrawn.

        First the tensors are built, then the batch is taken, and last it is acknowledged: after an
        exception in between, :meth:`_close_request` can give the batch back.
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
        self._post(lambda scheduler: scheduler.batch_requests.acknowledge(request))
        return batch

    def _close_request(self, request: BatchRequest) -> None:
        """End a request without a batch; give back a batch that was offered or taken."""
        if (handover := request.batch) is not None:
            self._batches = min(self._batches, handover.number - 1)
        self._post(lambda scheduler: scheduler.batch_requests.close(request))

    def _post(self, action: Callable[[Scheduler], object]) -> None:
        """Schedule ``action`` on the run's loop, after all work submitted before."""

        async def work(scheduler: Scheduler) -> None:
            action(scheduler)

        with contextlib.suppress(Exception):  # if the run has ended, other calls raise the reason
            self._running.submit(work)

    def _record_batch(
        self, handover: ev.HandOver, batch: "Batch", rows: Sequence[tuple[Rollout, Group]]
    ) -> None:
        scheduler = self._running.scheduler
        ages: dict[str, float] = {}
        if scheduler is not None:
            ages = self._ages.record([row for row, _ in rows], batch, scheduler.published)
        recorder = self._running.recorder
        if recorder is None and self._on_batch is None:
            return
        metrics = {
            **batch_metrics(batch, self._timekeeper.usage()),
            **ages,
            **self._reported_figures,
        }
        self._reported_figures = {}
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
        """Call the user's callback; log and count its exceptions, so the trainer gets the batch."""
        try:
            on_batch(metrics)
        except Exception as error:
            self._batch_callback_errors += 1
            log.error("on_batch raised; the batch is handed to the trainer anyway", exc_info=error)

    def _forecast_from(self, batch: "Batch") -> None:
        scheduler = self._running.scheduler
        self._forecaster.add_batch(
            np.count_nonzero(batch.weight_versions.numpy() >= 0, axis=1),
            batch.group_ids.numpy(),
            batch.staleness.numpy(),
            batch.rollout_ids.numpy(),
            trainer_version=batch.trainer_version,
            usage=self._timekeeper.usage(),
            engines=scheduler.fleet.statistics() if scheduler is not None else (),
        )


class SyncScorer(SyncHandle[Scorer]):
    """Sync variant of :class:`Scorer`."""

    def __repr__(self) -> str:
        return line(type(self).__name__, self._handle._figures())

    def _repr_html_(self) -> str:
        return self._handle._repr_html_()

    @property
    def settings(self) -> RunSettings:
        """The run's settings."""
        return self._handle.settings

    @property
    def run_directory(self) -> Path | None:
        """As :attr:`Scorer.run_directory`."""
        return self._handle.run_directory

    @property
    def engines(self) -> tuple[EngineStatistics, ...]:
        """As :attr:`Scorer.engines`."""
        return self._handle.engines

    @property
    def dashboard_url(self) -> str | None:
        """As :attr:`Scorer.dashboard_url`."""
        return self._handle.dashboard_url

    def statistics(self) -> RunStatistics:
        """As :meth:`Scorer.statistics`."""
        return self._handle.statistics()

    def raise_if_ended(self) -> None:
        """As :meth:`Scorer.raise_if_ended`."""
        self._handle.raise_if_ended()

    def record_facts(self, **facts: object) -> None:
        """As :meth:`Scorer.record_facts`."""
        self._handle.record_facts(**facts)

    async def score_queries(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """As :meth:`RunHandle.score_queries`; code on any event loop may await it."""
        return await self._handle.score_queries(queries)


class SyncRollouts(SyncTrainerHandle, SyncScorer):
    """Sync variant of :class:`Rollouts`, whose calls block."""

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
    report_off_policyness = blocking(Rollouts.report_off_policyness)
    ack = blocking(Rollouts.ack)
    evaluate = blocking(Rollouts.evaluate)

    def evaluate_every(
        self,
        versions: int,
        tasks: Sequence[Any],
        *,
        episode: EpisodeFunction,
        name: str = HELD_OUT,
    ) -> None:
        """As :meth:`Rollouts.evaluate_every`."""
        self._handle.evaluate_every(versions, tasks, episode=episode, name=name)

    publish = blocking(Rollouts.publish)
    rollback = blocking(Rollouts.rollback)

    def adapter(self, name: str) -> SyncAdapterHandle:
        """As :meth:`Rollouts.adapter`."""
        return SyncAdapterHandle(self._handle.adapter(name))

    publish_adapter = blocking(Rollouts.publish_adapter)
    unload_adapter = blocking(Rollouts.unload_adapter)


def warn_if_oversubscribed(settings: RunSettings) -> None:
    """Warn if the trainer's torch has more threads than the engines leave free cores.

    OpenMP's threads spin while they wait for each other. With fewer cores than threads, they spin
    for threads that are not running: one run took eight times as long.
    """
    import torch

    if not settings.engine_processes or settings.engine.uses_gpu:
        return
    engine_threads = settings.engine_processes * settings.engine_threads
    free_cores = max(1, cores() - engine_threads)
    if (threads := torch.get_num_threads()) > free_cores:
        log.warning(
            "torch_threads=%d cores=%d engine_threads=%d: the trainer's torch and the engines have "
            "more threads than there are cores, and slow each other down; set OMP_NUM_THREADS=%d, "
            "or call torch.set_num_threads(%d)",
            threads,
            cores(),
            engine_threads,
            free_cores,
            free_cores,
        )


def _figures_of(s: RunStatistics) -> dict[str, object]:
    """Return the figures of a snapshot that a notebook shows."""
    bound = "none" if s.staleness_bound is None else s.staleness_bound
    return {
        "groups": f"{s.running_groups} running, {s.buffered_groups} buffered",
        "rollouts": f"{s.trained_rollouts} trained, {sum(s.discarded_rollouts.values())} discarded",
        "staleness": f"mean {s.mean_staleness:.2f}, max {s.max_staleness_seen}, bound {bound}",
        "tokens per second": round(s.tokens_per_s),
        "idle": f"trainer {s.trainer_idle_share:.0%}, engines {s.engine_idle_share:.0%}",
    }


def _text_of(error: Exception | None) -> str | None:
    return str(error) if error is not None else None
