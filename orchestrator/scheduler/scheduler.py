"""Asyncio shell around the core: feeds it events and carries out its commands in order.

A run uses its :class:`Scheduler` on its own event loop only. Engines' messages, ends of episodes
and the trainer's requests become events.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from tidegate.errors import ConfigError, JournalError, TurnRefused
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import ROLLOUT_EVENTS, Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules, classes_of, record_of
from tidegate.orchestrator.episodes.call_counts import ToolCallCounts
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.runner import EpisodeFunction, EpisodeRunner
from tidegate.orchestrator.fleet.pending_futures import PendingFutures, fail, resolve
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.orchestrator.fleet.shell import Wire
from tidegate.orchestrator.journal.run_journal import RunJournal
from tidegate.orchestrator.scheduler.elastic_fleet import ElasticFleet
from tidegate.orchestrator.scheduler.engine_side import EngineSide
from tidegate.orchestrator.scheduler.run_watch import RunWatch
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.recorder import EpisodeObserver, Recorder
from tidegate.orchestrator.telemetry.watchdog import Stuck
from tidegate.transport.messages import CancelTurn, InitWeights

FREQUENT_EVENTS = frozenset((ev.TurnRequested, ev.StepArrived, ev.TaskArrived, ev.EpisodeReturned))
"""Most events. They need no work outside the core. Only ``EpisodeReturned`` may increase
``admissible_groups``; after ``TaskArrived``, :class:`TaskFeed` checks admission itself."""

STEP_EVENTS = frozenset((ev.StepArrived, ev.TurnRequested))
"""Events after which no trainer can take more tasks, and no parked episode continues."""

BASE_EVENTS = frozenset(
    (
        ev.TaskArrived,
        ev.TasksOffered,
        ev.TasksExhausted,
        ev.BatchRequested,
        ev.BatchRequestCancelled,
        ev.BatchTaken,
        ev.BatchReturned,
        ev.HandOverPaused,
        ev.BatchesTrained,
        ev.EvaluationRequested,
        ev.VersionPublished,
        ev.EngineSwapped,
    )
)
"""Events that, unless they are :class:`ForAdapter`'s, concern the run's weights only."""

log = logging.getLogger("tidegate")


class Scheduler:
    """One run: a core, the engine side and the user's episodes, on one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        model: ModelFiles,
        router: Wire,
        init_weights: InitWeights,
        *,
        recorder: Recorder | None,
        core: Core | None = None,
        journal: RunJournal | None = None,
        resume: ev.RunResumed | None = None,
        observers: Sequence[EpisodeObserver] = (),
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """``core``: one that decides; None: the journal's, or a new one. With a ``journal``, the
        run survives a crash; ``resume``: the point at which it continues. ``observers`` are told
        what episodes do. ``now_s``: a clock that advances within one iteration of the
        loop, if the loop's own clock does not."""
        self._settings = settings
        self._router = router
        self._journal = journal
        self._resume = resume
        if core is None:
            core = journal.core if journal is not None else Core(settings.rules())
        self.core: Final = core  # the parts below hold it, too
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._is_ending = False
        self._engine_calls = 0
        """Number of the trainer's calls that need engines to run, see :meth:`_unpaused`."""
        self._is_halted = False
        """Whether engines were last told to pause for the staleness policy."""
        self._pending = PendingFutures()
        self.engines = EngineSide(
            settings,
            init_weights,
            router.send,
            self._pending,
            recorder,
            self,
            weights_dtype=model.dtype,
        )
        self.fleet, self.control = self.engines.fleet, self.engines.control
        self.scores = self.engines.scores
        self._outbox, self._sessions = self.engines.outbox, self.engines.sessions
        self._now_s = now_s or asyncio.get_running_loop().time
        self.trainer = self._new_trainer("")
        """Trainer of the run's weights."""
        self.trainer.recorder = recorder
        self.trainers = {"": self.trainer}
        """Trainers by adapter; the empty name is the run's weights."""
        self._linked: dict[str, set[str]] = {}
        """Trainers to wake together, by name, because episodes of one sample another."""
        for name in self.core.trained_adapters:
            self.trainers[name] = self._new_trainer(name)
        for name in self.trainers:
            core = self.core.of(name)
            sampled = {agent for group in core.groups.in_order for agent in group.agents}
            self._link(name, sampled.union(core.agents))
        self._episodes = self._new_episodes(model, observers)
        self._tool_calls = model.call_counts
        self._text_escaper = model.text_escaper
        self.watch = self._run_watch()
        self.elastic = self._elastic_fleet()
        """Decides and carries out how many engines the run has; None: nothing decides."""

    def _elastic_fleet(self) -> ElasticFleet | None:
        policy = self._settings.fleet.elasticity
        if policy is None:
            return None
        known = self.core.turns.engines.values()  # of the run that is resumed
        had = sum(not (engine.is_draining or engine.is_for_evaluation) for engine in known)
        wanted = had or self._settings.fleet.engines - self.engines.reserved
        return ElasticFleet(policy, self.engines, self._pending, wanted=wanted)

    def _new_trainer(self, adapter: str) -> TrainerSide:
        return TrainerSide(
            self.core.of(adapter),
            self.handle,
            self._pending,
            self.when_safe,
            (lambda: None) if adapter else self.control.state.shared.take_failure,
            adapter=adapter,
            is_journalled=lambda: self._journal is not None,
            now_s=self._now_s,
        )

    def _new_episodes(
        self, model: ModelFiles, observers: Sequence[EpisodeObserver]
    ) -> EpisodeRunner:
        return EpisodeRunner(
            self._settings.episodes,
            self._settings.sampling,
            model,
            self._pending,
            self.handle,
            self.fail,
            self.engines.sessions.rollout_ended,
            parking=lambda rollout: self.trainers[rollout.adapter].parking,
            score=self._score_for,
            context_tokens_max=lambda: self.fleet.context_tokens_max,
            observers=observers,
        )

    # ------------------------------------------------------------ lifecycle

    async def run(self) -> None:
        """Serve until cancelled, or until something fails that ends the run.

        Cancelling leaves no task behind, and sends engines nothing.
        """
        loop = asyncio.get_running_loop()
        if self._journal is not None:
            self._journal.start(self.fail)
        self._resume_from_checkpoint()
        if self._resume is not None:
            await self._wait_resume_durable()
        self._router.attach(loop, self.engines.on_frames)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.engines.watch(), name="heartbeats")
                group.create_task(self.watch.run(), name="watchdog")
                try:
                    await self._failure
                finally:
                    self._is_ending = True
                    self.watch.run_ended()
        finally:
            await self._episodes.end()
            for trainer in self.trainers.values():
                trainer.tasks.close()
            self.engines.drains.close()
            self.control.close()
            self._group = None
            self._router.detach()

    def _run_watch(self) -> RunWatch:
        return RunWatch(
            self.core,
            self.fleet,
            self.control.state,
            self._episodes.leaks,
            is_parked=self._is_parked,
            is_paused=lambda: self.control.state.pauses.mode is not None,
            episode_of=lambda adapter: self.trainers[adapter].tasks.describe_episode(),
            stuck_after_s=self._settings.records.stuck_after_s,
        )

    def episode_seconds(self) -> dict[str, float]:
        """Return the seconds that all episodes spent in named activities, by name."""
        return self._episodes.activities.seconds()

    @property
    def tool_calls(self) -> ToolCallCounts:
        """Counts of turns that resemble tool calls."""
        return self._tool_calls

    @property
    def escaped_messages(self) -> int:
        """Number of messages in which a special token's text was kept apart from the token."""
        escaper = self._text_escaper
        return 0 if escaper is None else escaper.escaped

    @property
    def parked_episodes(self) -> int:
        """Number of episodes parked until newer weights are live."""
        return sum(len(trainer.parking.rows) for trainer in self.trainers.values())

    def _is_parked(self, rollout: Rollout) -> bool:
        return rollout.rollout_id in self.trainers[rollout.adapter].parking.rows

    @property
    def stuck(self) -> tuple[Stuck, ...]:
        """Everything that has made no progress for too long, see :class:`RunWatch`."""
        return self.watch.at_end if self._is_ending else self.watch.stuck

    def _resume_from_checkpoint(self) -> None:
        """Return the core to the trainer's checkpoint, and expect the engines known before."""
        if self._resume is None:
            return
        self.handle(self._resume)
        now_s = asyncio.get_running_loop().time()
        self.fleet.resume(self.core.turns.streams, list(self.core.turns.engines), now_s)

    async def _wait_resume_durable(self) -> None:
        """Return once ``RunResumed`` is committed, or the journal has failed.

        Messages from engines are received only afterwards. ``RunResumed`` advances the turn
        handles: after a crash before the commit, the next process would give the same handles to
        other turns, and apply old steps to them.
        """
        safe = asyncio.ensure_future(self.trainer.wait_until_safe())
        try:
            await asyncio.wait((safe, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            safe.cancel()

    async def wait_for_engines(self, count: int) -> None:
        """Return once ``count`` engines have joined."""
        await self._pending.until(lambda: len(self.fleet.engines) >= count)

    def fail_waiters(self, error: BaseException) -> None:
        """Raise ``error`` in every pending call."""
        self._pending.fail_all(error)

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def stop_journal(self) -> None:
        """Write nothing more to the journal, so that the run can be resumed from here."""
        journal, self._journal = self._journal, None
        if journal is not None:
            with contextlib.suppress(JournalError):  # a failed journal has ended the run already
                journal.log_checksum()

    def close(self) -> None:
        """Discard everything unfinished; no call may follow."""
        self.stop_journal()
        self.engines.sessions.close()
        self.handle(ev.RunEnded())
        self.engines.send(())

    # ------------------------------------------------------------ events and commands

    def handle(self, event: ev.Event, episode: EpisodeFunction | None = None) -> None:
        """Feed an event to the core and carry out its commands, in order. ``episode`` is the
        function of the episode that the event starts."""
        core, trainer, journal = self.core, self.trainer, self._journal
        is_rare = type(event) not in FREQUENT_EVENTS
        if is_rare:
            self._before_event(event)
        if journal is not None:
            journal.log(event)
        has_adapters = len(self.trainers) > 1 and type(event) not in STEP_EVENTS
        adapter = self._adapter_of(event) if has_adapters else None
        revision = core.groups.revision
        for command in core.handle(event):
            self._carry_out(command, episode)
        if is_rare:
            if type(event) is ev.EngineJoined:
                self.engines.keep_for_evaluation()
            elif type(event) is ev.EngineLeft:
                self._pending.notify()  # what is waited for may not come without the engine
            trainer.wake_tasks()
        elif type(event) is ev.EpisodeReturned and core.groups.revision != revision:
            trainer.wake_tasks()  # the revision is unchanged while other rollouts of its group run
        if trainer.parking.parked:
            trainer.parking.resume_due()
        if has_adapters:
            self._wake_adapters(event, adapter)
        if journal is not None:
            journal.compact_if_due()

    def _adapter_of(self, event: ev.Event) -> str | None:
        """Return the adapter whose groups an event may change, agents aside; None: any adapter's.

        Asked before the event is handled, because a rollout may end with it.
        """
        if type(event) is ev.ForAdapter:
            return event.adapter
        if isinstance(event, ROLLOUT_EVENTS):
            tracker = self.core.groups.numbers.tracker_of.get(event.rollout_id)
            return "" if tracker is None else tracker.adapter
        if type(event) is ev.AdapterReleased or type(event) is ev.AdapterServed:
            return event.name
        return "" if type(event) in BASE_EVENTS else None

    def _wake_adapters(self, event: ev.Event, adapter: str | None) -> None:
        """Let adapters' trainers take tasks, and their parked episodes continue, after an event
        that concerns ``adapter`` alone (None: all)."""
        if type(event) is ev.ForAdapter and type(event.event) is ev.TasksOffered:
            self._link(event.adapter, event.event.agents)
        elif type(event) is ev.TasksOffered:
            self._link("", event.agents)
        names = self.trainers if adapter is None else self._linked.get(adapter, (adapter,))
        for name in names:
            trainer = self.trainers.get(name)
            if trainer is None:  # trained no longer
                continue
            trainer.wake_tasks()
            if trainer.parking.parked:
                trainer.parking.resume_due()

    def _link(self, adapter: str, agents: Iterable[str]) -> None:
        """Wake these trainers together from now on: groups of one start with those of another."""
        linked = {adapter, *agents}
        for name in tuple(linked):
            linked |= self._linked.get(name, set())
        if len(linked) > 1:
            self._linked |= dict.fromkeys(linked, linked)

    def _before_event(self, event: ev.Event) -> None:
        """Update the parts outside the core for an event; not called for the most frequent ones."""
        if type(event) is ev.EngineJoined or type(event) is ev.EngineLeft:
            self.engines.membership_changed(event)
        elif type(event) is ev.VersionPublished or type(event) is ev.AdapterReleased:
            trainer = self.trainers.get(event.name if type(event) is ev.AdapterReleased else "")
            if trainer is not None:  # the adapter is trained
                trainer.published.record(asyncio.get_running_loop().time(), event.version)
            self.engines.drains.released()

    def _carry_out(self, command: ev.Command, episode: EpisodeFunction | None) -> None:
        """Carry out one command; ``episode`` is the function of an episode that it starts."""
        # Every rollout has these three. A class pattern costs ten times as much.
        if type(command) is ev.Submit:
            engine, message = command.engine, command.message
            self._outbox.post(engine, message)
            self._sessions.submitted(engine, message.session)
            return
        if type(command) is ev.StartEpisode:
            assert episode is not None
            self._episodes.begin(command.rollout, command.task, episode)
            return
        if type(command) is ev.EndTurns:
            for turn in command.turns:
                resolve(self._pending.turns.pop(turn.rollout_id, None), turn)
            return
        match command:
            case ev.StartBranch(rollout=rollout):
                self._episodes.forked(rollout)
            case ev.RetryEpisode(rollout=rollout, task=task, delay_s=delay_s):
                self._episodes.retry(rollout, task, delay_s)
            case ev.StopEpisode(rollout=rollout):
                self._episodes.stop(rollout)
            case ev.FailTurn(turn=turn, message=why):
                fail(self._pending.turns.pop(turn.rollout_id, None), TurnRefused(why))
            case ev.Cancel(engine=engine, handle=handle):
                self.engines.outbox.post(engine, CancelTurn(turn=handle))
            case ev.EndEvaluation(rollout=rollout):
                resolve(self._pending.evaluations.pop(rollout.rollout_id, None), rollout)
            case ev.Record(rollout=rollout, task=task):
                trainer = self.trainers.get(rollout.adapter)  # gone if it is trained no longer
                if trainer is not None and (recorder := trainer.recorder) is not None:
                    recorder.rollout(rollout, task=task, advantage=None, consumed_version=None)
            case ev.EndBatches() if self._failure.done():
                pass  # the request fails with that error
            case (
                ev.HandOver()
                | ev.EndBatches()
                | ev.RefuseBatch()
                | ev.LoseBatch()
                | ev.RequeueTask()
            ):
                if type(command) is ev.HandOver:
                    self.watch.handed_over(command)
                elif type(command) is ev.EndBatches:
                    self.watch.tasks_ended(self.core.of(command.adapter))
                self.trainers[command.adapter].carry_out(command)
            case ev.PauseGeneration(adapter=""):
                self._pause_generation()
            case ev.PauseGeneration(is_paused=is_paused, adapter=adapter):
                self._episodes.hold(adapter, is_paused)

    def when_safe(self, action: Callable[[], None]) -> None:
        """Call ``action`` once no crash can undo the events handled so far."""
        if self._journal is None:
            action()
        else:
            self._journal.when_safe(action)

    def _pause_generation(self) -> None:
        is_halted = self.core.is_paused and not self._engine_calls
        if self._group is None or self._is_ending or is_halted == self._is_halted:
            return  # engines end with the run
        self._is_halted = is_halted
        self._group.create_task(self.control.halt_engines(is_halted))

    @contextlib.contextmanager
    def _unpaused(self) -> Iterator[None]:
        """Lift the pause by which the staleness policy stops engines until the next publish.

        For the trainer's calls that need engines: the trainer waits for them before it publishes.
        """
        self._engine_calls += 1
        self._pause_generation()
        try:
            yield
        finally:
            self._engine_calls -= 1
            self._pause_generation()

    # ------------------------------------------------------------ the trainer's requests

    async def scale(self, engines: int, within_s: float) -> None:
        """As :meth:`EngineSide.scale`.

        Raises:
            ConfigError: an elasticity policy decides how many engines the run has.
        """
        if self.elastic is not None:
            raise ConfigError(
                "the run's elasticity policy decides how many engines it has; omit elasticity, or "
                "let it decide"
            )
        await self.engines.scale(engines, within_s)

    async def train_adapter(self, name: str, rules: Rules) -> None:
        """Train an adapter from now on, with groups and batches of its own; return once a publish
        of it that is under way has ended."""
        async with self.engines.adapters.publishing(name):
            self.core.policy_classes |= set(classes_of(rules))
            self.handle(ev.AdapterTrainingStarted(name, record_of(rules)))
            self.trainers[name] = self._new_trainer(name)

    def halt_adapter(self, name: str, is_halted: bool) -> None:
        """Pause a trained adapter's turns and its episodes' clocks, or resume them."""
        self.trainers[name].handle(ev.GenerationHalted(is_halted))

    def end_adapter(self, name: str) -> None:
        """End an adapter's training, and discard its untrained rollouts.

        Raises:
            ConfigError: episodes of another trainer's tasks sample it.
        """
        for of_tasks, trainer in self.trainers.items():
            is_sampled = any(name in group.agents for group in trainer.core.groups.in_order)
            if name in trainer.core.agents or is_sampled:
                whose = f"adapter {of_tasks!r}" if of_tasks else "the run"
                raise ConfigError(
                    f"episodes of {whose} sample adapter {name!r} as their agent; offer tasks "
                    f"without it and train the groups that have begun, or close {whose} first"
                )
        self.trainers.pop(name).close()
        self.watch.forget(name)
        self.handle(ev.AdapterTrainingEnded(name))

    def offer(
        self,
        tasks: Tasks,
        episode: EpisodeFunction,
        adapter: str = "",
        agents: Sequence[str] = (),
    ) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``.

        ``adapter``: the trained adapter whose groups they are; ``agents``: others that the episodes
        sample too.

        Raises:
            ConfigError: an agent is no trained adapter, or is ``adapter`` itself.
        """
        assert self._group is not None
        for name in agents:
            if name not in self.core.trained_adapters or name == adapter:
                known = ", ".join(sorted({*self.core.trained_adapters} - {adapter})) or "none"
                raise ConfigError(
                    f"agents are other adapters that the run trains ({known}), got {name!r}; call "
                    f"train_adapter({name!r}) first"
                )
        self.trainers[adapter].offer(tasks, episode, self._group, agents)

    def hold_batches(self, is_held: bool, adapter: str = "") -> None:
        """As :meth:`BatchRequests.pause`; does nothing for an adapter that is not trained."""
        if adapter in self.trainers:
            self.trainers[adapter].batch_requests.pause(is_held)

    def suspend_deadlines(self, is_halted: bool) -> None:
        """Stop the time limits of all episodes while engines are halted, or continue them."""
        self._episodes.suspend_deadlines(is_halted)

    async def evaluate(
        self,
        tasks: list[Any],
        episode: EpisodeFunction,
        version: int | None = None,
        adapter: str = "",
    ) -> list[Rollout]:
        """Run one episode per task outside training; return the rollouts in the tasks' order.

        ``version``: the one that samples every token, on engines pinned to it meanwhile; None: the
        present versions. ``adapter``: the trained adapter to evaluate; empty: the run's weights.

        Raises:
            VersionUnavailable: no engine can be pinned to the version.
        """
        trainer = self.trainers[adapter]
        if version is None:
            with self._unpaused():
                futures = trainer.start_evaluation(tasks, episode, None)
                return [await future for future in futures]
        with self._unpaused():  # afterwards the pinned engines run, whatever the others do
            names = await self.engines.pin(version)
        futures = trainer.start_evaluation(tasks, episode, version)
        ended = asyncio.gather(*futures, return_exceptions=True)
        ended.add_done_callback(lambda _: self.engines.unpin(names))
        await asyncio.shield(ended)  # if cancelled, the engines stay pinned until the turns end
        return [future.result() for future in futures]

    async def score(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Score for the trainer, or for an evaluation."""
        with self._unpaused():
            return await self.scores.submit_all(queries)

    async def _score_for(self, rollout: Rollout, queries: Sequence[ScoreQuery]) -> list[Score]:
        if rollout.group_id < 0:  # an evaluation's
            return await self.score(queries)
        return await self.scores.submit_all(queries)
