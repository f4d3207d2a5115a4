"""Batches, tasks and evaluations for the trainer of a run's weights, or of one adapter.

:class:`BatchHandle` is the part of a trainer's handle that does not depend on what is published.
``rollouts.py`` adds the run's weights to it, ``adapters.py`` an adapter's. It submits requests to
the run's thread, keeps the trainer's time, and turns what the core hands over into tensors on the
trainer's thread.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import msgspec
import numpy as np
from typing_extensions import override

from tidegate.errors import ConfigError, TidegateError, VersionUnavailable
from tidegate.orchestrator.batches.ages import BatchAges
from tidegate.orchestrator.batches.tasks import Tasks, num_tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.failure_counts import failure_statistics
from tidegate.orchestrator.core.group import Group, kept_rows
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.episodes.tracebacks import at_the_call
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.orchestrator.journal.resuming import ResumeToken, resume_token
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.orchestrator.telemetry.forecast import (
    Forecaster,
    RunTotals,
    waits_for_stragglers,
    window_groups,
)
from tidegate.orchestrator.telemetry.off_policy import off_policy
from tidegate.orchestrator.telemetry.recorder import Recorder, TrainerActivity
from tidegate.orchestrator.telemetry.statistics import RunStatistics, mean_of_counts
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.batch_metrics import (
    OnBatch,
    batch_metrics,
    check_callback,
    tokens_by_lag,
)
from tidegate.orchestrator.trainer.discarded_rows import NOT_TRAINED, discarded_rows
from tidegate.orchestrator.trainer.handle import (
    HELD_OUT,
    Evaluation,
    RunRequests,
    SyncTrainerHandle,
    TrainerHandle,
    blocking,
    forwarded,
    in_thread,
    result_of,
)
from tidegate.orchestrator.trainer.run import Run
from tidegate.transport.trainer_messages import ControlAction

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.policies.diagnostics import LagBucket

Result = TypeVar("Result")

log = logging.getLogger("tidegate")


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
        self,
        tasks: Sequence[Any],
        episode: EpisodeFunction,
        pinned_version: int | None,
        adapter: str,
    ) -> "Callable[[Scheduler], Awaitable[Evaluation]]":
        """Return the work for the run's loop; ``pinned_version`` must sample all tokens."""

        async def evaluate(scheduler: Scheduler) -> Evaluation:
            started_s = time.monotonic()
            rollouts = await scheduler.evaluate(list(tasks), episode, pinned_version, adapter)
            self.seconds = time.monotonic() - started_s
            return Evaluation([rollout.reward for rollout in rollouts])

        return evaluate


class LocalRequests(RunRequests):
    """Request interface of a run in this process: carries requests to its event loop."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def do(self, work: Callable[[Scheduler], Awaitable[Result]]) -> Result:
        """Run ``work`` on the run's event loop, and wait for it on the caller's event loop."""
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
        return await self.do(lambda scheduler: scheduler.score(queries))

    @override
    async def control(self, action: ControlAction, **arguments: Any) -> Any:
        return await self.do(lambda scheduler: CONTROLS[action](scheduler, **arguments))


CONTROLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "pause": lambda scheduler, **how: scheduler.control.pause(**how),
    "resume": lambda scheduler: scheduler.control.pause(None),
    "sleep": lambda scheduler, **how: scheduler.control.sleep(**how),
    "wake": lambda scheduler, **how: scheduler.control.wake(**how),
    "drain": lambda scheduler, **how: scheduler.engines.drains.drain(**how),
    "scale": lambda scheduler, **how: scheduler.scale(**how),
}
"""What :class:`RunHandle` asks of a run in this process, by the name of its method."""


def as_work(action: Callable[[Scheduler], Result]) -> Callable[[Scheduler], Awaitable[Result]]:
    """Return work for the run's loop that calls ``action`` there."""

    async def work(scheduler: Scheduler) -> Result:
        return action(scheduler)

    return work


class LocalHandle(ABC):
    """Handle of a run in this process."""

    @property
    @abstractmethod
    def _running(self) -> Run:
        """The run; raises RuntimeError if it has not been started."""

    async def _do(self, work: Callable[[Scheduler], Awaitable[Result]]) -> Result:
        """As :meth:`LocalRequests.do`."""
        return await LocalRequests(self._running).do(work)


