"""Simulated run: one seed, one run in virtual time, the same bit for bit each time.

The scheduler, the core, the fleet, the weight control and the codec are the real ones; engines,
the wire, the trainer, the clock and what goes wrong are simulated. What must hold is checked after
every event. A failing seed fails again, in the same way, each time.
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
from tidegate.simulation.invariants import InvariantChecker, WatchedCore
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
"""Virtual. What happens within half a millisecond happens at once: that is where races are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A broken promise."""

    kind: str
    """What stays the same in a smaller run: the error, where it was raised, and its words."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Report of one run."""

    scenario: Scenario
    faults: str | None
    """What might go wrong when the scenario was drawn from its seed; None if it was given."""
    failure: Failure | None
    """None if every promise was kept."""
    digest: str
    """Of everything that happened: equal in each run of a scenario."""
    virtual_s: float
    callbacks: int
    frames: int
    trained_tasks: int
    trained_tokens: int
    oldest_staleness: int
    hardships: frozenset[CoverageMark]
    story: tuple[str, ...] = field(default=(), repr=False)
    """Of a failed run: what was planned, what waits, and the last frames carried."""

    @property
    def replay_command(self) -> str:
        """Runs this again."""
        if self.faults is None:
            return f"tidegate simulate --replay '{self.scenario.to_json()}'"
        seed = self.scenario.seed
        return f"tidegate simulate --first-seed {seed} --seeds 1 --faults {self.faults}"


def simulate(seed: int, *, faults: frozenset[FaultKind] = ALL_FAULTS) -> SimulationReport:
    """Run one seed, and say whether every promise was kept."""
    return run_scenario(draw_scenario(seed, faults), faults=name_faults(faults))


def run_scenario(scenario: Scenario, *, faults: str | None = None) -> SimulationReport:
    """Run one scenario, and say whether every promise was kept."""
    simulation = Simulation(scenario)
    with silent_log():
        failure = simulation.run()
    return simulation.report(failure, faults)


@contextlib.contextmanager
def silent_log() -> Iterator[None]:
    """Nobody wants to read of each engine that is lost on purpose."""
    log = logging.getLogger("tidegate")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@functools.cache
def model_of_no_words() -> ModelFiles:
    """A tokenizer that knows no word: simulated episodes read and write token ids."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return ModelFiles(Path("simulated"), tokenizer, (STOP_TOKEN,))


def engine_hosts(
    scenario: Scenario, world: SimulationContext, on_exit: Callable[[str, str], None]
) -> list[EngineHost]:
    """The scenario's engines, with all that will go wrong with them; none is started yet."""
    traits = SimulatedEngineSpec(
        step_s=scenario.step_s,
        staging_s=scenario.staging_s,
        max_running_turns=scenario.max_running_turns,
        chunk_tokens=scenario.chunk_tokens,
        tokens_per_step=scenario.tokens_per_step,
        blocks=scenario.blocks,
        block_tokens=BLOCK_TOKENS,
        hands_turns_back=scenario.hands_turns_back,
    )
    without_prefills = replace(traits, tells_prefills=False)
    hosts = [
        EngineHost(
            name,
            traits if name not in scenario.without_prefills else without_prefills,
            world=world,
            latency_s=scenario.latency_s,
            chance=scenario.chance("engine", number),
            on_exit=on_exit,
        )
        for number, name in enumerate(map(engine_name, range(scenario.engines)))
    ]
    for fault in scenario.faults:
        if fault.engine < len(hosts):
            hosts[fault.engine].plan(fault)
    return hosts


