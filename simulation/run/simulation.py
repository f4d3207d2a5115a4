"""Simulated run: one seed, one run in virtual time, the same bit for bit each time.

The scheduler, the core, the fleet, the weight control and the codec are the real ones; engines, the
wire, the trainer, the clock and the faults are simulated. Invariants are checked after every event.
"""

import asyncio
import contextlib
import functools
import logging
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokenizers import Tokenizer, models

from tidegate.errors import NothingLeftToHappen
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.invariants import CheckedCore, InvariantChecker
from tidegate.simulation.checks.model import STOP_TOKEN
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.engine import EngineHost, SimulatedEngines
from tidegate.simulation.engine.spec import HASHING_COSTS, SimulatedEngineSpec
from tidegate.simulation.engine.wire import FrameLog
from tidegate.simulation.faults.faults import ALL_FAULTS, FaultKind, name_faults
from tidegate.simulation.faults.scenario import (
    BLOCK_TOKENS,
    Scenario,
    any_figures,
    draw_scenario,
    engine_name,
)
from tidegate.simulation.run.episodes import SimulatedEpisodes
from tidegate.simulation.run.trainer import SimulatedTrainer
from tidegate.simulation.run.virtual_time import VirtualTime
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


@dataclass(slots=True, kw_only=True)
class RunReport:
    """Report of one simulated run."""

    scenario: Scenario
    drawn_by: str | None = None
    """Options of ``tidegate simulate`` that draw the scenario from its seed; None if the scenario
    was given, not drawn."""
    failure: Failure | None = None
    """First failure of the run; None if every invariant held."""
    digest: str = ""
    """Hash of all frames of the run, equal in each run of a scenario."""
    virtual_s: float = 0.0
    coverage: frozenset[CoverageMark] = frozenset()
    story: tuple[str, ...] = field(default=(), repr=False)
    """Planned faults, waiting tasks and last frames of a failed run; empty for other runs."""

    @property
    def seed(self) -> int:
        """Seed of the scenario."""
        return self.scenario.seed

    @property
    def replay_command(self) -> str:
        """Shell command that repeats the run."""
        if self.drawn_by is None:
            return f"tidegate simulate --replay '{self.scenario.to_json()}'"
        return f"tidegate simulate --first-seed {self.seed} {self.drawn_by}"


Report = TypeVar("Report", bound=RunReport)


@contextlib.contextmanager
def _silent_log() -> Iterator[None]:
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


