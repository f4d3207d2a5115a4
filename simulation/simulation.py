"""Simulated run: one seed, one run in virtual time, the same bit for bit each time.

Sweeps call it for each seed; `tidegate plan` and crash-restart runs use its parts. The scheduler,
the core, the fleet, the weight control and the codec are the real ones; engines, the wire, the
trainer, the clock and the faults are simulated. Invariants are checked after every event. A failing
seed fails again, in the same way, each time. Built on ``scenario.py``, ``host.py`` (the simulated
engines), ``wire.py``, ``trainer.py``, ``invariants.py`` and ``virtual_time.py``.
"""

import asyncio
import contextlib
import functools
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer, models

from tidegate.errors import NothingLeftToHappen
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.simulation.context import SimulationContext
from tidegate.simulation.coverage_marks import CoverageMark
from tidegate.simulation.engine_spec import SimulatedEngineSpec
from tidegate.simulation.episodes import SimulatedEpisodes
from tidegate.simulation.faults import ALL_FAULTS, FaultKind, name_faults
from tidegate.simulation.host import EngineHost
from tidegate.simulation.invariants import CheckedCore, InvariantChecker
from tidegate.simulation.model import STOP_TOKEN
from tidegate.simulation.scenario import (
    BLOCK_TOKENS,
    Scenario,
    draw_scenario,
    engine_name,
)
from tidegate.simulation.trainer import SimulatedTrainer
from tidegate.simulation.virtual_time import VirtualTime
from tidegate.simulation.wire import FrameLog
from tidegate.transport.messages import InitWeights

TICK_S = 1 / 2048
"""Resolution of the virtual clock, in seconds. Events within half a millisecond get the same time,
which provokes races."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Violated invariant or error of a simulated run."""

    kind: str
    """Part of the failure that a shrunken run keeps: the error's type, the function that raised it,
    and the message without numbers."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Report of one simulated run."""

    scenario: Scenario
    faults: str | None
    """Fault kinds that the scenario was drawn with; None if the scenario was given, not drawn."""
    failure: Failure | None
    """Failure of the run; None if every invariant held."""
    digest: str
    """Hash of all frames and results of the run, equal in each run of a scenario."""
    virtual_s: float
    callbacks: int
    frames: int
    trained_tasks: int
    trained_tokens: int
    oldest_staleness: int
    coverage: frozenset[CoverageMark]
    story: tuple[str, ...] = field(default=(), repr=False)
    """Planned faults, waiting tasks and last frames of a failed run; empty for other runs."""

    @property
    def replay_command(self) -> str:
        """Shell command that repeats the run."""
        if self.faults is None:
            return f"tidegate simulate --replay '{self.scenario.to_json()}'"
        seed = self.scenario.seed
        return f"tidegate simulate --first-seed {seed} --seeds 1 --faults {self.faults}"


def simulate(seed: int, *, faults: frozenset[FaultKind] = ALL_FAULTS) -> SimulationReport:
    """Run the scenario of one seed and report the outcome."""
    return run_scenario(draw_scenario(seed, faults), faults=name_faults(faults))


def run_scenario(scenario: Scenario, *, faults: str | None = None) -> SimulationReport:
    """Run one scenario and report the outcome."""
    simulation = Simulation(scenario)
    with silent_log():
        failure = simulation.run()
    return simulation.report(failure, faults)


@contextlib.contextmanager
def silent_log() -> Iterator[None]:
    """Silence the log, which would report each engine that is lost on purpose."""
    log = logging.getLogger("tidegate")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@functools.cache
def empty_model_files() -> ModelFiles:
    """Make model files with an empty vocabulary: simulated episodes read and write token ids."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return ModelFiles(Path("simulated"), tokenizer, (STOP_TOKEN,))


def engine_hosts(
    scenario: Scenario,
    context: SimulationContext,
    on_exit: Callable[[str, str], None],
    on_drain: Callable[[str, float], None],
) -> list[EngineHost]:
    """Make the scenario's engines with their planned faults, without starting them."""
    spec = SimulatedEngineSpec(
        step_s=scenario.step_s,
        staging_s=scenario.staging_s,
        max_running_turns=scenario.max_running_turns,
        chunk_tokens=scenario.chunk_tokens,
        tokens_per_step=scenario.tokens_per_step,
        blocks=scenario.blocks,
        block_tokens=BLOCK_TOKENS,
        hands_turns_back=scenario.hands_turns_back,
        adapters_max=scenario.adapters_max if scenario.adapters else 0,
    )
    without_prefills = replace(spec, reports_prefills=False)
    hosts = [
        EngineHost(
            name,
            spec if name not in scenario.without_prefills else without_prefills,
            context=context,
            latency_s=scenario.latency_s,
            chance=scenario.chance("engine", number),
            on_exit=on_exit,
            on_drain=on_drain,
        )
        for number, name in enumerate(map(engine_name, range(scenario.engines)))
    ]
    for fault in scenario.faults:
        if fault.engine < len(hosts):
            hosts[fault.engine].plan(fault)
    for number, host in enumerate(hosts):
        kinds = {fault.kind for fault in scenario.faults if fault.engine == number}
        host.must_end_idle = kinds == {FaultKind.DRAIN} and not scenario.deadly_turns
    return hosts


def drain(scheduler: Scheduler | None, engine: str, within_s: float) -> None:
    """Have a run's engine leave, if it is connected."""
    if scheduler is not None and engine in scheduler.fleet.engines:
        scheduler.engines.drains.begin(engine, within_s)


