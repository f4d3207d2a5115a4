"""Runs of several orchestrator processes, one after another, in virtual time.

Base of crash-restart runs and of runs that train adapters. Orchestrator and trainers crash together
at any instant while the engines continue; the next process starts from the journal's committed
records and the trainers' last checkpoints. The journal is kept in memory, and its commits take
virtual time: a crash loses records that were appended and not committed.
"""

import asyncio
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.journal.reading import JournalSnapshot
from tidegate.orchestrator.journal.run_journal import JournalHeader, RunJournal
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.orchestrator.trainer.discarded_rows import discarded_rows
from tidegate.simulation.checks.invariants import CheckedCore
from tidegate.simulation.faults.scenario import Scenario
from tidegate.simulation.run.simulation import RunReport, SimulatedCluster

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


HEADER = JournalHeader(run_id="simulated", rules={}, seed=0)

DISCARD_REASON = "left_out"
"""Reason that trainers report for the rows that they discard."""


class AsyncTasks(AsyncIterator[int]):
    """Task iterator that takes time. A generator cut off by a crash would need a loop to close."""

    def __init__(self, tasks: range) -> None:
        self._tasks = iter(tasks)

    async def __anext__(self) -> int:
        await asyncio.sleep(0.01)
        for task in self._tasks:
            return task
        raise StopAsyncIteration


@dataclass(slots=True, kw_only=True)
class ProcessesReport(RunReport):
    """Report of one run of several processes."""

    processes: int = 0
    """Number of processes that the run has had."""


Report = TypeVar("Report", bound=ProcessesReport)


class RunOfProcesses(SimulatedCluster[Report]):
    """Run of one scenario, from its first process to its last."""

    core_class: type[CheckedCore] = CheckedCore
    commits_s: tuple[float, ...] = (0.0001, 0.002, 0.02)
    """Mean times of a journal commit, in seconds; a run draws one of them."""

    def __init__(self, scenario: Scenario, report: Report) -> None:
        super().__init__(scenario, report)
        self._chance = scenario.chance("lives")
        self._buffer = self._context.buffer
        self._sent: dict[int, tuple[str, int]] = {}
        """Handle -> (engine, session) of the turn that was last sent under the handle."""
        self._done = False

    async def _main(self) -> None:
        store = SimulatedStore(commit_s=self._chance.choice(self.commits_s), chance=self._chance)
        for host in self._hosts:
            host.start()
        longest_run_s = self._scenario.longest_run_s
        try:
            async with asyncio.timeout(longest_run_s):
                while not self._done:
                    self.report.processes += 1
                    await self._run_process(store)
                    if not self._done:
                        await self._stay_down()
        except TimeoutError:
            raise TimeoutError(f"no end after {longest_run_s:.0f} s of virtual time") from None
        self._check_end()

    # ------------------------------------------------------------ what a kind of run does

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

    async def _run_process(self, store: SimulatedStore) -> None:
        loop, failed = self._loop, self._failed
        self._begin_process()
        resume = self._resume_event() if self.report.processes > 1 else None
        core = self._core(store, resume)
        journal = RunJournal(store, core, HEADER, is_threaded=False)
        journal.restore_position(store)
        if resume is not None:
            self._on_resume(core, resume)
        scheduler = self._scheduler = self._make_scheduler(journal=journal, resume=resume)
        serving = loop.create_task(scheduler.run(), name="scheduler")
        trainer = loop.create_task(self._train(scheduler), name="trainer")
        crash_after_s = None
        if self.report.processes < self._scenario.processes_max:
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
            self._context.router.detach()
            self._done = trainer.done()
            await _cancel_all(serving, trainer)
            core.on_event = _refuse_late_event
        for future in (failed, serving, trainer):
            if future.done() and not future.cancelled():
                await future

    def _core(self, store: SimulatedStore, resume: ev.RunResumed | None) -> CheckedCore:
        """Restore the core by replay and from a saved state; both must agree, also after a resume.

        Return one of the two cores at random.
        """
        replayed = self._replayed_core(store)
        saved = save(replayed)
        loaded = self._loaded_core(saved)
        _check_equal(replayed, loaded, "")
        is_loaded = self._chance.random() < 0.5
        if resume is None:
            restored = loaded if is_loaded else replayed
        else:
            replayed.handle(resume)
            loaded.handle(resume)
            _check_equal(replayed, loaded, "after the resume, ")
            # Both cores have handled the resume, so the returned core is restored once more.
            restored = self._loaded_core(saved) if is_loaded else self._replayed_core(store)
        restored.on_event = self._check_event
        return restored

    def _replayed_core(self, store: SimulatedStore) -> CheckedCore:
        """Return a core made from the last snapshot and the events after the snapshot."""
        snapshot = store.snapshot()
        core = self._loaded_core(None if snapshot is None else snapshot.body)
        for _, record in store.read():
            for command in replay(record, core)[1]:
                if isinstance(command, ev.Submit):
                    self._check_sent_again(command)
        return core

    def _loaded_core(self, saved: bytes | None) -> CheckedCore:
        core = self.core_class(self._scenario.settings.rules(), survives_crashes=True)
        core.on_event, core.on_failure = lambda *_: None, self._fail
        if saved is not None:
            load(saved, core)
        return core

    def _check_sent_again(self, submit: ev.Submit) -> None:
        sent, turn = self._sent[submit.message.turn], submit.message
        assert sent == (submit.engine, turn.session), (
            f"turn {turn.turn} was sent to {sent[0]} for session {sent[1]}, but the journal says "
            f"{submit.engine} and session {turn.session}"
        )

    async def _stay_down(self) -> None:
        """Break the engines' connections and wait, without an orchestrator."""
        down_s = 0.05 + 0.3 * self._chance.expovariate(1.0)
        self._context.router.forget()
        for host in self._hosts:
            host.link.cut(down_s)
        await asyncio.sleep(down_s * self._chance.random())