class SimulatedCluster(ABC, Generic[Report]):
    """Clock, wire and engines of one scenario; a kind of run adds orchestrators and trainers."""

    def __init__(self, scenario: Scenario, report: Report, *, tick_s: float | None = None) -> None:
        self._scenario = scenario
        self.report = report
        self._time = VirtualTime(tick_s=tick_s)
        self._loop = self._time.loop
        self._context = SimulationContext(self._loop, FrameLog())
        self._hosts = self._make_hosts()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        """Future that gets the first error of the run, wherever it was raised."""
        self._scheduler: Scheduler | None = None
        """Scheduler of the orchestrator that runs now."""

    def _make_hosts(self) -> list[EngineHost]:
        scenario = self._scenario
        spec = SimulatedEngineSpec(
            costs=replace(HASHING_COSTS, slots=scenario.max_running_turns, step_s=scenario.step_s),
            staging_s=scenario.staging_s,
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
                context=self._context,
                latency_s=scenario.latency_s,
                chance=scenario.chance("engine", number),
                on_exit=self._engine_ended,
                on_drain=self._drain,
            )
            for number, name in enumerate(map(engine_name, range(scenario.engines)))
        ]
        for fault in scenario.faults:
            if fault.engine < len(hosts):
                hosts[fault.engine].plan(fault)
        for number, host in enumerate(hosts):
            kinds = {fault.kind for fault in scenario.faults if fault.engine == number}
            is_asked = kinds == {FaultKind.DRAIN} or (scenario.is_elastic and not kinds)
            host.must_end_idle = is_asked and not scenario.deadly_turns
        return hosts

    def _engine_ended(self, engine: str, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.engines.ended(engine, why)

    def _drain(self, engine: str, within_s: float) -> None:
        if self._scheduler is not None and engine in self._scheduler.fleet.engines:
            self._scheduler.engines.drains.begin(engine, within_s)

    def run(self) -> Report:
        """Run the scenario to its end or its first failure, and return the report."""
        report, frame_log = self.report, self._context.frame_log
        self._loop.set_exception_handler(
            lambda _, context: self._fail(
                context.get("exception", AssertionError(context.get("message")))
            )
        )
        with _silent_log():
            try:
                self._time.run(self._main())
            except Exception as error:  # noqa: BLE001 - any error is a failure of the run
                report.failure = _failure_of(error)
            finally:
                self._time.close()
        report.virtual_s = self._loop.time()
        report.coverage = frozenset(self._context.coverage)
        if results := self._results():
            frame_log.record_fact(results)
        report.digest = frame_log.hexdigest()
        if report.failure is not None:
            planned = (f"planned: {fault}" for fault in self._scenario.faults)
            head = (f"scenario: {self._scenario.to_json()}", *planned)
            report.story = (*head, *self._activities(), *map(str, frame_log.last))
        return report

    def _fail(self, error: BaseException) -> None:
        """Fail the run with ``error``, even if the code that raised the error also catches it."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _make_scheduler(self, **options: Any) -> Scheduler:
        init, router = InitWeights(channel="shm"), self._context.router
        settings = self._scenario.settings
        return Scheduler(settings, empty_model_files(), router, init, recorder=None, **options)

    @abstractmethod
    async def _main(self) -> None:
        """Start the engines, and run orchestrators and trainers to their end."""

    def _results(self) -> tuple[object, ...]:
        """Add results to the report; return those of the digest."""
        return ()

    def _activities(self) -> Iterable[str]:
        """Return lines on what trainers and engines did when the run failed."""
        return map(str, self._hosts)


# ---------------------------------------------------------------- runs of one process


@dataclass(slots=True, kw_only=True)
class SimulationReport(RunReport):
    """Report of one simulated run of one process."""

    callbacks: int = 0
    frames: int = 0
    trained_tasks: int = 0
    trained_tokens: int = 0
    oldest_staleness: int = 0


def simulate(seed: int, *, faults: frozenset[FaultKind] = ALL_FAULTS) -> SimulationReport:
    """Run the scenario of one seed and report the outcome."""
    drawn_by = f"--seeds 1 --faults {name_faults(faults)}"
    return Simulation(draw_scenario(seed, faults), drawn_by).run()


def run_scenario(scenario: Scenario) -> SimulationReport:
    """Run one scenario and report the outcome."""
    return Simulation(scenario).run()


class Simulation(SimulatedCluster[SimulationReport]):
    """One scenario, from its start to its end or its first failure."""

    def __init__(self, scenario: Scenario, drawn_by: str | None = None) -> None:
        report = SimulationReport(scenario=scenario, drawn_by=drawn_by)
        super().__init__(scenario, report, tick_s=TICK_S)
        self._checker = checker = InvariantChecker(
            scenario, self._context.ground_truth, self._context.coverage
        )
        episodes = SimulatedEpisodes(
            scenario,
            self._context,
            stopped=checker.stopped,
            live_version=lambda: checker.live_version,
        )
        self._trainer = SimulatedTrainer(
            scenario, self._context, episodes.play, checker.begin_training
        )
        self._pending: list[str] = []

    async def _main(self) -> None:
        loop = self._loop
        scheduler = self._scheduler = self._new_scheduler()
        for host in self._hosts:
            host.start()
        tasks = {
            loop.create_task(scheduler.run(), name="scheduler"),
            loop.create_task(self._trainer.run(scheduler), name="trainer"),
            loop.create_task(self._watch_for_deadlock(), name="liveness"),
        }
        if scheduler.elastic is not None:
            tasks.add(loop.create_task(scheduler.elastic.run(), name="elasticity"))
        futures = {self._failed, *tasks}
        try:
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pending = [*map(str, self._hosts), *loop.waiting()]
        for future in sorted(done, key=lambda future: future is not self._failed):
            await future
        trainer = self._trainer
        self._checker.check_end(scheduler.core, trainer.taken_tasks, trainer.received_groups)

    def _new_scheduler(self) -> Scheduler:
        core = CheckedCore(self._scenario.settings.rules())
        core.on_event = functools.partial(self._check_event, core)
        core.on_failure = self._fail
        scheduler = self._make_scheduler(core=core)
        if scheduler.elastic is not None:
            hosts = {host.name: host for host in self._hosts}
            start_s = scheduler.elastic.policy.start_s
            scheduler.engines.launched = SimulatedEngines(hosts, hosts.__getitem__, start_s=start_s)
        return scheduler

    def _check_event(self, core: Core, event: ev.Event, commands: list[ev.Command]) -> None:
        self._checker.check_event(core, event, commands)
        if self._scheduler is None or (elastic := self._scheduler.elastic) is None:
            return
        launched = self._scheduler.engines.launched
        assert launched is not None
        self._checker.check_fleet(event, wanted=elastic.wanted, launched=launched.names)
        if type(event) is ev.BatchTaken:
            self._loop.call_soon(elastic.decide, any_figures(elastic.wanted))

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

    def _results(self) -> tuple[object, ...]:
        report, checker = self.report, self._checker
        report.callbacks = self._loop.callbacks_run
        report.frames = self._context.frame_log.frames
        report.trained_tasks = sum(checker.trained.values())
        report.trained_tokens = checker.trained_rows.tokens
        report.oldest_staleness = checker.oldest_staleness
        received = self._trainer.received_groups
        counts = (report.virtual_s, report.callbacks, report.trained_tokens)
        return (str(report.failure), *counts, received)

    def _activities(self) -> Iterable[str]:
        yield f"waiting after {self._loop.time():.4f} s; trainer: {self._trainer.activity}"
        yield from (f"waiting: {task}" for task in self._pending)


class SimulationDeadlock(AssertionError):
    """Error for a run that makes no progress any more."""


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, NothingLeftToHappen | TimeoutError):
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