class MeasuredHandle(LocalHandle):
    """Handle of a run that can take the run's statistics."""

    _adapter = ""
    """Trained adapter that the statistics cover; empty: the run's weights."""

    def __init__(self) -> None:
        self._timekeeper = Timekeeper(None)
        self._forecaster = Forecaster()
        self._ages = BatchAges()
        self._batch_callback_errors = 0

    def _statistics_of(self, scheduler: Scheduler) -> RunStatistics:
        core, usage = scheduler.core.of(self._adapter), self._timekeeper.usage()
        staleness, ledger = core.trained.staleness, core.ledger.snapshot()
        return RunStatistics(
            wall_s=usage.wall_s,
            trainer_version=core.trainer_version,
            live_version=core.versions.live_version,
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
            mean_staleness=core.trained.mean_staleness,
            reused_rollouts=core.trained.reused_rollouts,
            reused_tokens=core.trained.reused_tokens,
            staleness_histogram=dict(sorted(staleness.items())),
            trainer_idle_share=usage.trainer_idle_share,
            engine_idle_share=usage.engine_idle_share,
            tokens_per_s=usage.tokens_per_s,
            ledger=ledger,
            evaluation_ledger=core.evaluation_ledger.snapshot(),
            engines=scheduler.fleet.statistics(),
            engines_wanted=None if scheduler.elastic is None else scheduler.elastic.wanted,
            scaling="" if scheduler.elastic is None else scheduler.elastic.decision,
            pause_mode=scheduler.control.state.pauses.mode,
            asleep=scheduler.control.state.sleeps.asleep,
            staging_version=scheduler.control.state.weights.staging_version,
            publish_failure=_text_of(scheduler.control.state.shared.failure),
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
            held_batches=tuple(batch.number for batch in core.handed.held),
            event_loop_longest_block_s=self._running.loop_watch.longest_block_s,
            batch_callback_errors=self._batch_callback_errors,
            tool_call_turns=scheduler.tool_calls.turns,
            parsed_tool_call_turns=scheduler.tool_calls.parsed_turns,
            escaped_messages=scheduler.escaped_messages,
            episode_failures=failure_statistics(core.groups.failures),
            groups_kept_at_limit=core.prompts.kept_at_limit,
            tasks_drawn=sum(len(record.statistics) for record in core.task_records.all),
            task_draws=sum(record.num_draws for record in core.task_records.all),
            task_replays=sum(record.num_replays for record in core.task_records.all),
            forecast=self._forecaster.forecast(self._totals(scheduler)),
        )

    def _totals(self, scheduler: Scheduler) -> RunTotals:
        core, fleet = scheduler.core.of(self._adapter), scheduler.fleet
        publish_s = self._timekeeper.spent_s().get("publish", 0.0)
        return RunTotals(
            ledger=core.ledger.snapshot(),
            outstanding_groups_max=core.policy.outstanding_groups_max,
            window_groups=window_groups(core.policy),
            waits_for_stragglers=waits_for_stragglers(core.policy),
            eager_versions=core.policy.just_in_time_after_versions,
            activity_s=sum(scheduler.episode_seconds().values()),
            publish_s=publish_s / max(1, self._timekeeper.publishes),
            queue_staleness=mean_of_counts(self._ages.from_queue),
            prefilled_tokens=fleet.context_tokens - fleet.cached_context_tokens,
        )