class Simulation:
    """One scenario, from its start to its end or its first broken promise.

    The world, with engines, wire and trainer, is there once; an orchestrator is put into it, and
    could be put into it again.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._time = VirtualTime(tick_s=TICK_S)
        self._loop = self._time.loop
        self._world = SimulationContext(self._loop, FrameLog())
        self._watch = InvariantChecker(scenario, self._world.truth, self._world.hardships)
        watch = self._watch
        episodes = SimulatedEpisodes(
            scenario,
            self._world,
            stopped=watch.stopped,
            live_version=lambda: watch.live_version,
        )
        self._trainer = SimulatedTrainer(
            scenario, self._world, episodes.play, self._watch.begins_training
        )
        self._hosts = engine_hosts(scenario, self._world, self._engine_ended)
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._scheduler: Scheduler | None = None
        """The orchestrator that is there now."""
        self._waiting: list[str] = []

    def _engine_ended(self, engine: str, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.engines.ended(engine, why)

    # ------------------------------------------------------------ one run

    def run(self) -> Failure | None:
        """Run it; return what was broken, or None."""
        try:
            self._time.run(self._main())
        except Exception as error:  # noqa: BLE001 - whatever it is, a promise is broken
            return failure_of(error)
        finally:
            self._time.close()
        return None

    async def _main(self) -> None:
        loop = self._loop
        loop.set_exception_handler(
            lambda _, context: self._break(
                context.get("exception", AssertionError(context.get("message")))
            )
        )
        scheduler = self._scheduler = self._new_scheduler()
        for host in self._hosts:
            host.start()
        tasks = {
            loop.create_task(scheduler.run(), name="scheduler"),
            loop.create_task(self._trainer.run(scheduler), name="trainer"),
            loop.create_task(self._wait_for_standstill(), name="liveness"),
        }
        futures = {self._broken, *tasks}
        try:
            done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting = [*map(str, self._hosts), *loop.waiting()]
        for future in sorted(done, key=lambda future: future is not self._broken):
            await future
        trainer = self._trainer
        self._watch.check_end(scheduler.core, trainer.taken_tasks, trainer.received_groups)

    def _break(self, error: BaseException) -> None:
        """A promise is broken, whoever might catch its error: this is the end."""
        if not self._broken.done():
            self._broken.set_exception(error)

    def _new_scheduler(self) -> Scheduler:
        """The real one, whose core is watched."""
        settings = self._scenario.settings
        init = InitWeights(channel="shm")
        scheduler = Scheduler(
            settings, model_of_no_words(), self._world.router, init, recorder=None
        )
        scheduler.core = WatchedCore(
            settings.rules(),
            watch=self._watch,
            on_broken=self._break,
        )
        return scheduler

    async def _wait_for_standstill(self) -> None:
        """Return never, but fail where nothing has come nearer to its end for a long time."""
        quiet_max_s, progress = self._scenario.quiet_max_s, -1
        while progress != self._watch.progress:
            progress = self._watch.progress
            await asyncio.sleep(quiet_max_s)
            if self._loop.time() > self._scenario.longest_run_s:
                break
        raise SimulationDeadlock(
            f"no progress for {quiet_max_s:.0f} s: the trainer {self._trainer.doing}"
        )

    # ------------------------------------------------------------ afterwards

    def report(self, failure: Failure | None, faults: str | None) -> SimulationReport:
        """How it went."""
        watch, tape = self._watch, self._world.tape
        virtual_s, callbacks = self._loop.time(), self._loop.callbacks_run
        received = self._trainer.received_groups
        tape.note_fact((str(failure), virtual_s, callbacks, watch.trained_rows.tokens, received))
        return SimulationReport(
            scenario=self._scenario,
            faults=faults,
            failure=failure,
            digest=tape.hexdigest(),
            virtual_s=virtual_s,
            callbacks=callbacks,
            frames=tape.frames,
            trained_tasks=sum(watch.trained.values()),
            trained_tokens=watch.trained_rows.tokens,
            oldest_staleness=watch.oldest_staleness,
            hardships=frozenset(self._world.hardships.seen),
            story=tuple(self._story()) if failure else (),
        )

    def _story(self) -> Iterator[str]:
        yield f"scenario: {self._scenario.to_json()}"
        yield from (f"planned: {fault}" for fault in self._scenario.faults)
        yield f"waiting after {self._loop.time():.4f} s: the trainer {self._trainer.doing}"
        yield from (f"waiting: {waiting}" for waiting in self._waiting)
        yield from map(str, self._world.tape.last)


class SimulationDeadlock(AssertionError):
    """The run makes no progress any more."""


def failure_of(error: Exception) -> Failure:
    """The broken promise that an error of a simulated run tells of."""
    if isinstance(error, NothingLeftToHappen):
        return Failure(kind="stuck", message=str(error))
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return Failure(kind=_kind(error), message=f"{type(error).__name__}: {_said(error)}")


def _kind(error: BaseException) -> str:
    """The error, the function that raised it, and what it says but for numbers."""
    if isinstance(error, SimulationDeadlock):
        return "stuck"
    frames = traceback.extract_tb(error.__traceback__)
    words = re.sub(r"#(, #)+", "#", re.sub(r"-?\d+(\.\d+)?", "#", _said(error)))
    return f"{type(error).__name__} in {frames[-1].name if frames else 'nothing'}: {words}"


def _said(error: BaseException) -> str:
    """The first line: pytest adds others to what an ``assert`` says."""
    return str(error).partition("\n")[0]