class Simulation:
    """One scenario, from its start to its end or its first failure.

    Engines, wire and trainer are made once. The orchestrator is made separately by
    :meth:`_new_scheduler`.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._time = VirtualTime(tick_s=TICK_S)
        self._loop = self._time.loop
        self._context = SimulationContext(self._loop, FrameLog())
        self._checker = InvariantChecker(
            scenario, self._context.ground_truth, self._context.coverage
        )
        checker = self._checker
        episodes = SimulatedEpisodes(
            scenario,
            self._context,
            stopped=checker.stopped,
            live_version=lambda: checker.live_version,
        )
        self._trainer = SimulatedTrainer(
            scenario, self._context, episodes.play, self._checker.begin_training
        )
        self._hosts = engine_hosts(
            scenario,
            self._context,
            self._engine_ended,
            lambda engine, within_s: drain(self._scheduler, engine, within_s),
        )
        self._failed: asyncio.Future[None] = self._loop.create_future()
        """Future that gets the first error of the run, wherever it was raised."""
        self._scheduler: Scheduler | None = None
        """Scheduler of the orchestrator that runs now."""
        self._pending: list[str] = []

    def _engine_ended(self, engine: str, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.engines.ended(engine, why)

    # ------------------------------------------------------------ one run

    def run(self) -> Failure | None:
        """Run the scenario; return its failure, or None if every invariant held."""
        try:
            self._time.run(self._main())
        except Exception as error:  # noqa: BLE001 - any error is a failure of the run
            return failure_of(error)
        finally:
            self._time.close()
        return None

    async def _main(self) -> None:
        loop = self._loop
        loop.set_exception_handler(
            lambda _, context: self._fail(
                context.get("exception", AssertionError(context.get("message")))
            )
        )
        scheduler = self._scheduler = self._new_scheduler()
        for host in self._hosts:
            host.start()
        tasks = {
            loop.create_task(scheduler.run(), name="scheduler"),
            loop.create_task(self._trainer.run(scheduler), name="trainer"),
            loop.create_task(self._watch_for_deadlock(), name="liveness"),
        }
        futures = {self._failed, *tasks}
        try:
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pending = [*map(str, self._hosts), *loop.waiting()]
        for future in sorted(done, key=lambda future: future is not self._failed):
            await future
        trainer = self._trainer
        self._checker.check_end(scheduler.core, trainer.taken_tasks, trainer.received_groups)

    def _fail(self, error: BaseException) -> None:
        """Fail the run with ``error``, even if the code that raised the error also catches it."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _new_scheduler(self) -> Scheduler:
        """Make the real scheduler with a core whose invariants are checked."""
        settings = self._scenario.settings
        init = InitWeights(channel="shm")
        core = CheckedCore(settings.rules())
        core.on_event = functools.partial(self._checker.check_event, core)
        core.on_failure = self._fail
        router = self._context.router
        return Scheduler(settings, empty_model_files(), router, init, recorder=None, core=core)

    async def _watch_for_deadlock(self) -> None:
        """Raise when the run makes no progress for a long time or takes too long; never return."""
        quiet_max_s, progress = self._scenario.quiet_max_s, -1
        while progress != self._checker.progress:
            progress = self._checker.progress
            await asyncio.sleep(quiet_max_s)
            if self._loop.time() > self._scenario.longest_run_s:
                break
        raise SimulationDeadlock(
            f"no progress for {quiet_max_s:.0f} s; trainer: {self._trainer.activity}"
        )

    # ------------------------------------------------------------ afterwards

    def report(self, failure: Failure | None, faults: str | None) -> SimulationReport:
        """Make the report of the run."""
        checker, frame_log = self._checker, self._context.frame_log
        virtual_s, callbacks = self._loop.time(), self._loop.callbacks_run
        received = self._trainer.received_groups
        frame_log.record_fact(
            (str(failure), virtual_s, callbacks, checker.trained_rows.tokens, received)
        )
        return SimulationReport(
            scenario=self._scenario,
            faults=faults,
            failure=failure,
            digest=frame_log.hexdigest(),
            virtual_s=virtual_s,
            callbacks=callbacks,
            frames=frame_log.frames,
            trained_tasks=sum(checker.trained.values()),
            trained_tokens=checker.trained_rows.tokens,
            oldest_staleness=checker.oldest_staleness,
            coverage=frozenset(self._context.coverage.seen),
            story=tuple(self._story()) if failure else (),
        )

    def _story(self) -> Iterator[str]:
        yield f"scenario: {self._scenario.to_json()}"
        yield from (f"planned: {fault}" for fault in self._scenario.faults)
        yield f"waiting after {self._loop.time():.4f} s; trainer: {self._trainer.activity}"

        yield from (f"waiting: {task}" for task in self._pending)
        yield from map(str, self._context.frame_log.last)


class SimulationDeadlock(AssertionError):
    """Error for a run that makes no progress any more."""


def failure_of(error: Exception) -> Failure:
    """Convert an error of a simulated run to a failure."""
    if isinstance(error, NothingLeftToHappen):
        return Failure(kind="stuck", message=str(error))
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return Failure(kind=_kind(error), message=f"{type(error).__name__}: {_first_line(error)}")


def _kind(error: BaseException) -> str:
    """Return the error's type, the function that raised it, and the message without numbers."""
    if isinstance(error, SimulationDeadlock):
        return "stuck"
    frames = traceback.extract_tb(error.__traceback__)
    kind = re.sub(r"#(, #)+", "#", re.sub(r"-?\d+(\.\d+)?", "#", _first_line(error)))
    return f"{type(error).__name__} in {frames[-1].name if frames else 'nothing'}: {kind}"


def _first_line(error: BaseException) -> str:
    """Return the first line of the message, because pytest adds lines to that of an ``assert``."""
    return str(error).partition("\n")[0]