class BatchHandle(MeasuredHandle, TrainerHandle):
    """Async handle of one trainer in this process: its batches, tasks and evaluations."""

    def __init__(self, on_batch: OnBatch | None = None) -> None:
        MeasuredHandle.__init__(self)
        TrainerHandle.__init__(self)
        if on_batch is not None:
            check_callback(on_batch)
        self._on_batch = on_batch
        self._reported_figures: dict[str, float] = {}
        """Figures of evaluations, and off-policy metrics that the trainer reported for the last
        batch. They are added to the next batch's metrics."""
        self._evaluations: dict[str, _RepeatedEvaluation] = {}
        """Evaluations that the run repeats, by their names."""
        self._begun: dict[str, tuple[_BegunEvaluation, concurrent.futures.Future[Evaluation]]] = {}
        """Evaluations of :meth:`evaluate_every` that run beside training, by name."""
        self._batches_call = 0
        """Number of the newest call of ``batches()``, whose tasks the run takes."""
        self._waiting_calls = 0
        """Number of ``batches()`` calls that wait for a batch now."""
        self.columns_read: set[str] = set()
        """:attr:`Batch.columns_read` of all batches of this handle."""

    @abstractmethod
    def statistics(self) -> RunStatistics:
        """Return a snapshot of the run; once it has ended, the final one."""

    @property
    def _has_evaluation_engines(self) -> bool:
        """Whether the run keeps engines for evaluations of what this trainer publishes."""
        return self._running.settings.fleet.evaluation_engines > 0

    @property
    def _recorder(self) -> Recorder | None:
        """Recorder of the trainer's batches; None if they are not recorded."""
        return self._running.recorder

    def _side(self, scheduler: Scheduler) -> TrainerSide:
        """Return the run's side of this trainer."""
        return scheduler.trainers[self._adapter]

    def _sync_records(self) -> None:
        """Record the current statistics, and wait until all records survive a crash."""
        recorder = self._recorder
        if recorder is not None:
            recorder.statistics(self.statistics())
            recorder.sync()

    @property
    def batches_received(self) -> int:
        """Number of batches handed to the trainer, those before a resume included."""
        return self._received

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one; then publish the checkpoint's weights first."""
        return self._running.resumed is not None

    def state_dict(self, *, trained: "Batch | int | None" = None) -> dict[str, Any]:
        """Return the trainer's position in the run, to be saved in its checkpoint.

        ``trained`` is the last batch, or its number, that the checkpoint's weights are trained on;
        they contain all batches before it, too. By default the batch received last: a trainer that
        asks for batches ahead must say which it is. Save the position atomically with the weights,
        before you publish them. ``serve(resume=…)`` takes it.

        Raises:
            ConfigError: the run keeps no journal, so it can't be resumed; or ``trained`` is left
                out, and the batch received last was asked for ahead.
        """
        if not self._running.run_id:
            raise ConfigError(
                "state_dict() needs a journal, without which a run can't be resumed; pass "
                "journal=True to serve()"
            )
        scheduler = self._running.scheduler
        offer = self._side(scheduler).core.tasks.offer if scheduler is not None else 0
        batches = self._batches_of_checkpoint(trained)
        token = ResumeToken(self._running.run_id, batches, self._version, max(0, offer))
        return msgspec.structs.asdict(token)

    # ------------------------------------------------------------ batches

    async def batches(
        self, tasks: Tasks, *, episode: EpisodeFunction, agents: Sequence[str] = ()
    ) -> AsyncIterator["Batch"]:
        """Yield batches made from ``tasks`` until the tasks are used up; the last may be smaller.

        ``tasks`` may be endless, sync or async. The run's own thread iterates over it and runs
        ``episode``. Publish after each batch: until then the batch's groups count against the
        staleness bound. If you step the iterator ahead of training, say which batches a publish is
        made from.

        After this iterator ends, or you break out of it, you may call ``batches()`` again; the new
        iterator also trains the unfinished tasks of the earlier one. Two at once are refused.

        Raises:
            PublishNeeded: the next batch could never fill without a publish.
            EngineLost: no engine is left.
            EpisodeError: ``episode`` fails every time, or no task has given a batch because of
                failures.
            ConfigError: another ``batches()`` waits for a batch, or has replaced these tasks.
        """
        call = self._begin_batches()
        await self.offer(tasks, episode=episode, agents=agents)
        while (batch := await self._next_batch_of(call)) is not None:
            yield batch

    async def offer(
        self, tasks: Tasks, *, episode: EpisodeFunction, agents: Sequence[str] = ()
    ) -> None:
        """Replace the run's tasks and episode; :meth:`next_batch` then returns the batches made.

        :meth:`batches` does both. ``agents`` are trained adapters that ``episode`` samples beside
        its own, by ``episode.agent(name)``. A task starts once all of them may start a group; their
        trainers get their own rollouts by :meth:`next_batch`, without tasks of their own.

        Raises:
            ConfigError: an agent is not trained by this run.
        """
        await self._do(as_work(lambda s: s.offer(tasks, episode, self._adapter, agents)))
        if self._recorder is not None:
            self._recorder.offered(num_tasks(tasks))

    async def next_batch(self) -> "Batch | None":
        """Return the next batch, or None once the tasks are used up; raises as :meth:`batches`.

        Evaluations of :meth:`evaluate_every` that are due run first.

        A cancelled call loses no batch: the batch goes back to the run, and a later call gets it,
        unless its groups have become too stale meanwhile. A trainer may call this during a train
        step, to prefetch; it then says which batches each publish is made from
        (``publish(…, batches=[batch])``). The batch's staleness includes the publishes of the
        batches that you hold before it.
        """
        await self._evaluate_if_due()
        self._mark("train")
        request, reads_advantages = BatchRequest(), "advantages" in self.columns_read

        async def wait(scheduler: Scheduler) -> bool:
            if reads_advantages:
                scheduler.watch.read_advantages(self._adapter)
            is_offered = await self._side(scheduler).batch_requests.wait(request)
            if not is_offered and (failure := scheduler.watch.failure_of(self._adapter)):
                raise failure
            return is_offered

        try:
            while await self._do(wait):
                if (batch := self._take(request)) is not None:
                    return batch
        except TidegateError as error:
            self._close_request(request)
            raise at_the_call(error)  # noqa: B904 - the same error, which keeps its cause
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
        if not await self._do(as_work(lambda s: self._side(s).batch_requests.return_batch(number))):
            return False
        self._received = number - 1
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
        discarded = discarded_rows(batch, rows, reason)
        await self._do(lambda scheduler: discarded.report(self._side(scheduler)))

    async def report_off_policyness(
        self,
        *,
        effective_sample_size: float | None = None,
        mismatch_kl: float | None = None,
        by_lag: "Sequence[LagBucket]" = (),
    ) -> None:
        """Report how far off-policy the last batch was, as the loss measured it.

        Metrics, dashboards and reports show it.

        Args:
            effective_sample_size: share of the batch that its importance weights leave, in (0, 1].
            mismatch_kl: KL divergence in nats per token. ``policies.diagnostics`` computes both.
            by_lag: result of ``policies.diagnostics.measure_mismatch_by_lag``.

        Raises:
            ConfigError: a value is out of range, or not a number.
        """
        reported = off_policy(effective_sample_size, mismatch_kl, by_lag)
        self._reported_figures |= reported.figures()
        if self._recorder is not None:
            self._recorder.off_policy(reported)

    async def ack(self, state: Mapping[str, Any]) -> None:
        """Acknowledge that this ``state_dict()`` is on disk, so that the run may drop older state.

        Returns once the run's records so far survive a crash too: trajectories, batch metrics,
        statistics, weights.

        Raises:
            RecordingFailed: the run's records can't be written to disk.
        """
        token = resume_token(state)
        await in_thread(self._sync_records)
        await self._do(lambda s: self._side(s).mark_checkpointed(token.batches, token.offer))

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
        published version), that version samples every token: some engines are pinned to it, while
        the others continue with training and take newer weights. Without both, engines evaluate
        with their present weights, before their turns of training. Without ``evaluation_engines``,
        one of several engines is pinned, and its turns of training move to the others.

        Each call with the same tasks uses the same sampling seeds. The mean reward is recorded as
        ``name`` at the newest published version, for reports, curves and comparisons, and is in the
        next batch's figures as ``NAME_reward``. With None nothing is recorded.

        Raises:
            VersionUnavailable: no engine can be pinned to ``version``. The message lists versions.
        """
        pinned = version
        if pinned is None and self._has_evaluation_engines:
            pinned = self._version
        begun = _BegunEvaluation(name, self._version if pinned is None else pinned, self._received)
        evaluation = await self._do(begun.work(tasks, episode, pinned, self._adapter))
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
        keeps engines for evaluations: then evaluations run beside training, each pinned to the
        version that was newest at its start, and only the last ones are waited for. While an
        evaluation runs, no other of its name begins. A second call of the same name replaces the
        first.

        Raises:
            ConfigError: ``versions`` is less than 1, or there are no tasks.
        """
        if versions < 1:
            raise ConfigError(f"evaluations are at least 1 version apart, got {versions}")
        if not len(tasks):
            raise ConfigError("evaluate_every() needs at least one task, got none")
        self._evaluations[name] = _RepeatedEvaluation(versions, tasks, episode)

    async def _evaluate_if_due(self, *, is_last: bool = False) -> None:
        if self._has_evaluation_engines:
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
            begun = _BegunEvaluation(name, self._version, self._received)
            work = begun.work(each.tasks, each.episode, self._version, self._adapter)
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
        if self._recorder is not None:
            self._recorder.evaluation(
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

    # ------------------------------------------------------------ the trainer's time and batches

    def _mark(self, ended: TrainerActivity) -> None:
        """Record in the time statistics that this activity of the trainer ends now."""
        scheduler = self._running.scheduler
        engines = scheduler.fleet.work() if scheduler is not None else {}
        self._timekeeper.mark(ended, self._version, engines)

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
        rows, version = kept_rows(handover.groups), handover.trainer_version
        images = self._running.model.images
        batch = batch_of_rows(rows, handover.groups, version, handover.number, images)
        batch = replace(batch, columns_read=self.columns_read)
        if not request.take(handover):
            return None
        self._received, self._is_ahead = handover.number, handover.is_ahead
        fresh, fresh_rows = _first_uses(batch, rows)
        if fresh_rows:
            self._forecast_from(fresh, fresh_rows)
        self._record_batch(handover, batch, rows, self._ages_of(fresh, fresh_rows))
        self._post(lambda scheduler: self._side(scheduler).batch_requests.acknowledge(request))
        return batch

    def _close_request(self, request: BatchRequest) -> None:
        """End a request without a batch; give back a batch that was offered or taken."""
        if (handover := request.batch) is not None:
            self._received = min(self._received, handover.number - 1)
        self._post(lambda scheduler: self._side(scheduler).batch_requests.close(request))

    def _post(self, action: Callable[[Scheduler], object]) -> None:
        """Schedule ``action`` on the run's loop, after all work submitted before."""
        with contextlib.suppress(Exception):  # if the run has ended, other calls raise the reason
            self._running.submit(as_work(action))

    def _ages_of(self, batch: "Batch", rows: Sequence[tuple[Rollout, Group]]) -> dict[str, float]:
        scheduler = self._running.scheduler
        if scheduler is None:
            return {}
        return self._ages.record([row for row, _ in rows], batch, self._side(scheduler).published)

    def _record_batch(
        self,
        handover: ev.HandOver,
        batch: "Batch",
        rows: Sequence[tuple[Rollout, Group]],
        ages: Mapping[str, float],
    ) -> None:
        recorder = self._recorder
        if recorder is None and self._on_batch is None:
            return
        metrics = {
            **batch_metrics(batch, self._timekeeper.usage()),
            **ages,
            **self._reported_figures,
        }
        self._reported_figures = {}
        if recorder is not None:
            advantages, version = batch.group_advantages.tolist(), handover.trainer_version
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

    def _forecast_from(self, batch: "Batch", rows: Sequence[tuple[Rollout, Group]]) -> None:
        scheduler = self._running.scheduler
        roots = [row if row.branch_of is None else row.root for row, _ in rows]
        self._forecaster.add_batch(
            np.count_nonzero(batch.weight_versions.numpy() >= 0, axis=1),
            batch.group_ids.numpy(),
            batch.staleness.numpy(),
            batch.rollout_ids.numpy(),
            trainer_version=batch.trainer_version,
            usage=self._timekeeper.usage(),
            engines=scheduler.engines.training_statistics() if scheduler is not None else (),
            began_s=np.array([root.began_s for root in roots]),
            ended_s=np.array([root.ended_s for root in roots]),
        )
        if not self._adapter and scheduler is not None and scheduler.elastic is not None:
            self._post(self._decide_engines)

    def _decide_engines(self, scheduler: Scheduler) -> None:
        """Ask the elasticity policy, after a batch."""
        assert scheduler.elastic is not None
        batches, totals = scheduler.elastic.policy.batches, self._totals(scheduler)
        scheduler.elastic.decide(self._forecaster.measure_last(batches, totals))


class SyncBatchHandle(SyncTrainerHandle):
    """Sync variant of :class:`BatchHandle`."""

    _handle: BatchHandle

    @property
    def batches_received(self) -> int:
        """Number of batches handed to the trainer, those before a resume included."""
        return self._handle.batches_received

    def batches(
        self, tasks: Tasks, *, episode: EpisodeFunction, agents: Sequence[str] = ()
    ) -> Iterator["Batch"]:
        """As :meth:`Rollouts.batches`."""
        call = self._handle._begin_batches()
        self.offer(tasks, episode=episode, agents=agents)
        while (batch := self._next_batch_of(call)) is not None:
            yield batch

    statistics = forwarded(BatchHandle.statistics)
    offer = blocking(BatchHandle.offer)
    next_batch = blocking(BatchHandle.next_batch)
    _next_batch_of = blocking(BatchHandle._next_batch_of)
    return_batch = blocking(BatchHandle.return_batch)
    discard = blocking(BatchHandle.discard)
    ack = blocking(BatchHandle.ack)
    report_off_policyness = blocking(BatchHandle.report_off_policyness)
    evaluate = blocking(BatchHandle.evaluate)
    evaluate_every = forwarded(BatchHandle.evaluate_every)


def _first_uses(
    batch: "Batch", rows: Sequence[tuple[Rollout, Group]]
) -> "tuple[Batch, Sequence[tuple[Rollout, Group]]]":
    """Return a batch and its rows without those that were trained before: figures of generation
    count a rollout once."""
    fresh = [index for index, (row, _) in enumerate(rows) if row.use == 1]
    if len(fresh) == len(rows):
        return batch, rows
    from tidegate.orchestrator.batches.batch_rows import select_rows  # imports torch

    return select_rows(batch, fresh), [rows[index] for index in fresh]


def _text_of(error: Exception | None) -> str | None:
    return str(error) if error is not None else None
