"""The asyncio shell around the core: all of the waiting, none of the deciding.

One event loop, whose thread owns everything here. Frames from engines, ends of episodes and wishes
of the trainer become events; the core's commands are carried out at once, in order.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidegate.errors import (
    JournalError,
)
from tidegate.orchestrator.commands import Commands
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.diary import EpisodeDiary
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.orchestrator.episodes.runner import EpisodeFunction, EpisodeRunner
from tidegate.orchestrator.feed.ages import PublishTimes
from tidegate.orchestrator.feed.batch_desk import BatchDesk
from tidegate.orchestrator.feed.offers import Offers
from tidegate.orchestrator.feed.tasks import Tasks
from tidegate.orchestrator.fleet.control import EngineControl
from tidegate.orchestrator.fleet.fleet import Answer, Fleet, FleetTimes
from tidegate.orchestrator.fleet.heartbeats import Heartbeats
from tidegate.orchestrator.fleet.open_sessions import OpenSessions
from tidegate.orchestrator.fleet.score_desk import ScoreDesk
from tidegate.orchestrator.fleet.wire import Wire
from tidegate.orchestrator.journal.run_journal import RunJournal
from tidegate.orchestrator.observing.notes import RunNotes
from tidegate.orchestrator.run_watch import RunWatch
from tidegate.orchestrator.turns.outbox import Outbox
from tidegate.orchestrator.waiting import Waiting
from tidegate.orchestrator.watchdog import Stuck
from tidegate.orchestrator.weights.model_files import ModelFiles
from tidegate.transport.messages import (
    Hello,
    InitWeights,
    Message,
    Paused,
    Refused,
    Resumed,
    WeightsLive,
)
from tidegate.transport.scoring import Scored, ScoreRefused

OF_ENGINES = frozenset((ev.EngineJoined, ev.EngineLeft, ev.VersionPublished))
"""Events that the shell has its own part in. Most are not: one look must be enough to tell."""

FREES_NO_PLACE = frozenset((ev.TurnAsked, ev.StepArrived, ev.TaskArrived))
"""Events after which no more tasks may arrive than before, and which the shell has no part in. Most
are. Who has a task arrive looks for places by itself."""

log = logging.getLogger("tidegate")


class Scheduler:
    """A run: a core, a fleet and the user's episodes, on one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        model: ModelFiles,
        router: Wire,
        init_weights: InitWeights,
        *,
        recorder: RunNotes | None,
        journal: RunJournal | None = None,
        resume: ev.Resumed | None = None,
        diary: EpisodeDiary | None = None,
    ) -> None:
        """With a ``journal``, whose core this is then, the run survives a crash; ``resume`` says
        where to go on after one. ``diary``: what is to be told how episodes spend their time."""
        self._settings = settings
        self._router = router
        self._recorder = recorder
        self._journal = journal
        self._resume = resume
        if journal is not None:
            self.core = journal.core
        else:
            self.core = Core(settings.rules())
        self.fleet = Fleet(
            FleetTimes.of(settings),
            router.send,
            is_deterministic=settings.deterministic,
            quantization=settings.quantize or "",
            kv_policy=settings.kv_policy,
            weight_channel=init_weights.channel,
        )
        self.published = PublishTimes(self.core.trainer_version)
        self._waiting = Waiting()
        self.control = EngineControl(settings, init_weights, self._waiting, self)
        failure = self.control.publisher.take_failure
        self._desk = BatchDesk(self._waiting, self.handle, self.when_safe, failure)
        self._wants_tasks = asyncio.Event()
        self._offers = Offers(lambda: self.core, self.handle, wants_tasks=self._wants_tasks)
        self._outbox = Outbox(
            self.fleet.send,
            takes_turns_together=self.fleet.takes_turns_together,
            on_error=self.fail,
        )
        self._sessions = OpenSessions(self._outbox.post)
        self.scores = ScoreDesk(
            self.fleet,
            waiting=self._waiting.scores,
            live_version=lambda: self.core.turns.live_version,
            post=self._outbox.post,
        )
        over = self._sessions.over
        self._parking = Parking(
            live_version=lambda: self.core.turns.live_version,
            is_starved=lambda: self.core.batches_asked > 0,
        )
        self._episodes = EpisodeRunner(
            settings,
            model,
            self._waiting,
            self.handle,
            self.fail,
            over,
            parking=self._parking,
            score=self.scores.ask_all,
            diary=diary,
        )
        self._commands = Commands(
            outbox=self._outbox,
            sessions=self._sessions,
            waiting=self._waiting,
            episodes=self._episodes,
            batches=self._desk,
            offers=self._offers,
            recorder=recorder,
            on_pause=self._pause_generation,
            outstanding_groups_max=lambda: self.core.policy.outstanding_groups_max,
        )
        self.on_engine_silent: Callable[[str], None] = lambda engine: None
        """Told of engines that were given up for their silence."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._watch: RunWatch | None = None

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until cancelled, or until something fails that the run can't do without.

        Cancelling leaves no task behind; engines are told nothing, see :meth:`Fleet.send`.
        """
        loop = asyncio.get_running_loop()
        if self._journal is not None:
            self._journal.start(keeps_events=self._settings.keep_events, on_error=self.fail)
        self._go_on()
        self._router.attach(loop, self._on_frames)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._heartbeats().run(), name="heartbeats")
                group.create_task(self._run_watch().run(), name="watchdog")
                await self._failure
        finally:
            await self._episodes.end()
            self._offers.close()
            self._group = None
            self._router.detach()

    def _run_watch(self) -> RunWatch:
        self._watch = RunWatch(
            self.core,
            self.fleet,
            self.control.weights,
            self._episodes.left,
            parked=self._parking.rows,
            is_paused=lambda: self.control.pauses.mode is not None,
            patience_s=self._settings.stuck_after_s,
        )
        return self._watch

    def _heartbeats(self) -> Heartbeats:
        return Heartbeats(
            self.fleet,
            self.handle,
            lambda engine: self.on_engine_silent(engine),  # whoever it is by then
            interval_s=self._settings.heartbeat_interval_s,
            patience_s=self._settings.engine_start_timeout_s,
        )

    def episode_seconds(self) -> dict[str, float]:
        """What all episodes spent on what has a name, by it."""
        return self._episodes.activities.seconds()

    @property
    def parked_episodes(self) -> int:
        """Those that wait for newer weights."""
        return len(self._parking.rows)

    @property
    def stuck(self) -> tuple[Stuck, ...]:
        """What has not got on for too long."""
        return self._watch.stuck if self._watch is not None else ()

    def _go_on(self) -> None:
        """After a crash: go back to the trainer's checkpoint, and expect the engines."""
        self.fleet.newest_version = self.core.trainer_version
        if self._resume is None:
            return
        self.handle([self._resume])
        self.fleet.newest_version = self.core.trainer_version
        now_s = asyncio.get_running_loop().time()
        self.fleet.resume(self.core.turns.streams, list(self.core.turns.engines), now_s)
        if self._settings.resume_partial_rollouts:
            return
        for rollout in self.core.running_rollouts:
            self.handle([ev.RolloutCut(rollout.rollout_id, 0, 0, "restarted")])

    def fail_waiters(self, error: BaseException) -> None:
        """Tell everybody who still waits that nothing will come."""
        self._waiting.fail_all(error)

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def stop_journal(self) -> None:
        """Write down no more of what happens, so that the run can be resumed from here."""
        journal, self._journal = self._journal, None
        if journal is not None:
            with contextlib.suppress(JournalError):  # it has failed, and that has ended the run
                journal.note_state()

    def close(self) -> None:
        """Settle what is unfinished as discarded; nothing may be asked any more."""
        self.stop_journal()
        self._sessions.close()
        self.handle([ev.RunEnded()])
        self.send(())

    # ------------------------------------------------------------ engines

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        try:
            for item in self.fleet.hear(frames, asyncio.get_running_loop().time()):
                self._on_heard(item)
            if acks := self.fleet.take_acks():
                self.when_safe(lambda: self.fleet.acknowledge(acks))  # engines forget them
        except Exception as error:  # noqa: BLE001 - ours: it ends the run, not only this callback
            self.fail(error)

    def _on_heard(self, item: ev.Event | Answer) -> None:
        if isinstance(item, Answer):
            if isinstance(item.message, Scored | ScoreRefused):
                self.scores.heard(item.engine, item.message)
            elif not self.control.heard(item.engine, item.message):
                log.warning("engine=%s said %s", item.engine, item.message)
            elif isinstance(item.message, Paused | Resumed):
                self._note_engine(item.engine, type(item.message).__name__.lower())
            return
        self.handle([item])
        if self._recorder is not None and isinstance(item, ev.StepArrived):
            self._recorder.engine_step(
                item.engine,
                item.started_us,
                item.busy_us,
                item.version,
                len(item.turns),
                len(item.prefills),
            )

    def staged(self, engine: str, version: int) -> None:
        """An engine holds new weights beside its live ones."""
        self._note_engine(engine, "staged", version=version)

    def swapped(self, engine: str, message: WeightsLive) -> None:
        """An engine serves other weights from now on."""
        self._note_engine(
            engine,
            "swap",
            at_us=message.swapped_us,
            version=message.version,
            standstill_us=message.standstill_us,
        )
        self.handle([ev.EngineSwapped(engine, message.version)])
        self.scores.advance()

    def refuse_engine(self, engine: str, why: str) -> None:
        """An engine refuses the weights that others serve."""
        self.fleet.send(engine, Refused(message=why))
        self.handle(self.fleet.lose(engine, f"could not take weights: {why}"))

    def hello_of(self, engine: str) -> Hello | None:
        """What an engine said of itself; None if it has gone again."""
        known = self.fleet.engines.get(engine)
        return known.hello if known is not None else None

    def engine_ended(self, engine: str, why: str) -> None:
        """The process of a local engine has ended."""
        self.handle(self.fleet.lose(engine, why))

    def give_up_engine(self, engine: str, why: str) -> None:
        """Strike an engine that doesn't answer."""
        self.handle(self.fleet.lose(engine, why))
        self.on_engine_silent(engine)

    def _note_engine(self, engine: str, name: str, at_us: int = 0, **about: int) -> None:
        if self._recorder is not None:
            at_us = at_us or time.monotonic_ns() // 1000
            self._recorder.engine_event(engine, name, at_us, **about)

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines, after all that was posted before."""
        self._outbox.send(outgoing)

    async def wait_for_engines(self, count: int) -> None:
        """Return once ``count`` engines have joined."""
        await self._waiting.until(lambda: len(self.fleet.engines) >= count)

    # ------------------------------------------------------------ events and commands

    def handle(self, events: Iterable[ev.Event], episode: EpisodeFunction | None = None) -> None:
        """Feed events to the core and carry out its commands, in order."""
        may_free_places = False
        for event in events:
            if type(event) not in FREES_NO_PLACE:
                may_free_places = True
                if type(event) in OF_ENGINES:
                    self._note_engines(event)
            if self._journal is not None:
                self._journal.log(event)
            for command in self.core.handle(event):
                self._commands.carry_out(command, episode)
        if may_free_places and not self._wants_tasks.is_set() and self.core.capacity_groups:
            self._wants_tasks.set()
        if self._parking.parked:
            self._parking.look()
        if self._journal is not None:
            self._journal.compact_if_due()

    def _note_engines(self, event: ev.Event) -> None:
        """Tell those who must know which engines there are, and what they may serve."""
        match event:
            case ev.EngineJoined(engine=engine, weight_version=version):
                self.control.joined(engine, version)
                self.scores.joined(engine)
                self._sessions.joined(engine, self.hello_of(engine))
            case ev.VersionPublished(version=version):
                self.fleet.newest_version = version
                self.published.note(asyncio.get_running_loop().time(), version)
            case ev.EngineLeft(engine=engine):
                log.warning("engine=%s lost: %s", engine, self.fleet.departed.get(engine))
                self.control.left(engine)
                self.scores.left(engine)
                self._sessions.left(engine)
                self._note_engine(engine, "lost")

    def when_safe(self, action: Callable[[], None]) -> None:
        """Do this once no crash can undo what has been handled so far."""
        if self._journal is None:
            action()
        else:
            self._journal.when_safe(action)

    def _pause_generation(self, is_paused: bool) -> None:
        assert self._group is not None
        self._group.create_task(self.control.stand_still(is_paused))

    # ------------------------------------------------------------ what the trainer asks for

    async def make_safe(self, batches: int, offer: int) -> None:
        """The trainer's checkpoint holds what it made of the first ``batches`` batches."""
        self.handle([ev.BatchesSafe(batches, offer)])
        if self._journal is not None:
            await self._journal.wait_until_safe()

    def offer(self, tasks: Tasks, episode: EpisodeFunction) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``."""
        assert self._group is not None
        is_journalled = self._journal is not None
        self._offers.begin(tasks, episode, self._group, is_journalled=is_journalled)

    async def next_batch(self) -> ev.HandOver | None:
        """The next batch, or None when the tasks are used up."""
        return await self._desk.next_batch()

    def hold_batches(self, is_held: bool) -> None:
        """As :meth:`BatchDesk.hold`."""
        self._desk.hold(is_held)

    def stand_still(self, is_still: bool) -> None:
        """As :meth:`EpisodeRunner.stand_still`."""
        self._episodes.stand_still(is_still)

    async def evaluate(self, tasks: list[Any], episode: EpisodeFunction) -> list[Rollout]:
        """Run one episode per task, outside training; the rollouts, in the order of the tasks."""
        loop = asyncio.get_running_loop()
        futures = []
        for index, task in enumerate(tasks):
            future: asyncio.Future[Rollout] = loop.create_future()
            futures.append(future)
            rollout_id = self.core.groups.next_rollout_id
            self._waiting.evaluations[rollout_id] = future
            self.handle([ev.EvaluationAsked(task, index)], episode)
        return [await future for future in futures]
