"""A run's thread, with its own event loop, and the start and end of everything that runs on it.

The local handle starts one. The loop runs beside the trainer, so a train step that blocks its
thread stalls no rollout. Users' episodes run on this loop, too. A run starts a :class:`Scheduler`,
a ZeroMQ ROUTER, the weight channel and an engine launcher.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from tidegate.errors import (
    EngineLost,
    EngineStartFailed,
    JournalError,
    RecordingFailed,
    RunBlocked,
    RunClosed,
    check_not_forked,
)
from tidegate.orchestrator.core.events import RunResumed
from tidegate.orchestrator.episodes.contained_tasks import ContainedExit, contained_task
from tidegate.orchestrator.episodes.episode_tracer import EpisodeTracer
from tidegate.orchestrator.episodes.model_files import read_model_files
from tidegate.orchestrator.fleet.launcher import (
    CalledEngines,
    EngineLauncher,
    Engines,
    OnExit,
)
from tidegate.orchestrator.journal.resuming import Resume, open_run_journal
from tidegate.orchestrator.scheduler.gc_tuning import GC_TUNING, young_objects_max
from tidegate.orchestrator.scheduler.loop_watch import LoopWatch
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.recorder import EpisodeObserver, Recorder, RunObservers
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.weight_sync.deltas import written_by
from tidegate.transport.addresses import connectable_address
from tidegate.transport.messages import Shutdown
from tidegate.transport.private_directory import PrivateDirectory
from tidegate.transport.router import RouterSocket
from tidegate.transport.weight_channels import sender

Result = TypeVar("Result")

SLOW_START_S = 3.0
"""Time from which a start is reported as slow: engines of a small model join sooner on two quiet
cores, most of it the import of torch."""

EPISODES_END_TIMEOUT_S = 15.0
"""Time that cancelled episodes have to clean up; then the run ends without them."""

log = logging.getLogger("tidegate")


@dataclass(frozen=True, slots=True)
class RunParts:
    """Parts of a run that its settings choose."""

    launcher: EngineLauncher
    """Launcher that starts the run's engines, here or on a cluster."""
    observers: RunObservers | None = None
    """Recorder and dashboard; None if the run has neither."""


@dataclass(frozen=True, slots=True)
class WrittenByRanks:
    """A version whose tensors the ranks of a trainer sent in parts."""

    version: int
    plan: str
    """Name under which the ranks remember what they sent."""


