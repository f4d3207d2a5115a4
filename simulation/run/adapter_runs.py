"""Runs that train several adapters on one base, with injected faults and crashes, in virtual time.

Each adapter has a trainer with rules, tasks, versions and checkpoints of its own. After every event
:class:`IsolationCheckedCore` checks that nothing of one adapter has changed another's state; each
:class:`SimulatedAdapterTrainer` checks its batches, and computes every token again with the weights
that the token's tag names.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tidegate.errors import EngineLagging, PublishNeeded, WeightsRefused
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import ROLLOUT_EVENTS, Core
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.invariants import MASKING, CheckedCore
from tidegate.simulation.checks.model import check_turn
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.faults.faults import ALL_FAULTS, FaultKind
from tidegate.simulation.faults.scenario import Scenario, draw_habits, draw_rules, draw_scenario
from tidegate.simulation.run.episodes import SimulatedEpisodes
from tidegate.simulation.run.processes import (
    AsyncTasks,
    ProcessesReport,
    RunOfProcesses,
    check_order,
    check_staleness,
    check_tasks,
    discard_rows,
    tasks_of,
)
from tidegate.transport.messages import PAUSE_MODES, UpdateWeights

PROCESSES_MAX = 4
"""Most processes of a drawn run that crashes; half of the drawn runs do not crash."""

BASE_EVALUATIONS_MAX = 3
"""Most evaluations of the run's own weights beside the adapters' training."""

PUBLISH_TRIES_MAX = 20
"""Number of failed publishes in a row after which the simulation reports a bug. A run's faults
alone can't make so many publishes fail."""

UNUSED_FAULTS = {FaultKind.TRAINER}
"""Faults whose settings are for the trainer of a run's weights. Adapters' trainers draw their
own."""

FAULTS_WITHOUT_CRASHES = {FaultKind.REFUSE}
"""Faults that are not injected in runs that crash. If an engine refuses a trainer's weights, the
trainer must train on to get others. A resumed trainer can't do so: it must publish the weights of
its checkpoint."""


# ---------------------------------------------------------------- scenario


def adapter_name(number: int) -> str:
    """Return a simulated adapter's name."""
    return f"adapter-{number}"


