"""Does a run keep its promises whatever happens? One seed, one run in virtual time, bit for bit.

The scheduler, the core, the fleet, the weight coordinator and the codec are the real ones; engines,
the wire, the trainer, the clock and what goes wrong are simulated. What must hold is checked after
every event. A failing seed fails again, in the same way, each time.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, models

from tidegate.errors import NothingLeftToHappen, PublishNeeded
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.episode import Episode
from tidegate.orchestrator.faults import ALL_FAULTS, FaultKind, name_faults
from tidegate.orchestrator.invariants import Watch, WatchedCore
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.scenario import Scenario, draw_scenario
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.simulated_host import EngineHost
from tidegate.orchestrator.simulated_model import STOP_TOKEN, TORN_WEIGHTS
from tidegate.orchestrator.simulated_staging import WeightBuffer
from tidegate.orchestrator.simulated_truth import Truth
from tidegate.orchestrator.simulated_wire import SimulatedRouter, Tape
from tidegate.orchestrator.virtual_time import VirtualLoop, run_in_virtual_time
from tidegate.transport.messages import InitWeights, UpdateWeights

LONGEST_RUN_S = 300.0
"""Virtual. The longest honest runs take a tenth of it, most of that waiting for an episode that
hangs; a run that takes longer makes no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """How one seed went."""

    seed: int
    faults: str
    failure: str | None
    """What was broken; None if every promise was kept."""
    digest: str
    """Of everything that happened: equal in each run of a seed."""
    virtual_s: float
    callbacks: int
    frames: int
    trained_tasks: int
    trained_tokens: int
    oldest_staleness: int
    max_staleness: int
    story: tuple[str, ...] = field(default=(), repr=False)
    """Of a failed run: what was planned, what waits, and the last frames carried."""

    @property
    def replay_command(self) -> str:
        """Runs this seed again."""
        return f"tidegate simulate --first-seed {self.seed} --seeds 1 --faults {self.faults}"


def simulate(seed: int, *, faults: frozenset[FaultKind] = ALL_FAULTS) -> SimulationReport:
    """Run one seed, and say whether every promise was kept."""
    simulation = Simulation(draw_scenario(seed, faults))
    with _silent_log():
        failure = simulation.run()
    return simulation.report(failure)


@contextlib.contextmanager
def _silent_log() -> Iterator[None]:
    """Nobody wants to read of each engine that is lost on purpose."""
    log = logging.getLogger("tidegate")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@functools.cache