class Run:
    """A run's thread, event loop, socket, weight channel and engine processes."""

    def __init__(self, settings: RunSettings, parts: RunParts, resume: Resume = None) -> None:
        self.settings = settings
        self.owner_pid = os.getpid()
        """Process that has the run's thread, sockets and engines; a forked child has none."""
        self.observers = parts.observers
        self._launcher = parts.launcher
        self.recorder: Recorder | None = None
        """Recorder of the run's events; None: nothing is recorded."""
        with contextlib.ExitStack() as undo:
            if parts.observers is not None:
                undo.callback(parts.observers.close)
            self.model = read_model_files(
                settings.model,
                special_tokens_in_messages=settings.episodes.special_tokens_in_messages,
                image_directories=settings.engine.image_directories,
                # a batch with an image that no engine reads would be no input of the model
                leaves_others=bool(settings.fleet.engine_urls) or not settings.fleet.engines,
            )
            # After everything that wrong settings can break, because a new journal stays on disk.
            self._journal = open_run_journal(settings, resume)
            undo.callback(self._journal.close)
            self.channel = sender(
                settings.weights.weight_channel,
                settings.records.run_directory,
                address=self._launcher.address,
                keys=self._launcher.keys,
                device=settings.engine.device_of(0),
            )
            undo.callback(self.channel.close)
            self.written = written_by(settings.weights.weight_deltas)
            """Record of the tensors written to the channel. Only the publish that holds the buffer
            uses it."""
            self.written_by_ranks: WrittenByRanks | None = None
            """The last write, if a sharded trainer's ranks wrote it in parts."""
            self._scheduler: Scheduler | None = None
            self._loop: asyncio.AbstractEventLoop | None = None
            if parts.observers is not None:
                self.recorder = parts.observers.open(self._journal.resumed, self._records_failed)
            undo.pop_all()
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once every engine has joined; failed, with the reason, if the run can't start."""
        self._main: asyncio.Task[None] | None = None
        self._engines: Engines | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._is_ending = False
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        """Futures of submitted work that is not done."""
        self.loop_watch = LoopWatch(
            limit_s=settings.episodes.episode_timeout_s, on_blocked=self._abandon
        )
        self._is_up = threading.Event()
        """Set once the thread can be stopped, or has ended."""
        self._thread = threading.Thread(target=self._run, name="tidegate", daemon=True)

    # ------------------------------------------------------------ from the trainer's threads

    def start(self) -> None:
        """Start the thread; :attr:`ready` has the outcome."""
        self._thread.start()

    def show(
        self,
        *,
        read: Callable[[Callable[[Scheduler], Any]], Any],
        statistics: Callable[[Scheduler], RunStatistics],
    ) -> None:
        """Start the dashboard, if there is one. ``read`` calls a function on the run's loop."""
        if self.observers is not None:
            self.observers.show(read, statistics, self.model.tokenizer)

    def hide(self, error: BaseException | None = None) -> None:
        """Stop the dashboard, if there is one; ``error`` is what ended the run."""
        if self.observers is not None:
            self.observers.close(error)

    def stop(self) -> None:
        """End engines, episodes and the thread; wait for all of it. Harmless if repeated.

        Does nothing in a forked child, because thread, sockets and engines belong to the parent.
        """
        if self.owner_pid != os.getpid():
            return
        if self._thread.ident is None:
            self.channel.close()
            self._journal.close()
            return
        self._is_up.wait()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self._end)
        self._thread.join(EPISODES_END_TIMEOUT_S)
        if self._thread.is_alive():
            log.error(
                "episodes still run %.0f s after their cancel; their thread is abandoned",
                EPISODES_END_TIMEOUT_S,
            )
            if self._engines is not None:
                self._engines.kill_all()

    def _end(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop_journal()  # first, so that a resumed run continues the episodes
        if self._main is not None:
            self._main.cancel()

    def submit(
        self, work: Callable[[Scheduler], Awaitable[Result]]
    ) -> "concurrent.futures.Future[Result]":
        """Run ``work`` on the run's loop.

        Raises:
            RunClosed: the run has ended; if it failed, its failure is raised instead.
            RunForked: this process was forked from the run's.
            RuntimeError: the caller is the run itself.
        """
        check_not_forked(self.owner_pid)
        if self.is_own_thread:
            raise RuntimeError(
                "a blocking call of a run from its own episode or task iterator would deadlock; "
                "use the Episode's methods, or another run"
            )
        loop, scheduler = self._loop, self._scheduler
        if loop is None or scheduler is None:
            raise self.failure()

        async def run() -> Result:
            if self._is_ending:
                raise self.failure()
            try:
                return await work(scheduler)
            except Exception:
                if not self._is_ending:
                    raise
            raise self.failure()  # the cause, rather than an error of a closed socket

        with self._lock:
            if self._is_ending:
                raise self.failure()
            future = asyncio.run_coroutine_threadsafe(run(), loop)
            self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        return future

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the run itself: an episode, or a task iterator."""
        return threading.current_thread() is self._thread

    @property
    def scheduler(self) -> Scheduler | None:
        """The run's scheduler, once started. Other threads may read its statistics only."""
        return self._scheduler

    @property
    def resumed(self) -> RunResumed | None:
        """Position from which the run continues after a crash; None for a new run."""
        return self._journal.resumed

    @property
    def run_id(self) -> str:
        """Id of the run, the same after each resume; empty without a journal."""
        journal = self._journal.journal
        return journal.header.run_id if journal is not None else ""

    @property
    def has_ended(self) -> bool:
        """Whether the run accepts no more requests; :meth:`failure` returns the reason."""
        return self._is_ending

    def failure(self) -> BaseException:
        """Return the error that ended the run; ``RunClosed`` if it ended normally."""
        return self._failure or RunClosed("the run has ended; start another one with serve()")

    # ------------------------------------------------------------ the run's own thread

    def _run(self) -> None:
        try:
            staleness = self.settings.staleness
            groups = staleness.make_policy().outstanding_groups_max
            with GC_TUNING.during(young_objects_max(groups * staleness.group_size)):
                uvloop.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by every call of the run
            self._failure = cause_of(error)
        finally:
            self._loop = None
            self._is_up.set()
            self.loop_watch.stop()
            for future in list(self._submitted):
                if not future.done():
                    future.set_exception(self.failure())
            self.channel.close()
            self._failure = self._close_journal() or self._failure
            if not self.ready.done():
                self.ready.set_exception(self.failure())

    def _records_failed(self, failure: RecordingFailed) -> None:
        """End the run, because its further events could not be recorded."""
        loop, scheduler = self._loop, self._scheduler
        if loop is not None and scheduler is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(scheduler.fail, failure)

    def _abandon(self, error: RunBlocked) -> None:
        """Fail all calls and kill the engines, because user code blocks the event loop for good."""
        log.error("run=failed why=%r", str(error))
        with self._lock:
            self._failure, self._is_ending = error, True
        for future in list(self._submitted):
            if not future.done():
                future.set_exception(error)
        if self._engines is not None:
            self._engines.kill_all()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ends if it is ever unblocked
                loop.call_soon_threadsafe(self._end)

    def _close_journal(self) -> BaseException | None:
        try:
            self._journal.close()
        except JournalError as error:
            return error
        return None

    async def _serve(self) -> None:
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(contained_task)
        self._is_up.set()
        self.loop_watch.start()
        router = RouterSocket(self._launcher.address, name="orchestrator", keys=self._launcher.keys)
        private = PrivateDirectory("logs")
        try:
            directory = self.settings.records.run_directory or private.path
            await self._serve_on(router, directory / "logs")
        finally:
            private.remove()
            router.close()

    async def _serve_on(self, router: RouterSocket, logs: Path) -> None:
        scheduler = Scheduler(
            self.settings,
            self.model,
            router,
            self.channel.init(),
            recorder=self.recorder,
            journal=self._journal.journal,
            resume=self._journal.resumed,
            observers=self._episode_observers(),
            now_s=time.monotonic,
        )
        self._scheduler = scheduler
        if self.recorder is not None and self.recorder.failure is not None:
            scheduler.fail(self.recorder.failure)  # it failed before the loop ran

        def on_exit(name: str, why: str) -> None:
            scheduler.engines.ended(name, why)
            if not self.ready.done():
                scheduler.fail(EngineStartFailed(engine=name, why=why))
            elif engines.are_gone and not scheduler.fleet.engines and scheduler.elastic is None:
                scheduler.fail(EngineLost(f"the last engine, {name!r}, has ended: {why}"))

        address = connectable_address(router.address)
        engines = self._make_engines(address, logs, scheduler, on_exit)
        self._engines = engines
        scheduler.engines.on_silent = engines.kill
        scheduler.engines.launched = engines
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(scheduler.run(), name="scheduler")
                engines.start()
                await self._engines_joined(scheduler, logs)
                engines.may_restart = True
                self.ready.set_result(None)
                if scheduler.elastic is not None:
                    group.create_task(scheduler.elastic.run(), name="elasticity")
        except BaseException as error:
            with self._lock:
                self._failure, self._is_ending = cause_of(error), True
            scheduler.fail_waiters(self.failure())
            raise
        finally:
            try:
                scheduler.close()
            finally:
                if self._journal.journal is not None:
                    self._journal.journal.discard_actions()
                for engine in scheduler.fleet.engines:
                    scheduler.fleet.send(engine, Shutdown())
                self.loop_watch.stop()  # nothing else runs on the loop: it may wait for processes
                engines.stop()

    def _make_engines(
        self, address: str, logs: Path, scheduler: Scheduler, on_exit: OnExit
    ) -> Engines:
        """Make the engines that the run starts: by functions of the user's, or by the launcher."""
        fleet, elastic = self.settings.fleet, self.settings.fleet.elasticity
        if elastic is None or elastic.start is None or elastic.stop is None:
            return self._launcher.engines(address, logs, on_exit=on_exit)
        known = scheduler.core.turns.engines
        return CalledEngines(
            elastic.start, elastic.stop, address, count=fleet.engines, known=known, on_exit=on_exit
        )

    def _episode_observers(self) -> list[EpisodeObserver]:
        if self.recorder is None:
            return []
        observers = list(self.recorder.episode_observers)
        if self.recorder.keeps_episodes:
            observers.append(EpisodeTracer(self.recorder.episode_interval))
        return observers

    async def _engines_joined(self, scheduler: Scheduler, logs: Path) -> None:
        wanted = max(1, self.settings.fleet.engines_started)
        timeout_s = self.settings.fleet.engine_start_timeout_s

        def report_slow_start() -> None:
            log.warning(
                "start=waiting engines=%d/%d: they import torch, load the model and, once per "
                "machine, compile kernels; their logs are in %s",
                len(scheduler.fleet.engines),
                wanted,
                logs,
            )

        slow = asyncio.get_running_loop().call_later(SLOW_START_S, report_slow_start)
        try:
            async with asyncio.timeout(timeout_s):
                await scheduler.wait_for_engines(wanted)
        except TimeoutError:
            joined = len(scheduler.fleet.engines)
            refused = [f"{name}: {why}" for name, why in scheduler.fleet.refused_engines.items()]
            raise EngineStartFailed(
                engine=f"{wanted - joined} of {wanted}",
                why="; ".join(refused)
                or f"not ready after {timeout_s:.0f} s; raise engine_start_timeout_s if loading "
                f"this model takes longer",
            ) from None
        finally:
            slow.cancel()


def cause_of(error: BaseException) -> BaseException:
    """Return the first error of a group, through nested groups; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return RunClosed("the run was ended")
    if isinstance(error, Exception) and not isinstance(error, ContainedExit):
        return error
    if isinstance(error, ContainedExit):
        error = error.__cause__ or error
    # A SystemExit raised in the trainer's thread would end the trainer, maybe with status 0.
    closed = RunClosed(f"the run has ended because code on its event loop raised {error!r}")
    closed.__cause__ = error
    return closed