def draw_adapter_scenario(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> Scenario:
    """Draw a scenario that trains adapters; its own tasks are evaluations of the base."""
    chance = random.Random(f"{seed}/adapters")
    adapters, processes_max = chance.choice((1, 2, 2, 3)), chance.choice((1, PROCESSES_MAX))
    unused = UNUSED_FAULTS | (FAULTS_WITHOUT_CRASHES if processes_max > 1 else set())
    drawn = draw_scenario(seed, kinds - unused)
    return msgspec.structs.replace(
        drawn,
        adapters=adapters,
        adapters_max=chance.choice((1, 2, 2, 8)),
        processes_max=processes_max,
        cancelled_publishes=chance.choice((0.0, 0.0, 0.3)),
        pausing=chance.choice((0.0, 0.0, 0.3)),
        deadly_turns=0.0,
        evaluation_engines=0,
        patches=False,
        look_ahead=0,
    )


def scenario_of_adapter(run: Scenario, number: int) -> Scenario:
    """Return the rules, tasks and habits of one adapter: drawn for it, on the run's engines."""
    chance = run.chance("adapter", number)
    groups_per_batch = chance.choice((1, 1, 2, 3))
    plain = msgspec.structs.replace(
        run,
        **draw_habits(chance),
        seed=chance.getrandbits(32),
        max_staleness=chance.choice((0, 1, 2, 4)),
        group_size=chance.choice((1, 2, 3)),
        groups_per_batch=groups_per_batch,
        outstanding_groups_limit=None,
        tasks=chance.randint(1, 4) * groups_per_batch + chance.randint(0, 1),
        are_tasks_async=chance.random() < 0.3,
        train_s=chance.choice((0.0, 0.05, 0.3)),
        discarded_rows=chance.choice((0.0, 0.0, 0.3)),
        names_batches=run.chance("names", number).random() < 0.5,
    )
    kept = {"placement", "engines_per_update_wave", "publish_wait", "pausing"}
    rules = {name: value for name, value in draw_rules(plain).items() if name not in kept}
    return msgspec.structs.replace(plain, **rules)


# ---------------------------------------------------------------- isolation


def _fingerprint(core: Core) -> tuple[object, ...]:
    """Return what only an adapter's own events may change."""
    versions, ledger = core.versions, core.ledger
    return (
        core.trainer_version,
        core.adapters.get(core.adapter, 0),
        versions.live_version,
        (ledger.generated, ledger.trained, ledger.buffered, ledger.in_flight),
        core.outstanding_groups,
        core.buffered_groups,
        core.handed.count,
        tuple(core.handed.requests),
        core.handed.offer,
        tuple(core.handed.held),
        core.is_halted,
        core.is_paused,
    )


class IsolationCheckedCore(CheckedCore):
    """Core that checks after each event of one adapter that the others are as before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owners: dict[int, str] = {}
        """Handle -> adapter of the turn that was sent under it; empty: the base."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Handle the event as :meth:`CheckedCore.handle` does, and check the other adapters."""
        adapter = self._adapter_of(event)
        if adapter is None:
            return super().handle(event)
        others = [core for name, core in self.trained_adapters.items() if name != adapter]
        before = [_fingerprint(core) for core in others]
        commands = super().handle(event)
        try:
            for core, fingerprint in zip(others, before, strict=True):
                now = _fingerprint(core)
                assert now == fingerprint, (
                    f"{type(event).__name__} of {adapter or 'the base'} has changed "
                    f"{core.adapter}: {fingerprint} before, {now} now"
                )
            for command in commands:
                if isinstance(command, ev.Submit):
                    self._owners[command.message.turn] = command.message.sampling.adapter
                self._check_command(command, adapter, event)
        except AssertionError as error:
            self.on_failure(error)
            raise
        return commands

    def _adapter_of(self, event: ev.Event) -> str | None:
        """Return the adapter that an event is about; empty: the base; None: the whole run."""
        match event:
            case ev.ForAdapter(adapter=adapter) | ev.StepArrived(adapter=adapter):
                return adapter
            case ev.AdapterReleased(name=name) | ev.AdapterServed(name=name):
                return name
        if isinstance(event, ROLLOUT_EVENTS):
            tracker = self.groups.numbers.tracker_of.get(event.rollout_id)
            return "" if tracker is None else tracker.adapter
        return None

    def _check_command(self, command: ev.Command, adapter: str, event: ev.Event) -> None:
        """Check that a command ends or hands over nothing of another adapter."""
        match command:
            case ev.EndTurns(turns=turns):
                owners = {turn.rollout.adapter for turn in turns}
            case ev.FailTurn(turn=turn):
                owners = {turn.rollout.adapter}
            case ev.StopEpisode(rollout=rollout) | ev.StartEpisode(rollout=rollout):
                owners = {rollout.adapter}
            case ev.HandOver(adapter=owner) | ev.EndBatches(adapter=owner):
                owners = {owner}
            case ev.RefuseBatch(adapter=owner) | ev.RequeueTask(adapter=owner):
                owners = {owner}
            case ev.LoseBatch(adapter=owner):
                owners = {owner}
            case ev.Cancel(handle=handle) if not isinstance(event, ev.StepArrived):
                owners = {self._owners.get(handle, adapter)}
            case _:
                return
        assert owners <= {adapter}, (
            f"{type(event).__name__} of {adapter or 'the base'} led to {type(command).__name__} of "
            f"{sorted(owners)}"
        )


# ---------------------------------------------------------------- trainers


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """Checkpoint of one adapter's trainer, as far as a resume needs it."""

    trained: tuple[tuple[int, int], ...] = ()
    """(task, process) of the trained tasks, in order: the lineage of the adapter's weights."""
    batches: int = 0


class ServedAdapter:
    """Versions of one adapter that engines serve, as they have reported to the present process."""

    def __init__(self) -> None:
        self._released = 0
        self._live = 0
        """Version that no engine may fall behind any more: each engine serves it or a newer one.
        Never decreases."""
        self._older: dict[str, int] = {}
        """Engine -> older version than the released one that it may still serve."""

    def release(self, version: int, engines: Collection[str]) -> None:
        """Record that ``version`` is released to ``engines``. Each engine serves the previous
        version until it reports that it has swapped the new one in."""
        if self._released:
            self._older = dict.fromkeys(engines, self._released) | self._older
        self._released = version
        self._raise_live()

    def serve(self, engine: str, version: int) -> None:
        """Record the version that an engine serves now."""
        self._older.pop(engine, None)
        if version < self._released:
            self._older[engine] = version
        self._raise_live()

    def leave(self, engine: str) -> None:
        """Forget an engine, which loads the newest version if it comes back without one."""
        self._older.pop(engine, None)
        self._raise_live()

    def _raise_live(self) -> None:
        self._live = max(self._live, min([self._released, *self._older.values()]))

    def check_submit(self, engine: str) -> None:
        """Check that an engine that gets a turn serves the live version at least."""
        version = self._older.get(engine, self._released)
        assert version >= self._live, (
            f"{engine}, which serves v{version} of an adapter, got a turn of it while "
            f"v{self._live} is live everywhere"
        )


class SimulatedAdapterTrainer:
    """Trainer of one adapter over all processes of a run, and the oracle of its batches."""

    def __init__(self, run: "AdapterRun", number: int, context: SimulationContext) -> None:
        self.name = adapter_name(number)
        self.scenario = scenario_of_adapter(run.scenario, number)
        self._run = run
        self._context = context
        self._chance = self.scenario.chance("trainer")
        self._discard_chance = self.scenario.chance("left out")
        self.stopped: set[int] = set()
        """Rollouts of this process whose episode was cancelled because their group was dropped."""
        self._episodes = SimulatedEpisodes(
            self.scenario, context, stopped=self.stopped, is_patient=True
        )
        self.checkpoint = AdapterCheckpoint()
        self._trained: tuple[tuple[int, int], ...] = ()
        """Lineage of the trainer's weights in this process."""
        self._contents: dict[tuple[tuple[int, int], ...], int] = {}
        """Lineage -> content of these weights: the same tensors whenever they are published."""
        self._lineages: dict[int, tuple[tuple[int, int], ...]] = {}
        """Content -> the lineage of these weights."""
        self._unnamed: list[int] = []
        """Batches of this process that the weights were made from and that no publish has named."""
        self._checkpoint_batches = self._chance.choice((1, 1, 2))
        self._last_group = -1
        self.served = ServedAdapter()
        self.activity = "not started"

    # ------------------------------------------------------------ training

    def begin_process(self) -> None:
        """Return to the checkpoint, in another process."""
        self.stopped.clear()
        self.served = ServedAdapter()
        self._trained = self.checkpoint.trained
        self._unnamed.clear()
        self._last_group = -1

    async def train(self, scheduler: Scheduler) -> None:
        """Train until the adapter's tasks are used up."""
        await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.1, 0.5)))
        known = scheduler.core.trained_adapters.get(self.name)
        if known is None:
            await scheduler.train_adapter(self.name, self.scenario.settings.rules())
        else:
            self._context.coverage.add(CoverageMark.ADAPTER_RESUMED)
        await self._publish(scheduler)
        tasks = range(self.scenario.tasks)
        offered = AsyncTasks(tasks) if self.scenario.are_tasks_async else tasks
        scheduler.offer(offered, self._play, self.name)
        batches = self.checkpoint.batches
        while (batch := await self._next_batch(scheduler)) is not None:
            assert batch.number == batches + 1, f"batch {batch.number} after batch {batches}"
            trainer_version = scheduler.core.of(self.name).trainer_version
            check_staleness(batch, trainer_version, self.scenario.staleness_bound)
            await self._pause_and_train(scheduler)
            batches = batch.number
            self._unnamed.append(batches)
            self._trained += tuple((task, self._run.report.processes) for task in tasks_of(batch))
            trainer, share = scheduler.trainers[self.name], self.scenario.discarded_rows
            await discard_rows(trainer, batch, share, self._discard_chance)
            if is_saved := batches % self._checkpoint_batches == 0:
                self.checkpoint = AdapterCheckpoint(self._trained, batches)
            await self._publish(scheduler)
            if is_saved and self._chance.random() < 0.5:
                await scheduler.trainers[self.name].mark_checkpointed(batches, 0)
            await self._evaluate(scheduler)
        self.checkpoint = AdapterCheckpoint(self._trained, batches)
        self.activity = "done"
        ledger = scheduler.core.of(self.name).ledger
        assert ledger.in_flight == ledger.buffered == 0, ledger.snapshot()

    async def _next_batch(self, scheduler: Scheduler) -> ev.HandOver | None:
        while True:
            self.activity = "waiting for a batch"
            try:
                return await scheduler.trainers[self.name].next_batch()
            except PublishNeeded:
                await self._publish(scheduler)

    async def _pause_and_train(self, scheduler: Scheduler) -> None:
        self.activity = "training"
        pauses = self._chance.random() < self.scenario.pausing
        if pauses:
            self._context.coverage.add(CoverageMark.ADAPTER_HALTED)
            scheduler.halt_adapter(self.name, True)
        await asyncio.sleep(self.scenario.train_s)
        if pauses:
            scheduler.halt_adapter(self.name, False)

    async def _evaluate(self, scheduler: Scheduler) -> None:
        if not self.scenario.evaluation_tasks or self._chance.random() < 0.5:
            return
        self.activity = "evaluating"
        rollouts = await scheduler.evaluate([-1], self._play, adapter=self.name)
        for turn in _ended_turns(rollouts):
            self._check_turn(turn.sampling.adapter)
            check_turn(turn, self._content_of, without_prefills=self._without_prefills)

    async def _publish(self, scheduler: Scheduler) -> None:
        """Publish the trainer's weights until the engines serve them."""
        for _ in range(PUBLISH_TRIES_MAX):
            self.activity = "publishing"
            is_cancelled = self._chance.random() < self.scenario.cancelled_publishes
            try:
                async with asyncio.timeout(0.3 * self._chance.random() if is_cancelled else None):
                    await self._run.publish(
                        scheduler, self.name, self._content(), self._name_batches(scheduler)
                    )
            except WeightsRefused:
                # An engine refuses the same weights again: these become others by training on.
                self._trained += ((-1, len(self._trained)),)
            except EngineLagging:
                pass
            except TimeoutError:
                self._context.coverage.add(CoverageMark.CANCELLED_PUBLISH)
            else:
                return
        raise AssertionError(f"{PUBLISH_TRIES_MAX} publishes of {self.name} failed in a row")

    def _name_batches(self, scheduler: Scheduler) -> Callable[[], None]:
        """Return what names the weights' batches, as :meth:`AdapterTrainer.publish`."""
        side = scheduler.trainers[self.name]
        told = tuple(self._unnamed) if self.scenario.names_batches else None
        batches = side.batches_of_publish(told)

        def name_batches() -> None:
            side.name_batches(batches)
            self._unnamed.clear()

        return name_batches

    def _content(self) -> int:
        content = self._contents.setdefault(self._trained, self._run.next_content())
        self._lineages[content] = self._trained
        return content

    async def _play(self, episode: Episode, task: int) -> float:
        variation = self.scenario.chance("mood", task, episode.index, self._run.report.processes)
        return await self._episodes.play(episode, task, variation)

    # ------------------------------------------------------------ checks

    @property
    def _without_prefills(self) -> tuple[str, ...]:
        return self._run.scenario.without_prefills

    def _content_of(self, version: int) -> int:
        content = self._context.ground_truth.adapter_contents.get((self.name, version))
        assert content is not None, f"no engine has sampled by {self.name} v{version}"
        return content

    def check_batch(self, batch: ev.HandOver) -> None:
        """Check a batch that is handed over to this trainer."""
        scenario = self.scenario
        oldest_trainable = 0
        if scenario.policy == "bounded" and scenario.deadline_policy in MASKING:
            oldest_trainable = max(0, batch.trainer_version - scenario.max_staleness)
        assert batch.oldest_trainable == oldest_trainable
        slots = sum(not group.is_split_remainder for group in batch.groups)
        assert len(batch.groups) > 0
        assert slots <= scenario.groups_per_batch
        self._last_group = check_order(batch, self._last_group, scenario)
        for group in batch.groups:
            for rollout in group.kept:
                assert rollout.adapter == self.name, f"a rollout of {rollout.adapter!r} came"
                assert isinstance(group.task, int)
                script = scenario.script(group.task, rollout.index)
                assert script.failure is not None or rollout.reward == script.reward, (
                    f"task {group.task} is trained with reward {rollout.reward}, but its episode "
                    f"would return {script.reward}"
                )
                for turn in rollout.turns:
                    self._check_turn(turn.sampling.adapter)
                    check_turn(turn, self._content_of, without_prefills=self._without_prefills)
                    for span in turn.spans():
                        self._check_lineage(span.version)
        check_staleness(batch, batch.trainer_version, scenario.staleness_bound)

    def _check_turn(self, adapter: str) -> None:
        assert adapter == self.name, f"a turn of {self.name} was sampled by {adapter!r}"

    def _check_lineage(self, version: int) -> None:
        sampled_by = self._lineages[self._content_of(version)]
        assert self._trained[: len(sampled_by)] == sampled_by, (
            f"{self.name} v{version} was trained on {sampled_by}, but the trainer's weights on "
            f"{self._trained}"
        )

    def check_end(self) -> None:
        """Check that each task was trained once, or dropped for a reason."""
        check_tasks(self.scenario, (task for task, _ in self.checkpoint.trained))


