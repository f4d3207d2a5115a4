"""Crash-restart runs: one seed, several lives of the same run, in virtual time.

Orchestrator and trainer die together at any instant while the engines go on; the next life has the
journal's commits and the trainer's last checkpoint. The journal lies in memory, and its commits
take virtual time: a crash loses what was appended and not committed.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidegate.errors import PublishNeeded
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.state import digest, load, save
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.journal.reading import Snapshot
from tidegate.orchestrator.journal.run_journal import JournalHeader, RunJournal
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.discarded_rows import discarded_rows
from tidegate.simulation.context import SimulationContext
from tidegate.simulation.episodes import SimulatedEpisodes
from tidegate.simulation.faults import ALL_FAULTS, FaultKind
from tidegate.simulation.host import EngineHost
from tidegate.simulation.model import check_turn
from tidegate.simulation.scenario import Scenario, draw_scenario
from tidegate.simulation.simulation import (
    Failure,
    engine_hosts,
    failure_of,
    model_of_no_words,
    silent_log,
)
from tidegate.simulation.staging import WeightBuffer
from tidegate.simulation.trainer import receive
from tidegate.simulation.virtual_time import VirtualLoop, run_in_virtual_time
from tidegate.simulation.wire import FrameLog, SimulatedRouter
from tidegate.transport.messages import InitWeights

STALLED_STARTS = 0.2
"""Share of a life's first commits that take long."""

STALL_S = 0.3
"""Mean time of such a commit: long enough for an engine to reconnect and be sent turns."""


class SimulatedStore:
    """In-memory stand-in for :class:`journal.Journal`, whose commits take virtual time."""

    def __init__(self, *, commit_s: float, chance: random.Random) -> None:
        self._commit_s = commit_s
        self._chance = chance
        self._records: list[tuple[int, bytes]] = []
        """(lsn, record) after the snapshot."""
        self._snapshot: Snapshot | None = None
        self._appended = self._committed = 0
        self._on_committed: Callable[[int], None] | None = None
        self._commit: asyncio.TimerHandle | None = None
        self._is_first = False
        """Whether the next commit is the first since :meth:`start`."""
        self.bytes_since_snapshot = 0

    def append(self, record: bytes) -> int:
        """Have a record committed after a while. After a crash nothing is kept."""
        if self._on_committed is None:
            return self._appended
        self._appended += 1
        self._records.append((self._appended, record))
        self.bytes_since_snapshot += len(record)
        if self._commit is None:
            self._begin_commit()
        return self._appended

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Have a snapshot take the place of the records up to ``lsn``, at once."""
        assert lsn == self._appended
        self._committed = lsn
        self._snapshot = Snapshot(lsn, snapshot)
        self._records.clear()
        self.bytes_since_snapshot = 0

    def start(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Take records from now on."""
        self._on_committed = on_committed
        self._is_first = True

    def read(self) -> Iterator[tuple[int, bytes]]:
        """What has survived."""
        return iter(list(self._records))

    def snapshot(self) -> Snapshot | None:
        """The newest, and the lsn up to which it holds."""
        return self._snapshot

    def crash(self) -> None:
        """The process is gone, and with it what was not committed."""
        self._on_committed = None
        if self._commit is not None:
            self._commit.cancel()
            self._commit = None
        self._records = [(lsn, record) for lsn, record in self._records if lsn <= self._committed]
        self._appended = self._committed

    def _begin_commit(self) -> None:
        is_stalled = self._is_first and self._chance.random() < STALLED_STARTS
        self._is_first = False
        mean_s = STALL_S if is_stalled else self._commit_s
        delay_s = mean_s * self._chance.expovariate(1.0)
        loop = asyncio.get_running_loop()
        self._commit = loop.call_later(delay_s, self._end_commit, self._appended)

    def _end_commit(self, lsn: int) -> None:
        self._commit = None
        self._committed = lsn
        if self._on_committed is not None:
            self._on_committed(lsn)
        if self._committed < self._appended and self._commit is None:
            self._begin_commit()


@dataclass(frozen=True, slots=True)
class Trained:
    """One task, and the life that it was trained in: once more gives other weights."""

    task: int
    life: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Trainer's checkpoint, as far as a resume needs it."""

    trained: tuple[Trained, ...] = ()
    """In the order of training."""
    batches: int = 0
    last_group: int = -1
    offer: int = 0
    """Which of its iterators it takes tasks from: 0 or 1."""
    taken_before: frozenset[int] = frozenset()
    """Under iterator 1: tasks that had been taken from iterator 0 by then."""
    left_out_tokens: int = 0
    """In rows that it had and did not train on."""


