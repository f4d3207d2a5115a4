"""Handles of a run in this process: batches in, weights out, for async trainers and for sync ones.

    async with tidegate.serve(model=path, engines=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict(), batches=[batch])

The run has a thread of its own (:mod:`tidegate.orchestrator.trainer.run`), so a train step that
blocks stalls no rollout. A handle submits requests to that thread, keeps the trainer's time, and
turns what the core hands over into tensors on the trainer's thread.
"""

import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from tidegate.errors import ConfigError, RecordingFailed, check_not_forked
from tidegate.orchestrator.core.control_events import PublishWait
from tidegate.orchestrator.journal.resuming import Resume
from tidegate.orchestrator.scheduler.loop_watch import CHECK_INTERVAL_S
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings, cores
from tidegate.orchestrator.telemetry.html_tables import html_table, line
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.adapters import (
    AdapterHandle,
    AdapterTrainer,
    SyncAdapterHandle,
    SyncAdapterTrainer,
    adapter_settings,
)
from tidegate.orchestrator.trainer.batch_handle import (
    BatchHandle,
    LocalRequests,
    MeasuredHandle,
    SyncBatchHandle,
    as_work,
)
from tidegate.orchestrator.trainer.batch_metrics import OnBatch
from tidegate.orchestrator.trainer.handle import (
    BatchesOfPublish,
    RunHandle,
    SyncHandle,
    blocking,
    forwarded,
    numbers_of,
    result_of,
    run_blocking,
)
from tidegate.orchestrator.trainer.run import Run, RunParts
from tidegate.orchestrator.trainer.weight_updates import (
    AdapterPublish,
    AdapterRemoval,
    CollectParts,
    ShardedPublish,
    WeightPublish,
)
from tidegate.orchestrator.weight_sync.state_dict import with_draft, without_draft

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

MakeParts = Callable[[RunSettings], RunParts]
"""Chooses a run's observers, and where its engines run, by its settings."""

log = logging.getLogger("tidegate")


