"""Does a run go on whenever its own process dies? One seed, several lives, in virtual time.

Orchestrator and trainer die together, at any instant, while the engines go on; the next life has
the journal's commits and the trainer's last checkpoint, and nothing else. The scheduler, the core,
the journalling and the codec are the real ones.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from tidegate.errors import NothingLeftToHappen, PublishNeeded
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.state import digest, load, save
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.feed.left_out_rows import left_out_rows
from tidegate.orchestrator.journal.event_log import replay
from tidegate.orchestrator.journal.run_journal import JournalHeader, RunJournal
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.simulation.episodes import SimulatedEpisodes
from tidegate.orchestrator.simulation.faults import ALL_FAULTS, FaultKind
from tidegate.orchestrator.simulation.host import EngineHost
from tidegate.orchestrator.simulation.journal import SimulatedStore
from tidegate.orchestrator.simulation.lives_report import Checkpoint, LivesReport, Trained
from tidegate.orchestrator.simulation.model import check_turn
from tidegate.orchestrator.simulation.scenario import Scenario, draw_scenario
from tidegate.orchestrator.simulation.simulation import engine_hosts, model_of_no_words, silent_log
from tidegate.orchestrator.simulation.staging import WeightBuffer
from tidegate.orchestrator.simulation.virtual_time import VirtualLoop, run_in_virtual_time
from tidegate.orchestrator.simulation.wire import SimulatedRouter, Tape
from tidegate.orchestrator.simulation.world import World
from tidegate.transport.messages import InitWeights

LONGEST_RUN_S = 600.0
"""Virtual; several times as long as the longest honest runs."""

LIVES_MAX = 8

TRAINERS_FAULTS = {FaultKind.REFUSE, FaultKind.LAG, FaultKind.TRAINER}
"""What this trainer would have to go on after; it dies instead."""

LEFT_OUT = "left_out"
"""The reason for rows that the trainer does not train on."""

HEADER = JournalHeader(
    run_id="simulated",
    rules={},
    seed=0,
)


class SlowTasks(AsyncIterator[int]):
    """Not a generator: one that a crash leaves in the middle would want a loop to end it."""

    def __init__(self, tasks: range) -> None:
        self._tasks = iter(tasks)

    async def __anext__(self) -> int:
        await asyncio.sleep(0.01)
        for task in self._tasks:
            return task
        raise StopAsyncIteration


class WatchedCore(Core):
    """A core whose invariants are checked after every event."""

    on_event: Callable[[ev.Event, list[ev.Command]], None]
    on_broken: Callable[[BaseException], None]

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """As :meth:`Core.handle`. What it raises ends the simulation, whoever might catch it."""
        try:
            commands = super().handle(event)
            self.check()
            self.on_event(event, commands)
        except Exception as error:
            self.on_broken(error)
            raise
        return commands


class Lives:
    """One seed's run, from its first life to its last."""

    def __init__(self, seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> None:
        self._scenario: Scenario = draw_scenario(seed, kinds - TRAINERS_FAULTS)
        self._chance = self._scenario.chance("lives")
        self._tape = Tape()
        self._hosts: list[EngineHost] = []
        self._buffer = WeightBuffer()
        self._checkpoint = Checkpoint()
        self._checkpoint_batches = self._chance.choice((1, 1, 2, 4))
        self._scheduler: Scheduler | None = None
        self._made_of: dict[int, tuple[Trained, ...]] = {}
        """Version -> what its publisher had trained."""
        self._served: dict[int, tuple[Trained, ...]] = {}
        """The same of those that an engine has served."""
        self._last_group = -1
        """The newest that the trainer has had."""
        self._trained: tuple[Trained, ...] = ()
        """By the trainer that lives now, and before its checkpoint."""
        self._done = False
        self.report = LivesReport(seed)

    def run(self) -> LivesReport:
        """Run it to its end or its first broken promise."""
        try:
            with silent_log():
                run_in_virtual_time(self._main())
        except TimeoutError:
            self.report.failure = f"no end after {LONGEST_RUN_S:.0f} s of virtual time"
        except NothingLeftToHappen as error:
            self.report.failure = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a promise is broken
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self.report.failure = f"{type(error).__name__}: {error}"
        self.report.digest = self._tape.hexdigest()
        return self.report

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
        world = World(loop, self._tape, buffer=self._buffer)
        self._episodes = SimulatedEpisodes(self._scenario, world, is_patient=True)
        router = world.router
        store = SimulatedStore(
            commit_s=self._chance.choice((0.0001, 0.002, 0.02)), chance=self._chance
        )
        self._hosts = engine_hosts(self._scenario, world, self._engine_ended)
        for host in self._hosts:
            host.start()
        async with asyncio.timeout(LONGEST_RUN_S):
            while not self._done:
                self.report.lives += 1
                await self._live(router, store, broken, on_broken)
                if not self._done:
                    await self._be_dead(router)
        self._check_end()

    def _engine_ended(self, name: str, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.engines.ended(name, why)

    # ------------------------------------------------------------ one life

    async def _live(
        self,
        router: SimulatedRouter,
        store: SimulatedStore,
        broken: "asyncio.Future[None]",
        on_broken: Callable[[BaseException], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        journal = RunJournal(store, self._core(store, on_broken), HEADER, is_threaded=False)
        journal.restore_position(store)
        resume = None
        if self.report.lives > 1:
            resume = ev.Resumed(self._checkpoint.batches, offer=0)
            self._count_resume(journal.core, resume)
        scheduler = Scheduler(
            self._scenario.settings,
            model_of_no_words(),
            router,
            InitWeights(channel="shm"),
            recorder=None,
            journal=journal,
            resume=resume,
        )
        self._scheduler = scheduler
        serving = loop.create_task(scheduler.run(), name="scheduler")
        trainer = loop.create_task(self._train(scheduler), name="trainer")
        dies_after_s = None
        if self.report.lives < LIVES_MAX:
            dies_after_s = self._chance.choice((0.1, 0.5, 2.0)) * self._chance.expovariate(1.0)
        try:
            await asyncio.wait(
                (serving, trainer, broken),
                timeout=dies_after_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._scheduler = None
            store.crash()
            router.detach()
            self._done = trainer.done()
            await _end(serving, trainer)
        for future in (broken, serving, trainer):
            if future.done() and not future.cancelled():
                await future

    def _core(self, store: SimulatedStore, on_broken: Callable[[BaseException], None]) -> Core:
        """Made again from what has survived, by two ways that must agree."""
        settings = self._scenario.settings

        def new() -> WatchedCore:
            core = WatchedCore(
                settings.rules(),
                survives_crashes=True,
            )
            core.on_event, core.on_broken = lambda *_: None, on_broken
            return core

        core = new()
        snapshot = store.snapshot()
        if snapshot is not None:
            load(snapshot.body, core)
        for _, record in store.read():
            replay(record, core)
        again = new()
        load(save(core), again)
        assert digest(again) == digest(core), "a saved core is loaded as another one"
        chosen = again if self._chance.random() < 0.5 else core
        chosen.on_event = self._saw
        return chosen

    def _count_resume(self, core: Core, resume: ev.Resumed) -> None:
        self.report.batches_again += core.handed.count - resume.batches
        self.report.rollbacks += core.handed.first_lost_version(resume.batches) is not None

    async def _be_dead(self, router: SimulatedRouter) -> None:
        """No process for a while: the engines' connections are broken."""
        dead_s = 0.05 + 0.3 * self._chance.expovariate(1.0)
        router.forget()
        for host in self._hosts:
            host.link.cut(dead_s)
        await asyncio.sleep(dead_s * self._chance.random())

    # ------------------------------------------------------------ what is seen

    def _saw(self, event: ev.Event, commands: list[ev.Command]) -> None:
        match event:
            case ev.EngineSwapped(version=version) | ev.EngineJoined(weight_version=version):
                made_of = self._made_of.get(version, ())
                assert self._served.setdefault(version, made_of) == made_of, (
                    f"v{version} was served made of {self._served[version]} and of {made_of}"
                )
        for command in commands:
            match command:
                case ev.HandOver():
                    self._check_batch(command)
                case ev.Record(rollout=rollout):
                    self.report.discarded[rollout.discard_reason or "evaluated"] += 1

    def _check_batch(self, batch: ev.HandOver) -> None:
        for group in batch.groups:
            is_next = group.group_id > self._last_group or not self._scenario.is_in_order
            assert is_next, "batches come in another order than before"
            self._last_group = group.group_id
        for rollout in (rollout for group in batch.groups for rollout in group.kept):
            for turn in rollout.turns:
                check_turn(turn)
                for span in turn.spans():
                    self._check_lineage(span.version)
            oldest, bound = rollout.oldest_trained_version, self._scenario.staleness_bound
            if oldest is not None and bound is not None:  # else all of it is masked
                assert 0 <= batch.trainer_version - oldest <= bound

    def _check_lineage(self, version: int) -> None:
        """What is trained must have been sampled by weights that became the present ones."""
        made_of = self._served.get(version, ())
        now = self._trained[: len(made_of)]
        assert made_of == now, f"v{version} was made of {made_of}, but the trainer had {now}"

    def _check_end(self) -> None:
        trained = Counter(each.task for each in self._checkpoint.trained)
        for task in range(self._scenario.tasks):
            scripts = [
                self._scenario.script(task, index)
                for index in range(self._scenario.settings.group_size)
            ]
            must = all(script.failure is None for script in scripts)
            must = must and not self._scenario.filters_groups
            assert trained[task] <= 1, f"task {task} was trained {trained[task]} times"
            assert trained[task] == 1 or not must, f"task {task} was lost"

    # ------------------------------------------------------------ the trainer

    async def _train(self, scheduler: Scheduler) -> None:
        scenario = self._scenario
        self._trained, batches = self._checkpoint.trained, self._checkpoint.batches
        left_out = self._checkpoint.left_out_tokens
        self._last_group = self._checkpoint.last_group
        await scheduler.wait_for_engines(1)
        if self.report.lives > 1:
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.5)))  # it reads its checkpoint
            await self._publish(scheduler)
        tasks = range(scenario.tasks)
        scheduler.offer(SlowTasks(tasks) if scenario.are_tasks_async else tasks, self._episode)
        while True:
            try:
                batch = await scheduler.next_batch()
            except PublishNeeded:
                await self._publish(scheduler)
                continue
            if batch is None:
                self._checkpoint = Checkpoint(self._trained, batches, self._last_group, left_out)
                self.report.left_out_tokens = left_out
                told = scheduler.core.ledger.discarded[LEFT_OUT]
                assert told == left_out, f"{told} tokens are left out, the trainer left {left_out}"
                return
            assert batch.number == batches + 1
            await asyncio.sleep(scenario.train_s)
            batches = batch.number
            whole = [group.task for group in batch.groups if not group.is_rest]
            taken = [task for task in whole if isinstance(task, int)]
            self._trained += tuple(Trained(task, self.report.lives) for task in taken)
            left_out += await self._leave_rows_out(scheduler, batch)
            is_saved = batches % self._checkpoint_batches == 0
            if is_saved:
                self._checkpoint = Checkpoint(self._trained, batches, self._last_group, left_out)
            await self._publish(scheduler)
            if is_saved and self._chance.random() < 0.5:
                await scheduler.make_safe(batches, 0)

    async def _leave_rows_out(self, scheduler: Scheduler, batch: ev.HandOver) -> int:
        """Don't train on some rows; so many tokens are in them."""
        rows = [row for group in batch.groups for row in group.kept]
        share = self._scenario.leaving_out
        chosen = [place for place in range(len(rows)) if share and self._chance.random() < share]
        await left_out_rows(batch.number, chosen, LEFT_OUT).tell(scheduler)
        return sum(rows[place].sampled_tokens - rows[place].masked_tokens for place in chosen)

    async def _publish(self, scheduler: Scheduler) -> None:
        version = await scheduler.control.publisher.reserve()
        update = self._buffer.begin(
            version, keep=scheduler.control.weights.kept_buffers, content=version
        )
        await asyncio.sleep(self._scenario.write_s)
        self._buffer.end(update)
        self._made_of[version] = self._trained
        await scheduler.control.publisher.publish(version, [update])

    async def _episode(self, episode: Episode, task: int) -> float:
        mood = self._scenario.chance("mood", task, episode.index, self.report.lives)
        return await self._episodes.play(episode, task, mood)


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    """The process is gone: what its tasks still do reaches nobody."""
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.wait(tasks)


def simulate_lives(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> LivesReport:
    """Run one seed, and say whether every promise was kept."""
    return Lives(seed, kinds).run()