def _refuse_late_event(event: ev.Event, _: list[ev.Command]) -> None:
    """Refuse an event after a process's end. The store would take it for the next process's."""
    raise AssertionError(f"{event} came from a process that has ended")


def _check_equal(replayed: Core, loaded: Core, when: str) -> None:
    assert digest(loaded, is_replayed=True) == digest(replayed, is_replayed=True), (
        f"{when}a core loaded from its saved state differs from the replayed one"
    )


async def _cancel_all(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.wait(tasks)


# ---------------------------------------------------------------- trainers that restart


def tasks_of(batch: ev.HandOver) -> list[int]:
    """Return the tasks that a batch is the first training of; a split group's remainder is not."""
    fresh = [group for group in batch.groups if group.use == 1]
    whole = [group.task for group in fresh if not group.is_split_remainder]
    return [task for task in whole if isinstance(task, int)]


async def discard_rows(
    trainer: TrainerSide, batch: ev.HandOver, share: float, chance: random.Random
) -> int:
    """Discard some rows of a batch; return the number of their unmasked tokens, without those that
    were trained before."""
    rows = [row for group in batch.groups for row in group.kept]
    discarded = [row for row in range(len(rows)) if share and chance.random() < share]
    await discarded_rows(batch.number, discarded, DISCARD_REASON).report(trainer)
    untrained = [rows[row] for row in discarded if rows[row].use == 1]
    return sum(row.sampled_tokens - row.masked_tokens for row in untrained)


def check_order(batch: ev.HandOver, last_group: int, scenario: Scenario) -> int:
    """Check the order of a batch's groups after ``last_group``; return the last of them."""
    for group in batch.groups:
        if group.use > 1:
            continue
        is_next = group.group_id > last_group or not scenario.is_in_order
        assert is_next, f"group {group.group_id} is handed over after group {last_group}"
        last_group = group.group_id
    return last_group


def check_staleness(batch: ev.HandOver, trainer_version: int, bound: int | None) -> None:
    """Check the age of a batch's trained tokens at a trainer version."""
    for rollout in (rollout for group in batch.groups for rollout in group.kept):
        oldest = rollout.oldest_trained_version
        if oldest is None or bound is None:  # all tokens are masked, or any age is allowed
            continue
        staleness = trainer_version - oldest
        assert 0 <= staleness <= bound, (
            f"rollout {rollout.rollout_id} is trained at staleness {staleness}, not at most {bound}"
        )


def check_tasks(
    scenario: Scenario,
    trained: Iterable[int],
    *,
    refused: Collection[int] = (),
    skipped: Collection[int] = (),
) -> None:
    """Check that each task was trained once, or dropped for a reason, after the last process.

    ``refused``: tasks of which a turn was refused. ``skipped``: tasks that the run never took.
    """
    times = Counter(trained)
    for task in range(scenario.tasks):
        scripts = [scenario.script(task, index) for index in range(scenario.group_size)]
        may_be_dropped = any(script.failure is not None for script in scripts)
        may_be_dropped |= task in refused or task in skipped or scenario.filters_groups
        assert times[task] <= 1, f"task {task} was trained {times[task]} times"
        assert times[task] == 1 or may_be_dropped, f"task {task} was lost"