@dataclass(slots=True)
class CrashRestartReport:
    """Report of one crash-restart run."""

    scenario: Scenario
    is_drawn: bool = True
    """Whether the scenario was drawn from its seed, with all faults."""
    failure: Failure | None = None
    """None if every promise was kept."""
    lives: int = 0
    batches_again: int = 0
    """Handed over once more, because the checkpoint had not seen them."""
    batches_handed: int = 0
    batches_returned: int = 0
    """Of those handed over, the ones that did not reach the trainer."""
    left_out_tokens: int = 0
    """In rows that the trainer had and did not train on, as far as its checkpoint knows."""
    rollbacks: int = 0
    """Resumes that found weights newer than the checkpoint."""
    rejoined_turns: int = 0
    """Turns that episodes, begun again, found going on."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Rollouts, by reason."""
    digest: str = ""
    story: tuple[str, ...] = field(default=(), repr=False)
    """Of a failed run: the scenario, the planned faults and the last frames carried."""

    @property
    def seed(self) -> int:
        """The scenario's seed."""
        return self.scenario.seed

    @property
    def replay_command(self) -> str:
        """The command that runs this again."""
        if self.is_drawn:
            return f"tidegate simulate --first-seed {self.seed} --seeds 0 --crash-restart-runs 1"
        return f"tidegate simulate --replay '{self.scenario.to_json()}'"


LIVES_MAX = 8
"""Of a scenario that is drawn."""

TRAINERS_FAULTS = {FaultKind.REFUSE, FaultKind.LAG, FaultKind.TRAINER}
"""What this trainer would have to go on after; it dies instead."""

LEFT_OUT = "left_out"
"""The reason for rows that the trainer does not train on."""

BatchRows = tuple[tuple[int, tuple[int, ...]], ...]
"""Of each group of a batch, in order: its id, and those of its rows."""

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


class CrashRestartCore(Core):
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