def _ended_turns(rollouts: list[Rollout]) -> list[Turn]:
    """Return the turns that have reached their end; others may have been refused."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return [turn for turn in turns if turn.finish_reason in ("stop", "length")]


# ---------------------------------------------------------------- runs


@dataclass(slots=True, kw_only=True)
class AdapterRunReport(ProcessesReport):
    """Report of one run that trains adapters."""

    trained_tasks: int = 0
    """Number of tasks trained, over all adapters."""


class AdapterRun(RunOfProcesses[AdapterRunReport]):
    """Run of one scenario that trains adapters, from its first process to its last."""

    core_class = IsolationCheckedCore
    commits_s = (0.0001, 0.02, 0.2)  # so that some processes end before a release is committed

    def __init__(self, scenario: Scenario, drawn_by: str | None = None) -> None:
        super().__init__(scenario, AdapterRunReport(scenario=scenario, drawn_by=drawn_by))
        self.scenario = scenario
        self._contents = 0
        self._base_episodes = SimulatedEpisodes(
            scenario, self._context, stopped=frozenset(), is_patient=True
        )
        numbers = range(scenario.adapters)
        trainers = [SimulatedAdapterTrainer(self, number, self._context) for number in numbers]
        self._trainers = {each.name: each for each in trainers}
        self._engines: set[str] = set()
        """Engines that have joined the present process."""

    def _results(self) -> tuple[object, ...]:
        trained = (each.checkpoint.trained for each in self._trainers.values())
        self.report.trained_tasks = sum(task >= 0 for tasks in trained for task, _ in tasks)
        return ()

    def _activities(self) -> Iterable[str]:
        yield from (f"{each.name}: {each.activity}" for each in self._trainers.values())
        yield from super()._activities()

    def next_content(self) -> int:
        """Return a number for weights that no adapter has had before."""
        self._contents += 1
        return self._contents

    async def publish(
        self,
        scheduler: Scheduler,
        name: str,
        content: int,
        name_batches: Callable[[], None],
    ) -> None:
        """Publish weights of an adapter, as :meth:`AdapterHandle.publish` does.

        The write takes no virtual time, because the real one is done by another thread.
        """

        def write(buffer: int, keep: Collection[int]) -> list[UpdateWeights]:
            update = self._buffer.begin(buffer, keep=keep, content=content)
            self._buffer.end(update)
            return [update]

        adapter = LoadedAdapter(1.0, {})
        await scheduler.engines.adapters.publish(
            name, adapter, write, name_batches=name_batches, is_archived=False
        )

    # ------------------------------------------------------------ a run of processes

    def _begin_process(self) -> None:
        self._buffer.forget(is_new=True)
        self._engines.clear()
        for trainer in self._trainers.values():
            trainer.begin_process()

    def _resume_event(self) -> ev.RunResumed:
        at = {name: (each.checkpoint.batches, 0) for name, each in self._trainers.items()}
        return ev.RunResumed(0, 0, at)

    def _on_resume(self, core: Core, resume: ev.RunResumed) -> None:
        pass

    async def _train(self, scheduler: Scheduler) -> None:
        await scheduler.wait_for_engines(1)
        async with asyncio.TaskGroup() as trainers:
            beside = trainers.create_task(self._use_base(scheduler), name="base")
            tasks = [
                trainers.create_task(trainer.train(scheduler), name=trainer.name)
                for trainer in self._trainers.values()
            ]
            try:
                await asyncio.wait(tasks)
            finally:  # in this order, because a group cancels its tasks in one that varies
                for task in (beside, *tasks):
                    task.cancel()

    async def _use_base(self, scheduler: Scheduler) -> None:
        """Evaluate the run's own weights and pause all engines, now and then."""
        chance = self.scenario.chance("base", self.report.processes)
        for task in range(BASE_EVALUATIONS_MAX):
            await asyncio.sleep(chance.expovariate(2.0))
            if chance.random() < self.scenario.pausing:
                mode = chance.choice(PAUSE_MODES)
                self._context.coverage.add(CoverageMark.PAUSED)
                await scheduler.control.pause(mode)
                await asyncio.sleep(0.1)
                await scheduler.control.pause(None)
            rollouts = await scheduler.evaluate([-1 - task], self._play_base)
            for turn in _ended_turns(rollouts):
                assert not turn.sampling.adapter, f"sampled by {turn.sampling.adapter!r}"
                check_turn(turn, without_prefills=self.scenario.without_prefills)

    async def _play_base(self, episode: Episode, task: int) -> float:
        variation = self.scenario.chance("mood", task, episode.index, self.report.processes)
        return await self._base_episodes.play(episode, task, variation)

    # ------------------------------------------------------------ checks

    def _check_event(self, event: ev.Event, commands: list[ev.Command]) -> None:
        super()._check_event(event, commands)
        self._count_served(event)
        for command in commands:
            match command:
                case ev.HandOver(adapter=adapter):
                    self._trainers[adapter].check_batch(command)
                case ev.StopEpisode(rollout=rollout) if rollout.adapter:
                    self._trainers[rollout.adapter].stopped.add(rollout.rollout_id)
                case ev.Submit(engine=engine, message=message):
                    sampling = message.sampling
                    assert (sampling.adapter_version is None) == (not sampling.adapter)
                    if sampling.adapter:
                        self._trainers[sampling.adapter].served.check_submit(engine)

    def _count_served(self, event: ev.Event) -> None:
        """Record which versions engines serve after an event."""
        match event:
            case ev.EngineJoined(engine=engine, adapters=adapters):
                self._engines.add(engine)
                held = dict(adapters)
                for name, trainer in self._trainers.items():
                    if name in held:
                        trainer.served.serve(engine, held[name])
                    else:
                        trainer.served.leave(engine)
            case ev.EngineLeft(engine=engine):
                self._engines.discard(engine)
                for trainer in self._trainers.values():
                    trainer.served.leave(engine)
            case ev.AdapterReleased(name=name, version=version):
                self._trainers[name].served.release(version, self._engines)
            case ev.AdapterServed(engine=engine, name=name, version=version):
                self._trainers[name].served.serve(engine, version)

    def _check_end(self) -> None:
        for trainer in self._trainers.values():
            trainer.check_end()


def simulate_adapters(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> AdapterRunReport:
    """Run the adapter scenario of one seed, and report the outcome."""
    return AdapterRun(draw_adapter_scenario(seed, kinds), "--seeds 0 --adapter-runs 1").run()
