"""Stand-in for ``tidegate.serve`` in tests: the user's own trainer over simulated engines.

The scheduler, its errors, the client handles and the batches' tensors are the real ones, so a
trainer needs no change. A :class:`SimulatedRun` takes the place of
:class:`tidegate.orchestrator.trainer.run.Run`: it has no thread, no process and no socket. Engines
take virtual time; the trainer's own computation takes none.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from typing_extensions import override

from tidegate.errors import ConfigError, EngineLost, EpisodeError, RunClosed
from tidegate.orchestrator.core.rollout import Turn
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.fleet.processes import engine_number
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.orchestrator.trainer.batch_metrics import OnBatch
from tidegate.orchestrator.trainer.handle import Evaluation
from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
from tidegate.orchestrator.trainer.run import Run, RunParts, cause_of
from tidegate.orchestrator.weight_sync.deltas import WrittenTensors
from tidegate.simulation.checks.ground_truth import GroundTruth
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.engine import SimulatedEngines
from tidegate.simulation.engine.scripted import (
    Says,
    ScriptedEngine,
    ScriptedHost,
    ScriptedModel,
    files_of,
)
from tidegate.simulation.engine.wire import SHOWN_FRAMES_MAX, FrameLog
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.shm import ShmSender

if TYPE_CHECKING:
    from tidegate.simulation.engine.computing import ComputingEngine, ComputingHost

Result = TypeVar("Result")

ANY_MODEL = "any model"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Settings, engines and script of a simulated run."""

    settings: RunSettings
    engines: "tuple[ScriptedEngine | ComputingEngine, ...]"
    says: Says


def run_plan(
    *,
    model: Path | str,
    engines: "int | Sequence[ScriptedEngine | ComputingEngine]",
    says: Says = None,
    **settings: Any,
) -> RunPlan:
    """Check a test's arguments and return the plan of its run.

    A run directory, keys and an address are ignored.

    Raises:
        ConfigError: a setting is unknown or out of range; or is ``journal`` or ``resume``, whose
            promises a simulated run can't keep; or some engines are scripted and others compute, so
            the run's weights would be neither.
    """
    resume = settings.pop("resume", None)
    if isinstance(engines, int):
        engines = [ScriptedEngine() for _ in range(engines)]
    checked = run_settings(model=Path(model), engines=len(engines), **settings)
    for name, value in (("journal", checked.records.journal), ("resume", resume)):
        if value:
            raise ConfigError(f"{name} can't be used in a simulated run; leave it out in tests")
    if len({isinstance(each, ScriptedEngine) for each in engines}) > 1:
        raise ConfigError("a simulated run's engines are all scripted or all compute; got both")
    if checked.fleet.elasticity is not None and not isinstance(engines[0], ScriptedEngine):
        raise ConfigError("elasticity in a simulated run is for scripted engines; got others")
    return RunPlan(checked, tuple(engines), says)


class SimulatedChannel:
    """Weight channel of a simulated run: writes versions and tensor specs, but no weight data."""

    def __init__(self, context: SimulationContext) -> None:
        self._buffer = context.buffer

    def init(self) -> InitWeights:
        """Return the phase-1 message."""
        return InitWeights(channel="shm")

    def write(
        self, version: int, tensors: Sequence[NamedBuffer], *, keep: Collection[int] = ()
    ) -> list[UpdateWeights]:
        """Write a version of the weights to the buffer, and return its update message."""
        update = self._buffer.begin(version, keep=keep)
        self._buffer.end(update)
        specs = [TensorSpec(t.name, t.dtype, list(t.shape), 0, len(t.data)) for t in tensors]
        return [msgspec.structs.replace(update, tensors=specs)]


class _NeverBlocked:
    """Loop watch that never reports a blocked loop, because virtual time stops while code runs."""

    blocked = None
    longest_block_s = 0.0


