"""Runs of several orchestrator processes, one after another, in virtual time.

Base of crash-restart runs (:mod:`crash_restart`) and of runs that train adapters
(:mod:`adapter_runs`). Orchestrator and trainers crash together at any instant while the engines
continue; the next process starts from the journal's committed records and the trainers' last
checkpoints. The journal is kept in memory, and its commits take virtual time: a crash loses records
that were appended and not committed. Built on :mod:`simulation`'s parts and on
``orchestrator/journal/run_journal.py``.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.journal.reading import JournalSnapshot
from tidegate.orchestrator.journal.run_journal import JournalHeader, RunJournal
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.simulation.context import SimulationContext
from tidegate.simulation.host import EngineHost
from tidegate.simulation.invariants import CheckedCore
from tidegate.simulation.scenario import Scenario
from tidegate.simulation.simulation import (
    Failure,
    drain,
    empty_model_files,
    engine_hosts,
    failure_of,
    silent_log,
)
from tidegate.simulation.staging import WeightBuffer
from tidegate.simulation.virtual_time import VirtualLoop, run_in_virtual_time
from tidegate.simulation.wire import FrameLog, SimulatedRouter
from tidegate.transport.messages import InitWeights

STALLED_START_SHARE = 0.2
"""Share of processes whose first commit is slow."""

STALL_S = 0.3
"""Mean time of a slow first commit, in seconds: long enough for an engine to reconnect and to be
sent turns."""


class SimulatedStore:
    """In-memory stand-in for :class:`journal.Journal`, whose commits take virtual time."""

    def __init__(self, *, commit_s: float, chance: random.Random) -> None:
        self._commit_s = commit_s
        self._chance = chance
        self._records: list[tuple[int, bytes]] = []
        """(log sequence number, record) of each record after the snapshot."""
        self._snapshot: JournalSnapshot | None = None
        self._appended = self._committed = 0
        self._on_committed: Callable[[int], None] | None = None
        self._commit: asyncio.TimerHandle | None = None
        self._is_first = False
        """Whether the next commit is the first since :meth:`start`."""
        self.bytes_since_snapshot = 0

    def append(self, record: bytes) -> int:
        """Append a record, to be committed later; records appended after a crash are ignored."""
        if self._on_committed is None:
            return self._appended
        self._appended += 1
        self._records.append((self._appended, record))
        self.bytes_since_snapshot += len(record)
        if self._commit is None:
            self._begin_commit()
        return self._appended

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Replace the records up to ``lsn`` with a snapshot, at once."""
        assert lsn == self._appended
        self._committed = lsn
        self._snapshot = JournalSnapshot(lsn, snapshot)
        self._records.clear()
        self.bytes_since_snapshot = 0

    def start(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Accept records from now on, for a new process."""
        self._on_committed = on_committed
        self._is_first = True

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over the records after the snapshot."""
        return iter(list(self._records))

    def snapshot(self) -> JournalSnapshot | None:
        """Return the newest snapshot, or None if none was made."""
        return self._snapshot

    def crash(self) -> None:
        """Discard the records that are not committed, as the end of the process does."""
        self._on_committed = None
        if self._commit is not None:
            self._commit.cancel()
            self._commit = None
        self._records = [(lsn, record) for lsn, record in self._records if lsn <= self._committed]
        self._appended = self._committed

    def _begin_commit(self) -> None:
        is_stalled = self._is_first and self._chance.random() < STALLED_START_SHARE
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


HEADER = JournalHeader(
    run_id="simulated",
    rules={},
    seed=0,
)


class AsyncTasks(AsyncIterator[int]):
    """Task iterator that takes time. A generator cut off by a crash would need a loop to close."""

    def __init__(self, tasks: range) -> None:
        self._tasks = iter(tasks)

    async def __anext__(self) -> int:
        await asyncio.sleep(0.01)
        for task in self._tasks:
            return task
        raise StopAsyncIteration


@dataclass(slots=True)
class ProcessesReport:
    """Report of one run of several processes."""

    scenario: Scenario
    is_drawn: bool = True
    """Whether the scenario was drawn from its seed, with all faults."""
    failure: Failure | None = None
    """First failure of the run; None if every invariant held."""
    processes: int = 0
    """Number of processes that the run has had."""
    digest: str = ""
    """Hash of all frames of the run, equal in each run of a scenario."""
    story: tuple[str, ...] = field(default=(), repr=False)
    """Scenario, planned faults and last frames of a failed run; empty for other runs."""

    @property
    def seed(self) -> int:
        """Seed of the scenario."""
        return self.scenario.seed

    @property
    def replay_command(self) -> str:
        """Shell command that repeats the run."""
        if self.is_drawn:
            return f"tidegate simulate --first-seed {self.seed} --seeds 0 {self._option} 1"
        return f"tidegate simulate --replay '{self.scenario.to_json()}'"

    @property
    def _option(self) -> str:
        """Option of ``tidegate simulate`` that makes runs of this kind."""
        raise NotImplementedError


class RunOfProcesses(ABC):
    """Run of one scenario, from its first process to its last."""

    core_class: type[CheckedCore] = CheckedCore
    commits_s: tuple[float, ...] = (0.0001, 0.002, 0.02)
    """Mean times of a commit of the journal, one of which a run draws, in seconds."""

    def __init__(self, scenario: Scenario, report: ProcessesReport) -> None:
        self._scenario = scenario
        self._chance = scenario.chance("lives")
        self._frame_log = FrameLog()
        self._hosts: list[EngineHost] = []
        self._buffer = WeightBuffer()
        self._scheduler: Scheduler | None = None
        self._sent: dict[int, tuple[str, int]] = {}
        """Handle -> (engine, session) of the turn that was last sent under the handle."""
        self._done = False
        self._report = report

    def _run(self) -> None:
        """Run the scenario to its end or its first failure, and fill in the report."""
        report = self._report
        try:
            with silent_log():
                run_in_virtual_time(self._main())
        except TimeoutError:
            message = f"no end after {self._scenario.longest_run_s:.0f} s of virtual time"
            report.failure = Failure(kind="stuck", message=message)
        except Exception as error:  # noqa: BLE001 - any error is a failure of the run
            report.failure = failure_of(error)
        report.digest = self._frame_log.hexdigest()
        if report.failure is not None:
            planned = [f"planned: {fault}" for fault in self._scenario.faults]
            frames = map(str, self._frame_log.last)
            report.story = (f"scenario: {self._scenario.to_json()}", *planned, *frames)

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        failed: asyncio.Future[None] = loop.create_future()

        def on_failure(error: BaseException) -> None:
            if not failed.done():
                failed.set_exception(error)

        loop.set_exception_handler(
            lambda _, context: on_failure(context.get("exception", AssertionError(str(context))))
        )
        self._buffer.forget()
        context = SimulationContext(loop, self._frame_log, buffer=self._buffer)
        self._begin(context)
        router = context.router
        store = SimulatedStore(commit_s=self._chance.choice(self.commits_s), chance=self._chance)
        self._hosts = engine_hosts(
            self._scenario,
            context,
            self._engine_ended,
            lambda engine, within_s: drain(self._scheduler, engine, within_s),
        )
        for host in self._hosts:
            host.start()
        async with asyncio.timeout(self._scenario.longest_run_s):
            while not self._done:
                self._report.processes += 1
                await self._run_process(router, store, failed, on_failure)
                if not self._done:
                    await self._stay_down(router)
        self._check_end()

    def _engine_ended(self, name: str, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.engines.ended(name, why)

    # ------------------------------------------------------------ what a kind of run does

    @abstractmethod
    def _begin(self, context: SimulationContext) -> None:
        """Prepare the run, before its engines start."""

    @abstractmethod
    def _begin_process(self) -> None:
        """Prepare the trainers for another process."""

    @abstractmethod
    def _resume_event(self) -> ev.RunResumed:
        """Return the event by which a process continues from the trainers' checkpoints."""

    @abstractmethod
    def _on_resume(self, core: Core, resume: ev.RunResumed) -> None:
        """Note a resume, with the core that has handled it."""

    @abstractmethod
    async def _train(self, scheduler: Scheduler) -> None:
        """Train until no tasks are left, in one process."""

    def _check_event(self, event: ev.Event, commands: list[ev.Command]) -> None:
        """Check one event and the core's commands for it."""
        for command in commands:
            if isinstance(command, ev.Submit):
                self._sent[command.message.turn] = (command.engine, command.message.session)

    @abstractmethod
    def _check_end(self) -> None:
        """Check that nothing was lost over all processes."""

    # ------------------------------------------------------------ one process

    async def _run_process(
        self,
        router: SimulatedRouter,
        store: SimulatedStore,
        failed: "asyncio.Future[None]",
        on_failure: Callable[[BaseException], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._begin_process()
        resume = self._resume_event() if self._report.processes > 1 else None
        core = self._core(store, on_failure, resume)
        journal = RunJournal(store, core, HEADER, is_threaded=False)
        journal.restore_position(store)
        if resume is not None:
            self._on_resume(core, resume)
        scheduler = Scheduler(
            self._scenario.settings,
            empty_model_files(),
            router,
            InitWeights(channel="shm"),
            recorder=None,
            journal=journal,
            resume=resume,
        )
        self._scheduler = scheduler
        serving = loop.create_task(scheduler.run(), name="scheduler")
        trainer = loop.create_task(self._train(scheduler), name="trainer")
        crash_after_s = None
        if self._report.processes < self._scenario.processes_max:
            crash_after_s = self._chance.choice((0.1, 0.5, 2.0)) * self._chance.expovariate(1.0)
        try:
            await asyncio.wait(
                (serving, trainer, failed),
                timeout=crash_after_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._scheduler = None
            store.crash()
            router.detach()
            self._done = trainer.done()
            await _cancel_all(serving, trainer)
        for future in (failed, serving, trainer):
            if future.done() and not future.cancelled():
                await future

    def _core(
        self,
        store: SimulatedStore,
        on_failure: Callable[[BaseException], None],
        resume: ev.RunResumed | None,
    ) -> Core:
        """Restore the core by replay and from a saved state; both must agree, also after a resume.

        Return one of the two cores at random.
        """
        replayed_core = self._replayed_core(store, on_failure)
        saved = save(replayed_core)
        loaded_core = self._loaded_core(saved, on_failure)
        replayed_digest, loaded_digest = (
            digest(each, is_replayed=True) for each in (replayed_core, loaded_core)
        )
        assert loaded_digest == replayed_digest, (
            "a core loaded from its saved state differs from the replayed core"
        )
        if resume is not None:
            for core in (replayed_core, loaded_core):
                core.handle(resume)
            replayed_digest, loaded_digest = (
                digest(each, is_replayed=True) for each in (replayed_core, loaded_core)
            )
            assert loaded_digest == replayed_digest, (
                "after the resume, a core loaded from its saved state differs from the replayed one"
            )
        is_loaded = self._chance.random() < 0.5
        if resume is not None:
            # Both cores have handled the resume, so the returned core is restored once more.
            if is_loaded:
                loaded_core = self._loaded_core(saved, on_failure)
            else:
                replayed_core = self._replayed_core(store, on_failure)
        restored = loaded_core if is_loaded else replayed_core
        restored.on_event = self._check_event
        return restored

    def _replayed_core(
        self, store: SimulatedStore, on_failure: Callable[[BaseException], None]
    ) -> CheckedCore:
        """Return a core made from the last snapshot and the events after the snapshot."""
        snapshot = store.snapshot()
        core = self._loaded_core(None if snapshot is None else snapshot.body, on_failure)
        for _, record in store.read():
            for command in replay(record, core)[1]:
                if isinstance(command, ev.Submit):
                    self._check_sent_again(command)
        return core

    def _loaded_core(
        self, saved: bytes | None, on_failure: Callable[[BaseException], None]
    ) -> CheckedCore:
        core = self.core_class(self._scenario.settings.rules(), survives_crashes=True)
        core.on_event, core.on_failure = lambda *_: None, on_failure
        if saved is not None:
            load(saved, core)
        return core

    def _check_sent_again(self, submit: ev.Submit) -> None:
        sent, turn = self._sent[submit.message.turn], submit.message
        assert sent == (submit.engine, turn.session), (
            f"turn {turn.turn} was sent to {sent[0]} for session {sent[1]}, but the journal says "
            f"{submit.engine} and session {turn.session}"
        )

    async def _stay_down(self, router: SimulatedRouter) -> None:
        """Break the engines' connections and wait, without an orchestrator."""
        down_s = 0.05 + 0.3 * self._chance.expovariate(1.0)
        router.forget()
        for host in self._hosts:
            host.link.cut(down_s)
        await asyncio.sleep(down_s * self._chance.random())


async def _cancel_all(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks that are not done, and wait until they have ended."""
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.wait(tasks)
