"""What do the async and the sync face of a run have in common? All but the waiting.

It starts and stops the run, keeps the trainer's time and turns what is handed over into a batch.
"""

import concurrent.futures
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from tidegate.errors import ConfigError
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.forecast import Forecaster, window_groups
from tidegate.orchestrator.core.group import Group, kept_rows
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.feed.ages import BatchAges
from tidegate.orchestrator.journal.resuming import Resume, ResumeToken
from tidegate.orchestrator.loop_watch import LOOK_INTERVAL_S
from tidegate.orchestrator.observing.off_policy import OffPolicy
from tidegate.orchestrator.observing.watching import (
    OnBatch,
    batch_metrics,
    refuse_unless_called,
    tokens_by_lag,
)
from tidegate.orchestrator.records.trace import TrainerActivity
from tidegate.orchestrator.run import Run
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.statistics import RunStatistics
from tidegate.orchestrator.timekeeping import Timekeeper
from tidegate.orchestrator.weights.publish_call import PublishCall

if TYPE_CHECKING:
    from tidegate.orchestrator.feed.batches import Batch

Result = TypeVar("Result")

log = logging.getLogger("tidegate")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards of one episode per task, outside training."""

    rewards: list[float | None]
    """In the order of the tasks; None where the episode failed."""

    @property
    def mean_reward(self) -> float:
        """Failed episodes count as 0."""
        return sum(reward or 0.0 for reward in self.rewards) / max(1, len(self.rewards))

    @property
    def failures(self) -> int:
        """Episodes that raised or timed out."""
        return sum(reward is None for reward in self.rewards)


class RunClient:
    """What the async and the sync face have in common: all but the waiting."""

    def __init__(
        self, settings: RunSettings, resume: Resume = None, *, on_batch: OnBatch | None = None
    ) -> None:
        self.settings = settings
        self._resume = resume
        if on_batch is not None:
            refuse_unless_called(on_batch)
        self._on_batch = on_batch
        self._told_off_policy: dict[str, float] = {}
        """How far off-policy the trainer found the batch before."""
        self._run: Run | None = None
        self._version = 0
        self._batches = 0
        """Delivered to the trainer so far."""
        self._keeper = Timekeeper(None)
        self._forecaster = Forecaster()
        self._ages = BatchAges()
        self._batches_untold = 0
        self._final: RunStatistics | None = None
        self._old_sigterm: Any = None

    @property
    def version(self) -> int:
        """The newest weight version published; 0 is the model directory's."""
        return self._version

    @property
    def batches_received(self) -> int:
        """Batches handed to the trainer so far, those before a resume included."""
        return self._batches

    @property
    def run_directory(self) -> Path | None:
        """Where the run leaves its records."""
        return self.settings.run_directory

    def statistics(self) -> RunStatistics:
        """The run as of now; after it has ended, as of its end."""
        if self._final is not None:
            return self._final
        return self._look(self._statistics_of)

    @property
    def dashboard_url(self) -> str | None:
        """Where the run can be looked at, with the token if one is needed; None: nowhere."""
        dashboard = self._running.dashboard
        return dashboard.url if dashboard is not None else None

    @property
    def is_resumed(self) -> bool:
        """Whether this goes on with a run; then publish the checkpoint's weights first."""
        return self._running.resumed is not None

    def state_dict(self) -> dict[str, Any]:
        """How far the trainer has come with the run: to be saved in its checkpoint.

        Take it when the batch last received is trained, and save it in one piece with the weights
        made from it, before they are published. ``serve(resume=…)`` takes it.

        Raises:
            ConfigError: the run keeps no journal, so it can't be resumed.
        """
        if not self._running.run_id:
            raise ConfigError("a run without a journal can't be resumed; give serve() journal=True")
        scheduler = self._running.scheduler
        offer = scheduler.core.tasks.offer if scheduler is not None else 0
        token = ResumeToken(self._running.run_id, self._batches, self._version, max(0, offer))
        return msgspec.structs.asdict(token)

    def raise_if_over(self) -> None:
        """Raise what the run failed of, or that it has ended, if it has."""
        if self._running.has_ended:
            raise self._running.failure()

    def note(self, **facts: object) -> None:
        """Add facts to the run's record, e.g. ``reward_before=…``."""
        recorder = self._running.recorder
        if recorder is not None:
            recorder.finish(self.statistics(), **facts)

    # ------------------------------------------------------------ for the two faces

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise RuntimeError("the run has not been started; use it in a `with` statement")
        return self._run

    def _submit(
        self, work: Callable[[Scheduler], Awaitable[Result]]
    ) -> "concurrent.futures.Future[Result]":
        return self._running.submit(work)

    def _look(self, at: Callable[[Scheduler], Result]) -> Result:
        """Have something read off the run, in its loop; from outside, if that is blocked."""
        scheduler = self._running.scheduler
        if self._running.is_own_thread and scheduler is not None:
            return at(scheduler)

        async def look(scheduler: Scheduler) -> Result:
            return at(scheduler)

        looked = self._submit(look)
        while not looked.done():
            if self._running.loop_watch.blocked is not None and scheduler is not None:
                with contextlib.suppress(RuntimeError):  # it has just gone on, and changed things
                    return at(scheduler)
            concurrent.futures.wait([looked], LOOK_INTERVAL_S)
        return looked.result()

    def _start(self) -> "concurrent.futures.Future[None]":
        if self._run is not None:
            raise RuntimeError("a run is used once; call serve() again for another")
        self._run = Run(self.settings, self._resume)
        if self._run.resumed is not None:
            self._batches = self._run.resumed.batches
            self._version = self._run.newest_version
        self._keeper = Timekeeper(self._run.notes)
        self._exit_on_sigterm()
        self._run.start()
        self._run.show(look=self._look, statistics=self._statistics_of)
        return self._run.ready

    def _stop(self) -> None:
        if self._run is None:
            return
        if self._final is None:
            if self._run.dashboard is not None:
                self._run.dashboard.close()
            self._run.stop()
            scheduler = self._run.scheduler
            if scheduler is not None:
                self._final = self._statistics_of(scheduler)
            self._close_recorder()
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None

    def _close_recorder(self) -> None:
        recorder = self._running.recorder
        if recorder is not None:
            if self._final is not None:
                recorder.finish(self._final)
            recorder.close()

    def _exit_on_sigterm(self) -> None:
        """SIGTERM ends a program as Ctrl-C does, engines first, unless it has its own handler."""
        is_ours = threading.current_thread() is threading.main_thread()
        if is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def _mark(self, ended: TrainerActivity) -> None:
        """Note the end of one of the trainer's activities."""
        scheduler = self._running.scheduler
        engines = scheduler.fleet.work() if scheduler is not None else {}
        self._keeper.mark(ended, self._version, engines)

    def _published(self, publish: PublishCall) -> None:
        """A call to publish is over, one way or the other."""
        if not publish.may_be_served:
            return  # it failed before any engine swapped
        self._version = max(self._version, publish.version)
        self._mark("publish")
        if self._running.recorder is not None:
            self._running.recorder.weights(publish.version, publish.state_dict, publish.parts)

    def _batch(self, handover: ev.HandOver) -> "Batch":
        from tidegate.orchestrator.feed.batches import batch_of_rows  # torch: not who only audits

        self._batches = handover.number
        rows, version = kept_rows(handover.groups), handover.trainer_version
        batch = batch_of_rows(rows, handover.groups, version, handover.number)
        self._forecast_from(batch)
        self._note_batch(handover, batch, rows)
        return batch

    def _note_batch(
        self, handover: ev.HandOver, batch: "Batch", rows: Sequence[tuple[Rollout, Group]]
    ) -> None:
        scheduler = self._running.scheduler
        ages: dict[str, float] = {}
        if scheduler is not None:
            ages = self._ages.note([row for row, _ in rows], batch, scheduler.published)
        notes, live = self._running.notes, self._running.live
        if notes is None and self._on_batch is None:
            return
        metrics = {**batch_metrics(batch, self._keeper.usage()), **ages, **self._told_off_policy}
        self._told_off_policy = {}
        if notes is not None:
            advantages, version = batch.advantages.tolist(), handover.trainer_version
            kept = [(row, group.task) for row, group in rows]
            notes.trained(kept, advantages=advantages, consumed_version=version)
            notes.batch(metrics)
        if live is not None:
            live.trained_lags(tokens_by_lag(batch))
        if self._on_batch is not None:
            self._tell(self._on_batch, metrics)

    def _tell(self, on_batch: OnBatch, metrics: dict[str, float]) -> None:
        """Whoever is told of a batch has no say in whether the trainer gets it."""
        try:
            on_batch(metrics)
        except Exception as error:
            self._batches_untold += 1
            log.error("on_batch raised; the trainer gets its batch all the same", exc_info=error)

    def _note_off_policy(self, told: OffPolicy) -> None:
        """Of the batch before; the next one's figures will have it beside their own."""
        self._told_off_policy = told.figures()
        if self._running.live is not None:
            self._running.live.off_policy(told)

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

    def _statistics_of(self, scheduler: Scheduler) -> RunStatistics:
        core, usage = scheduler.core, self._keeper.usage()
        staleness, ledger = core.trained.staleness, core.ledger.snapshot()
        return RunStatistics(
            wall_s=usage.wall_s,
            trainer_version=core.trainer_version,
            live_version=core.turns.live_version,
            capacity_groups=core.capacity_groups,
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
            pause_mode=scheduler.control.pauses.mode,
            asleep=scheduler.control.sleeps.asleep,
            staging_version=scheduler.control.publisher.staging_version,
            publish_failure=_say(scheduler.control.publisher.failure),
            stuck=(*filter(None, [self._running.loop_watch.blocked]), *scheduler.stuck),
            discards=core.groups.discards.by_reason(generated_tokens=ledger.generated),
            length_bias=core.groups.discards.length_bias(),
            prefilled_tokens=scheduler.fleet.prefilled_tokens,
            cached_tokens=scheduler.fleet.cached_tokens,
            parked_episodes=scheduler.parked_episodes,
            staleness_in_flight=dict(sorted(self._ages.in_flight.items())),
            staleness_in_queue=dict(sorted(self._ages.in_queue.items())),
            waited_groups=self._ages.groups,
            group_wait_s=self._ages.group_wait_s,
            episode_s=scheduler.episode_seconds(),
            trainer_s=self._keeper.spent_s(),
            publishes=self._keeper.publishes,
            batches_untold=self._batches_untold,
            forecast=self._forecaster.forecast(
                ledger,
                outstanding_groups_max=core.policy.outstanding_groups_max,
                window_groups=window_groups(core.policy),
            ),
        )


def _say(error: Exception | None) -> str | None:
    return str(error) if error is not None else None