class CrashRestartRun:
    """One scenario's run, from its first life to its last."""

    def __init__(self, scenario: Scenario, *, is_drawn: bool = False) -> None:
        self._scenario = scenario
        self._chance = self._scenario.chance("lives")
        self._tape = FrameLog()
        self._hosts: list[EngineHost] = []
        self._buffer = WeightBuffer()
        self._checkpoint = Checkpoint()
        self._checkpoint_batches = self._chance.choice((1, 1, 2, 4))
        self._scheduler: Scheduler | None = None
        chance = self._scenario.chance("offers")
        tasks = self._scenario.tasks
        has_two_iterators = tasks > 1 and chance.random() < 0.5
        self._first_tasks = chance.randint(1, tasks - 1) if has_two_iterators else tasks
        """Number of tasks of the first iterator; the second has the rest."""
        self._breaks_after = chance.choice((1, 1, 2, 3))
        """Batches after which the trainer breaks out of the first iterator, if there are two."""
        self._begun: set[int] = set()
        """Tasks that an episode of this life was begun for."""
        self._stopped: set[int] = set()
        """Rollouts of this life whose episode was cancelled because their group was given up."""
        self._made_of: dict[int, tuple[Trained, ...]] = {}
        """Version -> what its publisher had trained."""
        self._served: dict[int, tuple[Trained, ...]] = {}
        """The same of those that an engine has served."""
        self._had: dict[int, BatchRows] = {}
        """What the trainer had last by each batch number."""
        self._given_up: set[int] = set()
        """Groups of which a rollout was discarded, in any life."""
        self._refused: set[int] = set()
        """Rollouts with a turn that was refused for the engines lost with it, deadly or not."""
        self._refused_tasks: set[int] = set()
        """Tasks of such rollouts, which need not be trained."""
        self._is_selecting_anew = False
        """Whether an undone batch of this life had lost a group, so that later ones may differ."""
        self._last_groups: dict[int, int] = {}
        """Batch -> its last group."""
        waits = self._scenario.chance("how the trainer waits")
        self._patience_s: float | None = waits.choice((None, None, 0.03, 0.3))
        self._looks_after_s: float = waits.choice((0.0, 0.0, 0.01, 0.1))
        self._chance_of_looks = waits
        self._now_offer = 0
        """Which of its iterators the trainer takes tasks from now: 0 or 1."""
        self._taken_before: frozenset[int] = frozenset()
        """As :attr:`Checkpoint.taken_before`."""
        self._trained: tuple[Trained, ...] = ()
        """By the trainer that lives now, and before its checkpoint."""
        self._sent: dict[int, tuple[str, int]] = {}
        """Handle -> the engine and the session of the turn that was last sent under it."""
        self._done = False
        self.report = CrashRestartReport(scenario, is_drawn)

    def run(self) -> CrashRestartReport:
        """Run it to its end or its first broken promise."""
        try:
            with silent_log():
                run_in_virtual_time(self._main())
        except TimeoutError:
            said = f"no end after {self._scenario.longest_run_s:.0f} s of virtual time"
            self.report.failure = Failure(kind="stuck", message=said)
        except Exception as error:  # noqa: BLE001 - whatever it is, a promise is broken
            self.report.failure = failure_of(error)
        self.report.digest = self._tape.hexdigest()
        if self.report.failure is not None:
            planned = [f"planned: {fault}" for fault in self._scenario.faults]
            frames = map(str, self._tape.last)
            self.report.story = (f"scenario: {self._scenario.to_json()}", *planned, *frames)
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
        world = SimulationContext(loop, self._tape, buffer=self._buffer)
        self._episodes = SimulatedEpisodes(
            self._scenario, world, stopped=self._stopped, is_patient=True
        )
        router = world.router
        store = SimulatedStore(
            commit_s=self._chance.choice((0.0001, 0.002, 0.02)), chance=self._chance
        )
        self._hosts = engine_hosts(self._scenario, world, self._engine_ended)
        for host in self._hosts:
            host.start()
        async with asyncio.timeout(self._scenario.longest_run_s):
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
        self._stopped.clear()
        resume = None
        if self.report.lives > 1:
            resume = ev.Resumed(self._checkpoint.batches, offer=self._checkpoint.offer)
        core = self._core(store, on_broken, resume)
        journal = RunJournal(store, core, HEADER, is_threaded=False)
        journal.restore_position(store)
        if resume is not None:
            self._count_resume(core, resume)
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
        if self.report.lives < self._scenario.lives:
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

    def _core(
        self,
        store: SimulatedStore,
        on_broken: Callable[[BaseException], None],
        resume: ev.Resumed | None,
    ) -> Core:
        """Made again from what has survived, by two ways that must agree and must go on alike."""
        lived = self._lived_again(store, on_broken)
        saved = save(lived)
        loaded = self._loaded(saved, on_broken)
        replayed, again = (digest(each, is_replayed=True) for each in (lived, loaded))
        assert again == replayed, "a saved core is loaded in another state than replaying gives"
        if resume is not None:
            for core in (lived, loaded):
                core.handle(resume)
            replayed, again = (digest(each, is_replayed=True) for each in (lived, loaded))
            assert again == replayed, "a saved core is resumed as another one"
        is_loaded = self._chance.random() < 0.5
        if resume is not None:
            # Both have gone on by now, so the one to go on with is made once more.
            if is_loaded:
                loaded = self._loaded(saved, on_broken)
            else:
                lived = self._lived_again(store, on_broken)
        chosen = loaded if is_loaded else lived
        chosen.on_event = self._saw
        return chosen

    def _lived_again(
        self, store: SimulatedStore, on_broken: Callable[[BaseException], None]
    ) -> CrashRestartCore:
        """The last snapshot, and the events after it."""
        snapshot = store.snapshot()
        core = self._loaded(None if snapshot is None else snapshot.body, on_broken)
        for _, record in store.read():
            for command in replay(record, core)[1]:
                if isinstance(command, ev.Submit):
                    self._check_sent_again(command)
        return core

    def _loaded(
        self, saved: bytes | None, on_broken: Callable[[BaseException], None]
    ) -> CrashRestartCore:
        core = CrashRestartCore(self._scenario.settings.rules(), survives_crashes=True)
        core.on_event, core.on_broken = lambda *_: None, on_broken
        if saved is not None:
            load(saved, core)
        return core

    def _check_sent_again(self, submit: ev.Submit) -> None:
        sent, turn = self._sent[submit.message.turn], submit.message
        assert sent == (submit.engine, turn.session), (
            f"turn {turn.turn} was sent to {sent[0]} for session {sent[1]}; by the journal, to "
            f"{submit.engine} for session {turn.session}"
        )

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
            case ev.BatchReturned():
                self.report.batches_returned += 1
        for command in commands:
            match command:
                case ev.Submit(engine=engine, message=message):
                    self._sent[message.turn] = (engine, message.session)
                case ev.StopEpisode(rollout=rollout):
                    self._stopped.add(rollout.rollout_id)
                case ev.HandOver():
                    self._check_batch(command)
                    self.report.batches_handed += 1
                case ev.FailTurn(turn=turn) if self._scenario.deadly_turns:
                    self._refused.add(turn.rollout.root.rollout_id)
                case ev.Record(rollout=rollout, task=task):
                    if rollout.root.rollout_id in self._refused and isinstance(task, int):
                        self._refused_tasks.add(task)
                    self.report.discarded[rollout.discard_reason or "evaluated"] += 1
                    self._given_up.add(rollout.group_id)

    def _check_batch(self, batch: ev.HandOver) -> None:
        last = self._last_groups.get(batch.number - 1, -1)
        for group in batch.groups:
            is_next = group.group_id > last or not self._scenario.is_in_order
            assert is_next, "batches come in another order than before"
            last = group.group_id
        self._last_groups[batch.number] = last
        for rollout in (rollout for group in batch.groups for rollout in group.kept):
            for turn in rollout.turns:
                check_turn(turn, without_prefills=self._scenario.without_prefills)
                for span in turn.spans():
                    self._check_lineage(span.version)
            oldest, bound = rollout.oldest_trained_version, self._scenario.staleness_bound
            if oldest is not None and bound is not None:  # else all of it is masked
                assert 0 <= batch.trainer_version - oldest <= bound

    def _check_handed_again(self, batch: ev.HandOver) -> None:
        """A batch that was undone by a resume comes again, the same rollouts in the same order."""
        rows = tuple(
            (group.group_id, tuple(row.rollout_id for row in group.kept)) for group in batch.groups
        )
        before = self._had.get(batch.number, rows)
        if any(group_id in self._given_up for group_id, _ in before):
            self._is_selecting_anew = True
        assert rows == before or self._is_selecting_anew, (
            f"batch {batch.number} was {before}, and is {rows} after a resume"
        )
        if rows != before:  # those after it were undone for good
            self._had = {n: had for n, had in self._had.items() if n < batch.number}
        self._had[batch.number] = rows

    def _check_age(self, batch: ev.HandOver, trainer_version: int) -> None:
        """The train step begins under this version."""
        bound = self._scenario.staleness_bound
        for rollout in (rollout for group in batch.groups for rollout in group.kept):
            oldest = rollout.oldest_trained_version
            if oldest is not None and bound is not None:
                staleness = trainer_version - oldest
                assert staleness <= bound, f"trained at staleness {staleness}, not {bound}"

    def _check_lineage(self, version: int) -> None:
        """What is trained must have been sampled by weights that became the present ones."""
        made_of = self._served.get(version, ())
        now = self._trained[: len(made_of)]
        assert made_of == now, f"v{version} was made of {made_of}, but the trainer had {now}"

    def _check_end(self) -> None:
        trained = Counter(each.task for each in self._checkpoint.trained)
        for task in range(self._scenario.tasks):
            is_left = task < self._first_tasks and self._checkpoint.offer == 1
            is_left = is_left and task not in self._checkpoint.taken_before
            scripts = [
                self._scenario.script(task, index)
                for index in range(self._scenario.settings.staleness.group_size)
            ]
            must = all(script.failure is None for script in scripts)
            must = must and task not in self._refused_tasks
            must = must and not self._scenario.filters_groups and not is_left
            assert trained[task] <= 1, f"task {task} was trained {trained[task]} times"
            assert trained[task] == 1 or not must, f"task {task} was lost"

    # ------------------------------------------------------------ the trainer

    async def _train(self, scheduler: Scheduler) -> None:
        self._trained, batches = self._checkpoint.trained, self._checkpoint.batches
        left_out = self._checkpoint.left_out_tokens
        self._last_groups[batches] = self._checkpoint.last_group
        self._is_selecting_anew = False
        await scheduler.wait_for_engines(1)
        if self.report.lives > 1:
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.5)))  # it reads its checkpoint
            await self._publish(scheduler)
        self._now_offer, self._taken_before = self._checkpoint.offer, self._checkpoint.taken_before
        self._begun.clear()
        self._offer(scheduler, self._now_offer)
        async with asyncio.TaskGroup() as beside:
            batches, left_out = await self._train_on_all(scheduler, beside, batches, left_out)
        self._checkpoint = self._checkpoint_of(batches, left_out)
        self.report.left_out_tokens = left_out
        told = scheduler.core.ledger.discarded[LEFT_OUT]
        assert told == left_out, f"{told} tokens are left out, the trainer left {left_out}"

    def _checkpoint_of(self, batches: int, left_out: int) -> Checkpoint:
        last, offer = self._last_groups[batches], self._now_offer
        return Checkpoint(self._trained, batches, last, offer, self._taken_before, left_out)

    def _break_out(self, scheduler: Scheduler) -> None:
        """Leave the first iterator for the second."""
        self._now_offer, self._taken_before = 1, self._taken_of_first(scheduler)
        self._offer(scheduler, 1)

    async def _train_on_all(
        self, scheduler: Scheduler, beside: asyncio.TaskGroup, batches: int, left_out: int
    ) -> tuple[int, int]:
        """Until the tasks are used up; batches trained and tokens left out by then."""
        scenario = self._scenario
        has_two = self._first_tasks < scenario.tasks
        ahead: asyncio.Task[ev.HandOver | PublishNeeded | None] | None = None
        while True:
            if has_two and self._now_offer == 0 and batches >= self._breaks_after and ahead is None:
                self._break_out(scheduler)
            batch = await (self._asked(scheduler) if ahead is None else ahead)
            if isinstance(batch, PublishNeeded):
                if ahead is None:
                    await self._publish(scheduler)
                ahead = None  # it was asked for before the newest publish
                continue
            if batch is None and has_two and self._now_offer == 0:
                ahead = None
                self._break_out(scheduler)
                continue
            if batch is None:
                return batches, left_out
            assert batch.number == batches + 1
            self._check_handed_again(batch)
            if scenario.look_ahead:
                ahead = beside.create_task(self._asked(scheduler), name="look-ahead")
            self._check_age(batch, scheduler.core.trainer_version)
            await asyncio.sleep(scenario.train_s)
            batches = batch.number
            whole = [group.task for group in batch.groups if not group.is_rest]
            taken = [task for task in whole if isinstance(task, int)]
            self._trained += tuple(Trained(task, self.report.lives) for task in taken)
            left_out += await self._leave_rows_out(scheduler, batch)
            is_saved = batches % self._checkpoint_batches == 0
            if is_saved:
                self._checkpoint = self._checkpoint_of(batches, left_out)
            await self._publish(scheduler)
            if is_saved and self._chance.random() < 0.5:
                await scheduler.make_safe(batches, self._now_offer)

    def _offer(self, scheduler: Scheduler, offer: int) -> None:
        """Give one of the trainer's iterators, from its beginning."""
        first = range(self._first_tasks)
        tasks = first if offer == 0 else range(self._first_tasks, self._scenario.tasks)
        scheduler.offer(
            SlowTasks(tasks) if self._scenario.are_tasks_async else tasks, self._episode
        )

    def _taken_of_first(self, scheduler: Scheduler) -> frozenset[int]:
        """Tasks of the first iterator that the run has taken: breaking out must not lose them.

        Those that this life has begun are among them, whatever the run counts.
        """
        taken = {*range(scheduler.core.tasks.counts[0]), *self._begun}
        return frozenset(task for task in taken if task < self._first_tasks)

    async def _asked(self, scheduler: Scheduler) -> ev.HandOver | PublishNeeded | None:
        try:
            return await self._receive(scheduler)
        except PublishNeeded as error:
            return error

    async def _receive(self, scheduler: Scheduler) -> ev.HandOver | None:
        """The next batch; the trainer may stop waiting for it, and ask again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    return await receive(scheduler, self._looks_after_s, self._chance_of_looks)

    async def _leave_rows_out(self, scheduler: Scheduler, batch: ev.HandOver) -> int:
        """Don't train on some rows; so many tokens are in them."""
        rows = [row for group in batch.groups for row in group.kept]
        share = self._scenario.leaving_out
        chosen = [place for place in range(len(rows)) if share and self._chance.random() < share]
        await discarded_rows(batch.number, chosen, LEFT_OUT).report(scheduler)
        return sum(rows[place].sampled_tokens - rows[place].masked_tokens for place in chosen)

    async def _publish(self, scheduler: Scheduler) -> None:
        reserved = await scheduler.control.reserve()
        version = reserved.version
        update = self._buffer.begin(version, keep=reserved.keep, content=version)
        await asyncio.sleep(self._scenario.write_s)
        self._buffer.end(update)
        self._made_of[version] = self._trained
        await scheduler.control.publish(version, [update])

    async def _episode(self, episode: Episode, task: int) -> float:
        self._begun.add(task)
        mood = self._scenario.chance("mood", task, episode.index, self.report.lives)
        return await self._episodes.play(episode, task, mood)


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    """The process is gone: what its tasks still do reaches nobody."""
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.wait(tasks)


def simulate_lives(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> CrashRestartReport:
    """Run one seed, and say whether every promise was kept."""
    drawn = draw_scenario(seed, kinds - TRAINERS_FAULTS)
    return CrashRestartRun(msgspec.structs.replace(drawn, lives=LIVES_MAX), is_drawn=True).run()


def run_lives(scenario: Scenario) -> CrashRestartReport:
    """Run one scenario whose process dies, and say whether every promise was kept."""
    return CrashRestartRun(scenario).run()
