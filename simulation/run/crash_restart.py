"""Crash-restart runs: one seed, several processes of the same run, in virtual time.

Each trains the run's weights, and checks the batches of all processes against the trainer's
checkpoints.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from tidegate.errors import PublishNeeded
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.weight_content import Change, patch_elements, replace_all
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.simulation.checks.model import check_turn
from tidegate.simulation.faults.faults import ALL_FAULTS, FaultKind
from tidegate.simulation.faults.scenario import Scenario, draw_scenario
from tidegate.simulation.run.episodes import SimulatedEpisodes
from tidegate.simulation.run.processes import (
    DISCARD_REASON,
    AsyncTasks,
    ProcessesReport,
    RunOfProcesses,
    check_order,
    check_staleness,
    check_tasks,
    discard_rows,
    tasks_of,
)
from tidegate.simulation.run.trainer import receive


@dataclass(frozen=True, slots=True)
class TrainedTask:
    """One trained task, and the process that trained on it. Each process gives other weights."""

    task: int
    process: int


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """State of the trainer, as far as its checkpoint has it."""

    trained: tuple[TrainedTask, ...] = ()
    """Trained tasks, in the order of training."""
    batches: int = 0
    offer: int = 0
    """Index of the task iterator in use: 0 or 1."""
    taken_before: frozenset[int] = frozenset()
    """With iterator 1: the tasks that were taken from iterator 0 before the change."""
    discarded_tokens: int = 0
    """Number of sampled tokens in the rows that the trainer has discarded."""
    uses: Counter[int] = field(default_factory=Counter)
    """Group -> number of the trainer's uses of it, undone ones not included."""

    def copy(self) -> "TrainerState":
        """Return a copy that shares nothing that changes."""
        return replace(self, uses=self.uses.copy())


@dataclass(slots=True, kw_only=True)
class CrashRestartReport(ProcessesReport):
    """Report of one crash-restart run."""

    batches_repeated: int = 0
    """Number of batches handed over again, because the checkpoint did not include them."""
    batches_returned: int = 0
    """Number of handed-over batches that did not reach the trainer."""
    discarded_tokens: int = 0
    """Number of sampled tokens in the rows that the trainer has discarded, by its checkpoint."""
    reused_groups: int = 0
    """Number of groups that the trainer received again, to train on them once more."""
    rollbacks: int = 0
    """Number of resumes that found weights newer than the checkpoint."""


PROCESSES_MAX = 8
"""Most processes of a run whose scenario is drawn from its seed."""

TRAINER_FAULTS = {FaultKind.REFUSE, FaultKind.LAG, FaultKind.TRAINER}
"""Faults that these runs omit, because this trainer does not handle their errors."""

BatchRows = tuple[tuple[int, tuple[int, ...]], ...]
"""(group id, rollout ids of its rows) of each group of a batch, in order."""