def _model() -> ModelFiles:
    """A tokenizer that knows no word: simulated episodes read and write token ids."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return ModelFiles(Path("simulated"), tokenizer, (STOP_TOKEN,))


class Simulation:
    """One scenario, from its start to its end or its first broken promise."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._tape = Tape()
        self._truth = Truth()
        self._watch = Watch(scenario, self._truth)
        self._buffer = WeightBuffer()
        self._version = 0
        self._hosts: list[EngineHost] = []
        self._doing = "starts"
        """What the trainer does."""
        self._virtual_s = 0.0
        self._callbacks = 0
        self._waiting: list[str] = []

    def run(self) -> str | None:
        """Run it; return what was broken, or None."""
        try:
            run_in_virtual_time(self._main())
        except TimeoutError:
            return f"no end after {LONGEST_RUN_S:.0f} s of virtual time: the trainer {self._doing}"
        except NothingLeftToHappen as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a promise is broken
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            return f"{type(error).__name__}: {error}"
        return None

    def report(self, failure: str | None) -> SimulationReport:
        """How it went."""
        scenario, watch = self._scenario, self._watch
        self._tape.note_fact((failure, self._virtual_s, self._callbacks, watch.trained_tokens))
        return SimulationReport(
            seed=scenario.seed,
            faults=name_faults(scenario.kinds),
            failure=failure,
            digest=self._tape.hexdigest(),
            virtual_s=self._virtual_s,
            callbacks=self._callbacks,
            frames=self._tape.frames,
            trained_tasks=sum(watch.trained.values()),
            trained_tokens=watch.trained_tokens,
            oldest_staleness=watch.oldest_staleness,
            max_staleness=scenario.settings.max_staleness,
            story=tuple(self._story()) if failure else (),
        )

    def _story(self) -> Iterator[str]:
        settings = self._scenario.settings
        yield f"settings: {settings.model_dump(exclude={'model'}, exclude_defaults=True)}"
        yield from (f"planned: {fault}" for fault in self._scenario.faults)
        yield f"waiting after {self._virtual_s:.4f} s: trainer {self._doing}"
        yield from (f"waiting: {waiting}" for waiting in self._waiting)
        yield from map(str, self._tape.last)

    # ------------------------------------------------------------ on the virtual loop

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        broken: asyncio.Future[None] = loop.create_future()

        def on_broken(error: BaseException) -> None:
            if not broken.done():
                broken.set_exception(error)

        loop.set_exception_handler(
            lambda _, context: on_broken(context.get("exception", AssertionError(str(context))))
        )
        scheduler = self._scheduler(loop, on_broken)
        serving = loop.create_task(scheduler.run(), name="scheduler")
        trainer = loop.create_task(self._train(scheduler), name="trainer")
        try:
            async with asyncio.timeout(LONGEST_RUN_S):
                await asyncio.wait((serving, trainer, broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._virtual_s, self._callbacks = loop.time(), loop.callbacks_run
            self._waiting = [*map(str, [host.engine for host in self._hosts]), *loop.waiting()]
        for future in (broken, serving, trainer):
            if future.done():
                await future
        self._watch.check_end(scheduler.core)

    def _scheduler(
        self, loop: VirtualLoop, on_broken: Callable[[BaseException], None]
    ) -> Scheduler:
        """The real one, whose core is watched, with engines at the other end of the wire."""
        scenario, settings = self._scenario, self._scenario.settings
        router = SimulatedRouter(loop, self._tape)
        init = InitWeights(channel="shm")
        scheduler = Scheduler(settings, _model(), router, init, recorder=None)
        scheduler.core = WatchedCore(
            settings.policy(),
            group_size=settings.group_size,
            watch=self._watch,
            on_broken=on_broken,
        )
        for number in range(scenario.engines):
            host = EngineHost(
                number,
                scenario=scenario,
                router=router,
                buffer=self._buffer,
                truth=self._truth,
                on_exit=scheduler.engine_ended,
            )
            host.start()
            self._hosts.append(host)
        for fault in scenario.faults:
            self._hosts[fault.engine].plan(fault)
        return scheduler

    # ------------------------------------------------------------ the trainer

    async def _train(self, scheduler: Scheduler) -> None:
        scenario = self._scenario
        self._doing = "waits for engines"
        await scheduler.wait_for_engines(scenario.engines)
        tasks = range(scenario.tasks)
        scheduler.offer(self._slowly(tasks) if scenario.are_tasks_async else tasks, self._episode)
        chance = scenario.chance("trainer")
        unpublished = 0
        while True:
            batch, is_refused = await self._next_batch(scheduler)
            if batch is None and not is_refused:
                return
            self._doing = "trains"
            await asyncio.sleep(scenario.train_s)
            unpublished += batch is not None
            if is_refused or unpublished >= scenario.batches_per_publish:
                unpublished = 0
                await self._publish(scheduler)
                if scenario.publishes_twice and chance.random() < 0.3:
                    await self._publish(scheduler)
                await self._evaluate(scheduler)

    async def _next_batch(self, scheduler: Scheduler) -> tuple[ev.HandOver | None, bool]:
        """The next batch if there is one, and whether a publish is due before it."""
        self._doing = "waits for a batch"
        try:
            return await scheduler.next_batch(), False
        except PublishNeeded:
            return None, True

    async def _publish(self, scheduler: Scheduler) -> None:
        self._doing = "waits until weights can be written"
        version = await scheduler.reserve_version()
        self._buffer.content = TORN_WEIGHTS
        await asyncio.sleep(self._scenario.write_s)
        self._buffer.content = version
        self._doing = f"publishes v{version}"
        await scheduler.publish(version, [UpdateWeights(version=version, location="", tensors=[])])
        self._version = version

    async def _evaluate(self, scheduler: Scheduler) -> None:
        self._doing = "evaluates"
        tasks = [-1 - task for task in range(self._scenario.evaluation_tasks)]
        for rollout in await scheduler.evaluate(tasks, self._episode):
            self._tape.note_fact((rollout.reward, rollout.token_ids.tobytes()))

    # ------------------------------------------------------------ tasks and episodes

    async def _slowly(self, tasks: range) -> AsyncIterator[int]:
        for task in tasks:
            await asyncio.sleep(0.01)
            yield task

    async def _episode(self, episode: Episode, task: int) -> float:
        script = self._scenario.script(task, episode.index)
        for turn in script.turns:
            episode.append(turn.given)
            await episode.generate(max_tokens=turn.max_tokens)
            await asyncio.sleep(turn.tool_s)
        if script.failure == "episode_timeout":
            await asyncio.get_running_loop().create_future()
        if script.failure == "episode_error":
            raise ValueError("meant to fail")
        return script.reward