def share_cores(settings: RunSettings) -> None:
    """Leave the trainer's torch the cores that engines do not use, unless its user chose a number.

    OpenMP's threads spin while they wait for each other. With fewer cores than threads, they spin
    for threads that are not running: one run took eight times as long.
    """
    if not settings.engine_processes or settings.engine.uses_gpu:
        return
    import torch  # takes seconds, in which the engines start

    threads = torch.get_num_threads()
    free_cores = max(1, cores() - settings.engine_processes * settings.engine_threads)
    if threads <= free_cores:
        return
    all_cores = {cores(), os.cpu_count() or 1}
    defaults = all_cores | {count // 2 for count in all_cores}  # torch takes physical cores
    if "OMP_NUM_THREADS" in os.environ or threads not in defaults:
        log.warning(
            "torch_threads=%d cores=%d free_cores=%d: the trainer's torch has more threads than "
            "engines leave cores, and they slow each other down; set OMP_NUM_THREADS=%d",
            threads,
            cores(),
            free_cores,
            free_cores,
        )
        return
    torch.set_num_threads(free_cores)
    log.warning(
        "torch_threads=%d: engines use the other %d of %d cores; OMP_NUM_THREADS sets another "
        "number",
        free_cores,
        cores() - free_cores,
        cores(),
    )


class Scorer(MeasuredHandle, RunHandle):
    """Async handle of a run that only scores, e.g. with a frozen reference model."""

    def __init__(self, settings: RunSettings, make_parts: MakeParts, resume: Resume = None) -> None:
        MeasuredHandle.__init__(self)
        self.settings = settings
        self._make_parts = make_parts
        self._resume = resume
        self._run: Run | None = None
        self._final: RunStatistics | None = None
        self._old_sigterm: Any = None

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
        self._share_cores()
        await result_of(self._run.ready)

    def _share_cores(self) -> None:
        """Share the machine's cores with engines; simulated runs override it, which have none."""
        share_cores(self.settings)

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
        future = self._running.submit(as_work(read))
        while not future.done():
            if self._running.loop_watch.blocked is not None and scheduler is not None:
                # A loop that resumes just now may change a collection while it is read.
                with contextlib.suppress(RuntimeError):
                    return read(scheduler)
            concurrent.futures.wait([future], CHECK_INTERVAL_S)
        return future.result()


class Rollouts(Scorer, BatchHandle):
    """Async handle of a run in this process, for its trainer."""

    def __init__(
        self,
        settings: RunSettings,
        make_parts: MakeParts,
        resume: Resume = None,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        Scorer.__init__(self, settings, make_parts, resume)
        BatchHandle.__init__(self, on_batch)
        self._adapters: dict[str, AdapterHandle] = {}

    @override
    def _close_recorder(self, error: BaseException | None) -> None:
        scheduler = self._running.scheduler
        for trainer in self._adapters.values():
            if isinstance(trainer, AdapterTrainer) and not trainer.is_closed:
                final = None if scheduler is None else trainer._statistics_of(scheduler)
                try:
                    trainer._end_records(final)
                except RecordingFailed as failure:
                    log.error("adapter=%s records are incomplete: %s", trainer.name, failure)
        super()._close_recorder(error)

    @override
    def _figures(self) -> dict[str, object]:
        return {
            **super()._figures(),
            "weight version": self._version,
            "batches": self._received,
        }

    # ------------------------------------------------------------ weights

    async def publish(
        self,
        state_dict: "Mapping[str, torch.Tensor]",
        *,
        draft: "Mapping[str, torch.Tensor] | None" = None,
        batches: "BatchesOfPublish" = None,
        wait: PublishWait = "live",
        partial: bool = False,
    ) -> int:
        """Bring new weights to the engines while they decode; return the weights' version.

        ``draft`` are the weights of the draft model (``speculative_method="draft:DIRECTORY"``),
        which each engine swaps together with the others. Without them it keeps those it has.

        ``batches`` (batches, or their numbers) are those that the weights were made from since the
        last publish. Their age is final now, and they are checked against the staleness bound; a
        batch that no publish names counts as untrained. An empty list names none: the weights were
        published before, or come from elsewhere. You may leave it out if you take one batch at a
        time (``batches_per_version`` batches): then it is what you hold. A publish that fails has
        named its batches all the same.

        With ``partial``, only the tensors in ``state_dict`` change; all others keep their values of
        the newest version whose publish did not fail. It names only the batches that you pass.

        ``wait``: ``live`` returns once all engines serve the weights; ``staged`` once all engines
        hold them beside their live weights, after which no engine can refuse them; ``none`` as soon
        as the tensors are copied, so that the caller may change them. Later failures are raised by
        the next publish or batch.

        A publish started during another one replaces it on engines that do not serve it yet;
        both calls return when the newer weights arrive. Batches are held back until the version is
        certain to succeed; a version that fails adds nothing to any batch's staleness.

        Raises:
            PublishUnclear: ``batches`` is left out, and you hold several, have asked for one ahead,
                or have lost one.
            BatchNotHeld: you don't hold a batch of ``batches``: it is in a version already, or was
                lost, because another version or a rollback has made it too old.
                ``statistics().held_batches`` has those that you hold.
            WeightsRefused: names, shapes or dtypes don't fit the model; the old weights stay live.
            ConfigError: no engine has a draft model, and ``draft`` is given.
            EngineLagging: an engine did not receive the weights in time.
            PublishDropped: a newer publish replaced this one, and writing its weights failed.
        """
        numbers = numbers_of(batches, () if partial else None)
        tensors = with_draft(state_dict, draft)
        call = WeightPublish(self._running, tensors, wait, partial=partial, batches=numbers)
        return await self._publish(call)

    async def rollback(
        self, state_dict: "Mapping[str, torch.Tensor]", *, first_bad: int | None = None
    ) -> int:
        """Have engines serve these weights in place of bad ones, under a new version; return it.

        Groups with a token of version ``first_bad`` or newer (default: the newest published) are
        discarded as ``rolled_back``, and their tasks are repeated. Engines are paused meanwhile,
        and stay paused if the rollback fails, because the weights they serve are bad. The new
        version counts like any other, so groups that wait for training, and batches that you hold,
        age by one version. Batches that you hold and that have a token of a bad version, or are too
        old now, are lost: their tasks are repeated, and a publish that names them is refused.
        ``statistics().held_batches`` has the others.

        Raises:
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        first_bad = self._version if first_bad is None else first_bad
        call = WeightPublish(self._running, state_dict, "live", first_bad=first_bad)
        return await self._publish(call)

    async def _publish_parts(
        self,
        collect: CollectParts,
        *,
        batches: "BatchesOfPublish" = None,
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
        call = ShardedPublish(
            self._running,
            collect,
            wait,
            partial=partial,
            batches=numbers_of(batches, () if partial or is_rollback else None),
            first_bad=first_bad,
        )
        return await self._publish(call)

    async def publish_adapter(
        self,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        batches: "BatchesOfPublish" = (),
        config: object = None,
        wait: PublishWait = "live",
    ) -> int:
        """Bring a LoRA adapter to the engines, or new tensors for one; return the version.

        ``adapter`` is a directory that PEFT's ``save_pretrained`` wrote; or tensors, as
        ``peft.get_peft_model_state_dict`` gives them, with their ``config``: a ``LoraConfig``, or a
        mapping with ``r`` and ``lora_alpha``. Only the adapter's tensors are sent. The new weight
        version consists of the previous version and this adapter. Turns select the adapter by
        ``generate(adapter=name)``, or all turns do with ``serve(adapter=name)``. ``batches`` are
        those that the adapter was made from, as of :meth:`publish`; by default none.

        Raises:
            ConfigError: it is not a LoRA adapter, or needs features that engines lack.
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`publish`.
        """
        numbers = numbers_of(batches, ()) or ()
        call = AdapterPublish(self._running, name, adapter, config, wait, numbers)
        return await self._publish(call)

    async def unload_adapter(self, name: str, *, wait: PublishWait = "live") -> int:
        """Have engines drop an adapter; return the version without it.

        Running turns that use it are refused.

        Raises:
            WeightsRefused: no adapter has this name; otherwise as :meth:`publish`.
        """
        return await self._publish(AdapterRemoval(self._running, name, wait))

    def adapter(self, name: str) -> AdapterHandle:
        """Return the handle of a LoRA adapter with weight versions of its own.

        Unlike :meth:`publish_adapter`, its publishes pause, recompute and age only the adapter's
        own turns.
        """
        if name not in self._adapters:
            self._adapters[name] = AdapterHandle(self._running, name)
        return self._adapters[name]

    async def train_adapter(
        self, name: str, *, on_batch: OnBatch | None = None, **staleness: Any
    ) -> AdapterTrainer:
        """Train a LoRA adapter in this run, beside the run's weights and other adapters.

        Returns a handle with ``publish`` and ``batches`` of the adapter's own. ``staleness`` are
        settings of batches and staleness that differ from the run's: ``max_staleness``,
        ``groups_per_batch``, ``group_size`` and the others of :class:`StalenessSettings`. After a
        resume, call it again with the same settings.

        Raises:
            ConfigError: a setting is not valid, or the adapter is trained already.
            ResumeMismatch: after a resume, the settings differ from those before.
        """
        known = self._adapters.get(name)
        if isinstance(known, AdapterTrainer) and not known.is_closed:
            raise ConfigError(f"adapter {name!r} is trained already; use the handle of that call")
        own = adapter_settings(self.settings, staleness)
        trainer = AdapterTrainer(self._running, name, own, on_batch=on_batch)
        await trainer._start()
        self._adapters[name] = trainer
        return trainer

    async def _publish(self, call: WeightPublish) -> int:
        self._mark("train")
        try:
            return await self._do(call.run)
        finally:
            self._named = max(self._named, *call.named, 0)
            self._published(call)

    # ------------------------------------------------------------ the trainer's time and batches

    @override
    async def _enter(self) -> None:
        await super()._enter()
        resumed, scheduler = self._running.resumed, self._running.scheduler
        if resumed is not None and scheduler is not None:
            self._received, self._version = resumed.batches, scheduler.core.trainer_version

    def _published(self, call: WeightPublish) -> None:
        """Update version, time statistics and records after a publish, successful or failed."""
        if not call.may_be_served:
            return  # failed before any engine swapped
        self._version = max(self._version, call.version)
        self._mark("publish")
        if self._running.recorder is not None:
            kept = without_draft(call.state_dict)  # no log-prob depends on a draft
            self._running.recorder.weights(call.version, kept, call.parts)


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

    statistics = forwarded(Scorer.statistics)
    raise_if_ended = forwarded(Scorer.raise_if_ended)

    def record_facts(self, **facts: object) -> None:
        """As :meth:`Scorer.record_facts`."""
        self._handle.record_facts(**facts)


class SyncRollouts(SyncBatchHandle, SyncScorer):
    """Sync variant of :class:`Rollouts`, whose calls block."""

    _handle: Rollouts

    def __init__(self, handle: Rollouts) -> None:
        super().__init__(handle)

    publish = blocking(Rollouts.publish)
    rollback = blocking(Rollouts.rollback)
    publish_adapter = blocking(Rollouts.publish_adapter)
    unload_adapter = blocking(Rollouts.unload_adapter)

    def adapter(self, name: str) -> SyncAdapterHandle:
        """As :meth:`Rollouts.adapter`."""
        return SyncAdapterHandle(self._handle.adapter(name))

    def train_adapter(
        self, name: str, *, on_batch: OnBatch | None = None, **staleness: Any
    ) -> SyncAdapterTrainer:
        """As :meth:`Rollouts.train_adapter`."""
        start = self._handle.train_adapter(name, on_batch=on_batch, **staleness)
        return SyncAdapterTrainer(run_blocking(start))


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