class CrashRestartRun(RunOfProcesses[CrashRestartReport]):
    """Run of one scenario that trains the run's weights, from its first process to its last."""

    def __init__(self, scenario: Scenario, drawn_by: str | None = None) -> None:
        super().__init__(scenario, CrashRestartReport(scenario=scenario, drawn_by=drawn_by))
        self._checkpoint = TrainerState()
        self._now = self._checkpoint.copy()
        """State of the trainer in the current process."""
        self._checkpoint_batches = self._chance.choice((1, 1, 2, 4))
        chance = self._scenario.chance("offers")
        tasks = self._scenario.tasks
        has_two_iterators = tasks > 1 and chance.random() < 0.5
        self._first_tasks = chance.randint(1, tasks - 1) if has_two_iterators else tasks
        """Number of tasks of the first iterator; the second has the rest."""
        self._first_iterator_batches = chance.choice((1, 1, 2, 3))
        """Batches after which the trainer breaks out of the first iterator, if there are two."""
        self._begun_tasks: set[int] = set()
        """Tasks for which this process has begun an episode."""
        self._stopped: set[int] = set()
        """Rollouts of this process whose episode was cancelled because their group was dropped."""
        self._episodes = SimulatedEpisodes(
            scenario, self._context, stopped=self._stopped, is_patient=True
        )
        self._trained_by_version: dict[int, tuple[TrainedTask, ...]] = {}
        """Version -> the tasks that its publisher had trained on."""
        self._served_trained: dict[int, tuple[TrainedTask, ...]] = {}
        """:attr:`_trained_by_version` for the versions that an engine has served."""
        self._received_rows: dict[int, BatchRows] = {}
        """Batch number -> the rows that the trainer received last under that number."""
        self._reused_versions: dict[int, list[tuple[int, int]]] = {}
        """Batch -> (oldest, newest version) of each of its groups that was trained before."""
        self._first_lost_version: int | None = None
        """Oldest version that the last resume has lost; None if it has lost none."""
        self._discarded_groups: set[int] = set()
        """Groups of which any process has discarded a rollout."""
        self._refused_rollouts: set[int] = set()
        """Root rollouts of which a turn was refused, in scenarios with deadly turns."""
        self._refused_tasks: set[int] = set()
        """Tasks of refused rollouts, which need not be trained."""
        self._may_reselect = False
        """Whether a repeated batch of this process has lost a group, so later batches may differ
        from the earlier process's."""
        self._last_groups: dict[int, int] = {}
        """Batch -> the id of its last group."""
        waits = self._scenario.chance("how the trainer waits")
        self._batch_timeout_s: float | None = waits.choice((None, None, 0.03, 0.3))
        self._batch_poll_delay_s: float = waits.choice((0.0, 0.0, 0.01, 0.1))
        self._batch_poll_chance = waits
        self._unnamed: list[int] = []
        """Batches trained by the current process that no publish has named."""

    def _begin_process(self) -> None:
        self._stopped.clear()
        self._unnamed.clear()

    def _resume_event(self) -> ev.RunResumed:
        return ev.RunResumed(self._checkpoint.batches, offer=self._checkpoint.offer)

    def _on_resume(self, core: Core, resume: ev.RunResumed) -> None:
        self.report.batches_repeated += core.handed.count - resume.batches
        self._first_lost_version = core.handed.first_lost_version(resume.batches)
        self.report.rollbacks += self._first_lost_version is not None

    # ------------------------------------------------------------ checks

    def _check_event(self, event: ev.Event, commands: list[ev.Command]) -> None:
        super()._check_event(event, commands)
        match event:
            case ev.EngineSwapped(version=version) | ev.EngineJoined(weight_version=version):
                trained = self._trained_by_version.get(version, ())
                served = self._served_trained.setdefault(version, trained)
                assert served == trained, (
                    f"v{version} was served twice, trained on {served} and on {trained}"
                )
            case ev.BatchReturned():
                self.report.batches_returned += 1
        for command in commands:
            match command:
                case ev.StopEpisode(rollout=rollout):
                    self._stopped.add(rollout.rollout_id)
                case ev.HandOver():
                    self._check_batch(command)
                case ev.FailTurn(turn=turn) if self._scenario.deadly_turns:
                    self._refused_rollouts.add(turn.rollout.root.rollout_id)
                case ev.Record(rollout=rollout, task=task):
                    if rollout.root.rollout_id in self._refused_rollouts and isinstance(task, int):
                        self._refused_tasks.add(task)
                    self._discarded_groups.add(rollout.group_id)

    def _check_batch(self, batch: ev.HandOver) -> None:
        last = self._last_groups.get(batch.number - 1, -1)
        self._last_groups[batch.number] = check_order(batch, last, self._scenario)
        for rollout in (rollout for group in batch.groups for rollout in group.kept):
            for turn in rollout.turns:
                check_turn(turn, without_prefills=self._scenario.without_prefills)
                for span in turn.spans():
                    self._check_lineage(span.version)
        check_staleness(batch, batch.trainer_version, self._scenario.staleness_bound)

    def _check_handed_again(self, batch: ev.HandOver) -> None:
        """Check that a batch undone by a resume is repeated with the same rows, in order."""
        rows = tuple(
            (group.group_id, tuple(row.rollout_id for row in group.kept)) for group in batch.groups
        )
        number = batch.number
        earlier_rows = self._received_rows.get(number, rows)
        if any(group_id in self._discarded_groups for group_id, _ in earlier_rows):
            self._may_reselect = True
        if any(self._is_unusable(batch, *each) for each in self._reused_versions.get(number, ())):
            self._may_reselect = True
        assert rows == earlier_rows or self._may_reselect, (
            f"batch {number} was {earlier_rows}, and is {rows} after a resume"
        )
        if rows != earlier_rows:  # later batches of the earlier process are not repeated
            earlier = self._received_rows.items()
            self._received_rows = {at: received for at, received in earlier if at < number}
        self._received_rows[number] = rows
        self._reused_versions[number] = []
        for group in batch.groups:
            uses = self._now.uses
            uses[group.group_id] += 1
            assert group.use == uses[group.group_id] <= self._scenario.max_uses, (
                f"batch {number} has use {group.use} of group {group.group_id}, but the trainer "
                f"receives it for the {uses[group.group_id]}th time"
            )
            if group.use > 1:
                self.report.reused_groups += 1
                versions = [s.version for r in group.kept for t in r.turns for s in t.spans()]
                oldest, newest = min(versions, default=0), max(versions, default=0)
                self._reused_versions[number].append((oldest, newest))

    def _is_unusable(self, batch: ev.HandOver, oldest: int, newest: int) -> bool:
        """Return whether a used group may not be in this batch again: too old, or of a lost
        version."""
        bound, lost = self._scenario.staleness_bound, self._first_lost_version
        is_old = bound is not None and batch.trainer_version - oldest > bound
        return is_old or (lost is not None and newest >= lost)

    def _check_lineage(self, version: int) -> None:
        """Check that a version that sampled a token is an ancestor of the trainer's weights."""
        sampled_by = self._served_trained.get(version, ())
        trained = self._now.trained[: len(sampled_by)]
        assert sampled_by == trained, (
            f"v{version} was trained on {sampled_by}, but the trainer's weights on {trained}"
        )

    def _check_end(self) -> None:
        first = range(self._first_tasks if self._checkpoint.offer == 1 else 0)
        check_tasks(
            self._scenario,
            (each.task for each in self._checkpoint.trained),
            refused=self._refused_tasks,
            skipped={*first} - self._checkpoint.taken_before,
        )

    # ------------------------------------------------------------ the trainer

    async def _train(self, scheduler: Scheduler) -> None:
        self._now = self._checkpoint.copy()
        self._may_reselect = False
        await scheduler.wait_for_engines(1)
        if self.report.processes > 1:
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.5)))  # loads its checkpoint
            await self._publish(scheduler)
        self._begun_tasks.clear()
        self._offer(scheduler)
        async with asyncio.TaskGroup() as background:
            await self._train_on_all(scheduler, background)
        self._checkpoint = self._now.copy()
        self.report.discarded_tokens = discarded_tokens = self._now.discarded_tokens
        counted = scheduler.core.ledger.discarded[DISCARD_REASON]
        assert counted == discarded_tokens, (
            f"{counted} tokens are counted as discarded, but the trainer discarded "
            f"{discarded_tokens}"
        )

    def _start_second_iterator(self, scheduler: Scheduler) -> None:
        """Stop the first iterator of tasks, and offer the second."""
        self._now.offer, self._now.taken_before = 1, self._taken_of_first(scheduler)
        self._offer(scheduler)

    async def _train_on_all(self, scheduler: Scheduler, background: asyncio.TaskGroup) -> None:
        """Train until no tasks are left."""
        scenario = self._scenario
        requested: asyncio.Task[ev.HandOver | PublishNeeded | None] | None = None
        while True:
            is_first_of_two = self._first_tasks < scenario.tasks and self._now.offer == 0
            is_over = self._now.batches >= self._first_iterator_batches
            if is_first_of_two and is_over and requested is None:
                self._start_second_iterator(scheduler)
                is_first_of_two = False
            batch = await (self._request_batch(scheduler) if requested is None else requested)
            if isinstance(batch, PublishNeeded):
                if requested is None:
                    await self._publish(scheduler)
                requested = None  # the request was made before the newest publish
                continue
            if batch is None and is_first_of_two:
                requested = None
                self._start_second_iterator(scheduler)
                continue
            if batch is None:
                return
            assert batch.number == self._now.batches + 1
            self._check_handed_again(batch)
            if scenario.look_ahead:
                requested = background.create_task(
                    self._request_batch(scheduler), name="look-ahead"
                )
            check_staleness(batch, scheduler.core.trainer_version, scenario.staleness_bound)
            await asyncio.sleep(scenario.train_s)
            batches, process = batch.number, self.report.processes
            self._unnamed.append(batches)
            trained = tuple(TrainedTask(task, process) for task in tasks_of(batch))
            self._now.trained += trained
            self._now.batches = batches
            self._now.discarded_tokens += await discard_rows(
                scheduler.trainer, batch, scenario.discarded_rows, self._chance
            )
            if is_saved := batches % self._checkpoint_batches == 0:
                self._checkpoint = self._now.copy()
            if batches % scenario.batches_per_version == 0:
                await self._publish(scheduler)
            if is_saved and self._chance.random() < 0.5:
                await scheduler.trainer.mark_checkpointed(batches, self._now.offer)

    def _offer(self, scheduler: Scheduler) -> None:
        """Offer the trainer's present iterator of tasks, from its beginning."""
        is_first, first, end = self._now.offer == 0, self._first_tasks, self._scenario.tasks
        tasks = range(first) if is_first else range(first, end)
        scheduler.offer(
            AsyncTasks(tasks) if self._scenario.are_tasks_async else tasks, self._episode
        )

    def _taken_of_first(self, scheduler: Scheduler) -> frozenset[int]:
        """Return the tasks that the run has taken from the first iterator, so none may be lost.

        Tasks for which this process has begun an episode are included, whatever the run counts.
        """
        taken = {*range(scheduler.core.tasks.counts[0]), *self._begun_tasks}
        return frozenset(task for task in taken if task < self._first_tasks)

    async def _request_batch(self, scheduler: Scheduler) -> ev.HandOver | PublishNeeded | None:
        """Return the next batch; ask again after a timeout."""
        while True:
            try:
                async with asyncio.timeout(self._batch_timeout_s):
                    return await receive(
                        scheduler, self._batch_poll_delay_s, self._batch_poll_chance
                    )
            except TimeoutError:
                continue
            except PublishNeeded as error:
                return error

    async def _publish(self, scheduler: Scheduler) -> None:
        names = self._scenario.look_ahead or self._scenario.names_batches
        trainer = scheduler.trainer
        batches = trainer.batches_of_publish(tuple(self._unnamed) if names else None)
        reserved = await scheduler.control.reserve(has_deltas=self._scenario.patches)
        trainer.name_batches(batches)
        self._unnamed.clear()
        version, base_version = reserved.version, reserved.delta_base_version
        update = self._buffer.begin(
            version, keep=reserved.keep, content=version, patches_version=base_version
        )
        await asyncio.sleep(self._scenario.write_s)
        self._buffer.end(update)
        self._trained_by_version[version] = self._now.trained
        change: Change = replace_all
        if base_version is not None and self._buffer.is_patch(update):
            change = partial(patch_elements, base_version)
        await scheduler.control.publish(version, [update], "live", change)

    async def _episode(self, episode: Episode, task: int) -> float:
        self._begun_tasks.add(task)
        variation = self._scenario.chance("mood", task, episode.index, self.report.processes)
        return await self._episodes.play(episode, task, variation)


def simulate_crash_restarts(
    seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS
) -> CrashRestartReport:
    """Run one seed, and say whether every promise was kept."""
    drawn = draw_scenario(seed, kinds - TRAINER_FAULTS)
    scenario = msgspec.structs.replace(drawn, processes_max=PROCESSES_MAX)
    return CrashRestartRun(scenario, "--seeds 0 --crash-restart-runs 1").run()