class SimulatedRun:
    """One run on an event loop in virtual time, which the run shares with its trainer."""

    loop_watch = _NeverBlocked()
    resumed = None
    recorder = None
    observers = None
    has_ended = False
    run_id = ""
    is_own_thread = True
    """Always true: there is only one thread, so any caller may read the run's state."""
    model: ModelFiles
    """Parts of the model directory that episodes use, once the run is started."""

    def __init__(self, plan: RunPlan, time: VirtualTime) -> None:
        self.settings = plan.settings
        self.owner_pid = os.getpid()
        self._plan = plan
        self._time = time
        self._frame_log = FrameLog()
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Future that is done once all engines that join at the start have joined, or one engine if
        all join late. Holds the error if the run fails before."""
        self.scheduler: Scheduler | None = None
        self.channel: SimulatedChannel | ShmSender | None = None
        self.written = WrittenTensors()
        self.engines: SimulatedEngines[ScriptedHost] | None = None
        """Scripted engines; None before the start."""
        self._computing: list[ComputingHost] = []
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._is_ending = False

    @property
    def story(self) -> list[str]:
        """State of each engine, and the last frames carried, as lines of text."""
        last = list(self._frame_log.last)[-SHOWN_FRAMES_MAX:]
        return [*map(str, self._hosts), *map(str, last)]

    @property
    def _hosts(self) -> "list[ScriptedHost | ComputingHost]":
        scripted = self.engines.hosts.values() if self.engines is not None else ()
        return [*scripted, *self._computing]

    # ------------------------------------------------------------ called by the client handles

    def start(self) -> None:
        """Start the scheduler and the engines; :attr:`ready` holds the outcome."""
        self._main = self._time.loop.create_task(self._serve(), name="run")
        self._main.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not self._is_async:
            self._time.run(self._wait_until_ready())

    def submit(
        self, work: Callable[[Scheduler], Awaitable[Result]]
    ) -> "concurrent.futures.Future[Result]":
        """Run ``work`` on the event loop; run the loop until ``work`` is done if it is not running.

        Raises:
            RunClosed: the run has ended. A run that failed raises the error that it failed with.
        """
        scheduler = self.scheduler
        if scheduler is None or self._is_ending:
            raise self.failure()
        if self._is_async:
            self._refuse_episodes()
            return asyncio.run_coroutine_threadsafe(self._call(work, scheduler), self._time.loop)
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        try:
            future.set_result(self._time.run(self._call(work, scheduler)))
        except Exception as error:  # noqa: BLE001 - the future hands the error to its waiter
            future.set_exception(error)
        return future

    @staticmethod
    def _refuse_episodes() -> None:
        """Refuse calls from the run's own episodes, as a run with its own thread does."""
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("rollout "):
            raise RuntimeError(
                "a run can't be called from its own episodes, because the call would wait for its "
                "episode; call it from the trainer"
            )

    def failure(self) -> BaseException:
        """Return the error that requests get after the end of the run."""
        return self._failure or RunClosed("the run has ended; start another one with serve()")

    def show(self, **_: object) -> None:
        """Do nothing: a simulated run has no dashboard."""

    def hide(self, error: BaseException | None = None) -> None:
        """Do nothing: a simulated run has no dashboard."""

    def stop(self) -> None:
        """End the run. Does nothing on a running loop, where :meth:`end` was awaited before."""
        if not self._is_async:
            self._time.run(self.end())

    async def end(self) -> None:
        """Cancel the run's main task and wait for its end. Harmless if repeated."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])

    @property
    def _is_async(self) -> bool:
        return self._time.loop.is_running()

    # ------------------------------------------------------------ on the loop

    async def _call(
        self, work: Callable[[Scheduler], Awaitable[Result]], scheduler: Scheduler
    ) -> Result:
        """Do a request's work; if the run fails meanwhile, raise its failure."""
        assert self._main is not None
        call = asyncio.ensure_future(work(scheduler))
        try:
            await asyncio.wait([call, self._main], return_when=asyncio.FIRST_COMPLETED)
            if self._main.done() and not self._main.cancelled():
                raise self.failure()
            return await call
        finally:
            call.cancel()
            await asyncio.wait([call])

    async def _wait_until_ready(self) -> None:
        with contextlib.suppress(Exception):  # the future's holder gets the error
            await asyncio.wrap_future(self.ready)

    async def _serve(self) -> None:
        try:
            await self._serve_until_failed()
        except BaseException as error:
            self._failure, self._is_ending = cause_of(error), True
            if self.scheduler is not None:
                self.scheduler.fail_waiters(self.failure())
            if not self.ready.done():
                self.ready.set_exception(self.failure())
            raise
        finally:
            if self.scheduler is not None:
                self.scheduler.close()
            for host in self._hosts:
                host.stop()
            if isinstance(self.channel, ShmSender):
                self.channel.close()

    async def _serve_until_failed(self) -> None:
        plan, settings = self._plan, self.settings
        files = self.model = files_of(settings.model)
        is_scripted = isinstance(plan.engines[0], ScriptedEngine) if plan.engines else True
        scripted: dict[str, ScriptedEngine] = {}
        model = ScriptedModel(plan.says, files, scripted, self._turn_of)
        unchecked = GroundTruth(keeps_steps=False)
        context = SimulationContext(self._time.loop, self._frame_log, unchecked, model=model)
        self.channel = SimulatedChannel(context) if is_scripted else ShmSender()
        init = self.channel.init()
        scheduler = Scheduler(settings, files, context.router, init, recorder=None)
        self.scheduler = scheduler

        def make_host(name: str, engine: ScriptedEngine | None = None) -> ScriptedHost:
            first, number = plan.engines[0], engine_number(name)
            assert isinstance(first, ScriptedEngine)
            scripted[name] = engine = engine or replace(first, joins_at_s=0.0)
            chance = random.Random(f"{settings.sampling.seed}/{number}")
            on_exit = self._engine_ended
            return ScriptedHost(engine, number, context=context, chance=chance, on_exit=on_exit)

        elastic, engines = settings.fleet.elasticity, enumerate(plan.engines)
        start_s = 0.0 if elastic is None else elastic.start_s
        named = ((f"engine-{n}", each) for n, each in engines if isinstance(each, ScriptedEngine))
        hosts = {name: make_host(name, each) for name, each in named}
        self.engines = SimulatedEngines(hosts, make_host, start_s=start_s)
        if scheduler.elastic is not None:  # else engines that leave start again by themselves
            scheduler.engines.launched = self.engines
        if not is_scripted:
            self._make_computing_hosts(context)
        self._time.loop.set_exception_handler(self._on_error)
        async with asyncio.TaskGroup() as group:
            group.create_task(scheduler.run(), name="scheduler")
            for host in self._hosts:
                host.start()
            await scheduler.wait_for_engines(
                max(1, sum(getattr(each, "joins_at_s", 0) == 0 for each in plan.engines))
            )
            self.ready.set_result(None)
            if scheduler.elastic is not None:
                group.create_task(scheduler.elastic.run(), name="elasticity")

    def _make_computing_hosts(self, context: SimulationContext) -> None:
        # imports torch and the engine, which scripted runs do not need
        from tidegate.simulation.engine.computing import ComputingEngine, ComputingHost

        self._computing = [
            ComputingHost(engine, number, context=context, settings=self.settings)
            for number, engine in enumerate(self._plan.engines)
            if isinstance(engine, ComputingEngine)
        ]

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run with an error that a callback raised, such as an engine's script.

        Any other context goes to the loop's default handler.
        """
        error = context.get("exception")
        if self.scheduler is not None and "handle" in context and isinstance(error, Exception):
            self.scheduler.fail(error)
        else:
            loop.default_exception_handler(context)

    def _turn_of(self, engine: str, handle: int) -> Turn | None:
        turns = self.scheduler.core.turns.engines.get(engine) if self.scheduler else None
        return turns.submissions.get(handle) if turns else None

    def _engine_ended(self, name: str, why: str) -> None:
        assert self.scheduler is not None
        assert self.engines is not None
        self.scheduler.engines.ended(name, why)
        if self.engines.are_gone and self.scheduler.elastic is None:
            self.scheduler.fail(EngineLost(f"the last engine, {name!r}, has ended: {why}"))


class SimulatedRollouts(Rollouts):
    """:class:`Rollouts` in virtual time."""

    def __init__(self, plan: RunPlan, time: VirtualTime, on_batch: OnBatch | None = None) -> None:
        super().__init__(plan.settings, _refuse_parts, on_batch=on_batch)
        self._time = time
        self.simulated = SimulatedRun(plan, time)
        self.is_sync = False
        """Whether a :class:`SimulatedSyncRollouts` owns the rollouts and advances virtual time."""

    @override
    def _make_run(self) -> Run:
        self._timekeeper = Timekeeper(None, now_us=lambda: round(self._time.now_s * 1e6))
        return cast(Run, self.simulated)

    @override
    def _share_cores(self) -> None:
        """Leave torch its threads: no engine runs on this machine."""

    @override
    async def _enter(self) -> None:
        if self.is_sync and self._time.loop.is_running():
            raise RuntimeError(
                "serve_sync would wait for the event loop that it is called on; use serve in an "
                "async test, and serve_sync in one that isn't"
            )
        if not self.is_sync and not self._time.loop.is_running():
            raise RuntimeError(
                "a simulated run must be entered on the loop of its virtual time: in the async "
                "test itself (async fixtures have another event loop), or in a coroutine passed to "
                "tidegate_virtual_time.run()"
            )
        await super()._enter()

    @override
    async def evaluate(self, tasks: Sequence[Any], **how: Any) -> Evaluation:
        """As :meth:`Rollouts.evaluate`.

        Raises:
            EpisodeError: every episode failed; a test that does not look at ``failures`` would
                pass.
        """
        evaluation = await super().evaluate(tasks, **how)
        if evaluation.failures == len(evaluation.rewards) > 0:
            raise EpisodeError(
                f"all {evaluation.failures} episodes of the evaluation failed; the log has the "
                f"first traceback of each error"
            )
        return evaluation

    @override
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.simulated.end()
        await super().__aexit__(kind, error, traceback)


class SimulatedSyncRollouts(SyncRollouts):
    """:class:`SyncRollouts` in virtual time, which passes only while a call blocks."""

    def __init__(self, rollouts: SimulatedRollouts) -> None:
        rollouts.is_sync = True
        super().__init__(rollouts)
        self.simulated = rollouts.simulated


def _refuse_parts(settings: RunSettings) -> RunParts:
    raise RuntimeError("a simulated run can't create the parts of a real run")


class ServeInTests:
    """Stands in for ``tidegate.serve`` and, by :attr:`sync`, for ``tidegate.serve_sync``."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self.runs: list[SimulatedRun] = []
        """Runs made by this object, in order of creation."""

    def __call__(
        self,
        *,
        model: Path | str = ANY_MODEL,
        engines: int | Sequence[ScriptedEngine] = 1,
        says: Says = None,
        on_batch: Any = None,
        **settings: Any,
    ) -> SimulatedRollouts:
        """Make a simulated run for an async trainer, as :func:`tidegate.serve` makes a real one.

        ``model``: a model directory, whose tokenizer is used; any other value selects a byte-level
        tokenizer. ``engines``: the number of engines, or one :class:`ScriptedEngine` for each.
        ``says``: the script of the model's output. ``settings``: settings of the run, by name.

        Raises:
            ConfigError: a setting is unknown, out of range, or not available in simulated runs.
        """
        plan = run_plan(model=model, engines=engines, says=says, **settings)
        rollouts = SimulatedRollouts(plan, self._time, on_batch)
        self.runs.append(rollouts.simulated)
        return rollouts

    def sync(self, **settings: Any) -> SimulatedSyncRollouts:
        """Make a simulated run for a sync trainer, as :func:`tidegate.serve_sync` makes a real one.

        Arguments and errors are those of calling the object itself.
        """
        return SimulatedSyncRollouts(self(**settings))

    def story(self) -> str:
        """Return the newest run's engine states and last messages, for a failed test's report."""
        return "\n".join(self.runs[-1].story) if self.runs else ""
