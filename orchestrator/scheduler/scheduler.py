"""Asyncio shell around the core: feeds it events, and carries out its commands in order.

`trainer/run.py` makes one per run, on an event loop whose thread owns everything here. Engines'
messages, ends of episodes and the trainer's requests become events. `engine_side.py` has the other
work for engines.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tidegate.errors import JournalError, PublishNeeded, TurnRefused
from tidegate.orchestrator.batches.ages import PublishTimes
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.outbox import Outbox
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.episode_tracer import EpisodeTracer
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.orchestrator.episodes.runner import EpisodeFunction, EpisodeRunner
from tidegate.orchestrator.fleet.open_sessions import OpenSessions
from tidegate.orchestrator.fleet.pending_futures import BatchRequest, PendingFutures, fail, resolve
from tidegate.orchestrator.fleet.wire import Wire
from tidegate.orchestrator.journal.run_journal import RunJournal
from tidegate.orchestrator.scheduler.batch_request_queue import BatchRequestQueue
from tidegate.orchestrator.scheduler.engine_side import EngineSide
from tidegate.orchestrator.scheduler.run_watch import RunWatch
from tidegate.orchestrator.scheduler.task_feed import TaskIterators
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.orchestrator.telemetry.recorder import Recorder
from tidegate.orchestrator.telemetry.watchdog import Stuck
from tidegate.transport.messages import CancelTurn, InitWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Carries out the commands of one run's core."""

    outbox: Outbox
    sessions: OpenSessions
    waiting: PendingFutures
    episodes: EpisodeRunner
    batches: BatchRequestQueue
    offers: TaskIterators
    recorder: Recorder | None
    on_pause: Callable[[bool], None]
    """Pauses all engines, or resumes them."""
    outstanding_groups_max: Callable[[], int]
    """Returns the policy's current limit."""

    def carry_out(self, command: ev.Command, episode: EpisodeFunction | None) -> None:
        """Carry out one command; ``episode`` is the function of an episode that it starts."""
        match command:
            case ev.Submit(engine=engine, message=message):
                self.outbox.post(engine, message)
                self.sessions.submitted(engine, message.session)
            case ev.EndTurns(turns=turns):
                for turn in turns:
                    resolve(self.waiting.turns.pop(turn.rollout_id, None), turn)
            case ev.StartEpisode(rollout=rollout, task=task):
                assert episode is not None
                self.episodes.begin(rollout, task, episode)
            case ev.StartBranch(rollout=rollout):
                self.episodes.forked(rollout)
            case ev.StopEpisode(rollout=rollout):
                self.episodes.stop(rollout)
            case ev.FailTurn(turn=turn, message=why):
                fail(self.waiting.turns.pop(turn.rollout_id, None), TurnRefused(why))
            case ev.Cancel(engine=engine, handle=handle):
                self.outbox.post(engine, CancelTurn(turn=handle))
            case ev.EndEvaluation(rollout=rollout):
                resolve(self.waiting.evaluations.pop(rollout.rollout_id, None), rollout)
            case ev.RequeueTask(task=task, key=key):
                self.offers.put_back(task, key)
            case ev.Record(rollout=rollout, task=task):
                if self.recorder is not None:
                    self.recorder.rollout(rollout, task=task, advantage=None, consumed_version=None)
            case ev.HandOver():
                self.batches.hand_over(command)
            case ev.EndBatches():
                self.batches.end()
            case ev.RefuseBatch(unpublished_groups=groups):
                limit = self.outstanding_groups_max()
                self.batches.refuse(
                    PublishNeeded(unpublished_groups=groups, outstanding_groups_max=limit)
                )
            case ev.PauseGeneration(is_paused=is_paused):
                self.on_pause(is_paused)


FREES_NO_PLACE = frozenset((ev.TurnRequested, ev.StepArrived, ev.TaskArrived))
"""Events that never increase ``admissible_groups`` and for which the shell itself has nothing to
do; most events are of these types. Admission after ``TaskArrived`` is checked by
:class:`TaskFeed`."""

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
        journal: RunJournal | None = None,
        resume: ev.RunResumed | None = None,
        tracer: EpisodeTracer | None = None,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """With a ``journal``, whose core is used then, the run survives a crash; ``resume`` says
        where to continue after one. ``tracer`` logs how episodes spend their time. ``now_s``: a
        clock that advances within one iteration of the loop, if the loop's own clock does not."""
        self._settings = settings
        self._router = router
        self._journal = journal
        self._resume = resume
        self.core = journal.core if journal is not None else Core(settings.rules())
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._is_ending = False
        self._watch: RunWatch | None = None
        self._waiting = PendingFutures()
        self._wants_tasks = asyncio.Event()
        self.published = PublishTimes(self.core.trainer_version)
        self.engines = EngineSide(
            settings,
            init_weights,
            router.send,
            self._waiting,
            recorder,
            self,
            weights_dtype=model.dtype,
        )
        self.fleet, self.control = self.engines.fleet, self.engines.control
        self.scores = self.engines.scores
        failure = self.control.state.take_failure
        self._batch_requests = BatchRequestQueue(
            self._waiting, self.handle_one, self.when_safe, failure
        )
        self._offers = TaskIterators(
            lambda: self.core,
            self.handle_one,
            wants_tasks=self._wants_tasks,
            now_s=now_s or asyncio.get_running_loop().time,
        )
        self._parking = Parking(
            live_version=lambda: self.core.turns.live_version,
            is_starved=lambda: self.core.batch_requests > 0,
        )
        self._episodes = self._new_episodes(model, tracer)
        self._commands = self._new_commands(recorder)

    def _new_episodes(self, model: ModelFiles, tracer: EpisodeTracer | None) -> EpisodeRunner:
        return EpisodeRunner(
            self._settings.episodes,
            self._settings.sampling,
            model,
            self._waiting,
            self.handle_one,
            self.fail,
            self.engines.sessions.rollout_ended,
            parking=self._parking,
            score=self.scores.submit_all,
            context_tokens_max=lambda: self.fleet.context_tokens_max,
            tracer=tracer,
        )

    def _new_commands(self, recorder: Recorder | None) -> Commands:
        return Commands(
            outbox=self.engines.outbox,
            sessions=self.engines.sessions,
            waiting=self._waiting,
            episodes=self._episodes,
            batches=self._batch_requests,
            offers=self._offers,
            recorder=recorder,
            on_pause=self._pause_generation,
            outstanding_groups_max=lambda: self.core.policy.outstanding_groups_max,
        )

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until cancelled, or until something fails that ends the run.

        Cancelling leaves no task behind, and sends engines nothing.
        """
        loop = asyncio.get_running_loop()
        if self._journal is not None:
            self._journal.start(
                keeps_events=self._settings.records.keep_full_journal, on_error=self.fail
            )
        self._resume_from_checkpoint()
        if self._resume is not None:
            await self._wait_resume_durable()
        self._router.attach(loop, self.engines.on_frames)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.engines.heartbeats().run(), name="heartbeats")
                group.create_task(self._run_watch().run(), name="watchdog")
                try:
                    await self._failure
                finally:
                    self._is_ending = True
        finally:
            await self._episodes.end()
            self._offers.close()
            self._group = None
            self._router.detach()

    def _run_watch(self) -> RunWatch:
        self._watch = RunWatch(
            self.core,
            self.fleet,
            self.control.state,
            self._episodes.leaks,
            parked=self._parking.rows,
            is_paused=lambda: self.control.state.pause_mode is not None,
            stuck_after_s=self._settings.records.stuck_after_s,
        )
        return self._watch

    def episode_seconds(self) -> dict[str, float]:
        """Return the seconds that all episodes spent in named activities, by name."""
        return self._episodes.activities.seconds()

    @property
    def parked_episodes(self) -> int:
        """Number of episodes parked until newer weights are live."""
        return len(self._parking.rows)

    @property
    def stuck(self) -> tuple[Stuck, ...]:
        """Everything that has made no progress for too long, see :class:`RunWatch`."""
        return self._watch.stuck if self._watch is not None else ()

    def _resume_from_checkpoint(self) -> None:
        """After a crash: return to the trainer's checkpoint, and expect the engines."""
        self.fleet.newest_version = self.core.trainer_version
        if self._resume is None:
            return
        self.handle_one(self._resume)
        self.fleet.newest_version = self.core.trainer_version
        now_s = asyncio.get_running_loop().time()
        self.fleet.resume(self.core.turns.streams, list(self.core.turns.engines), now_s)
        if self._settings.records.resume_partial_rollouts:
            return
        for rollout in self.core.running_rollouts:
            self.handle_one(ev.RolloutCut(rollout.rollout_id, 0, 0, "restarted"))

    async def _wait_resume_durable(self) -> None:
        """Return once ``RunResumed`` is committed, or the journal has failed.

        Engines are not heard before. ``RunResumed`` advances the turn handles. Without the commit,
        a crash here would let the next process reuse these handles for other turns, and take old
        steps for theirs.
        """
        safe = asyncio.ensure_future(self.wait_until_safe())
        try:
            await asyncio.wait((safe, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            safe.cancel()

    async def wait_for_engines(self, count: int) -> None:
        """Return once ``count`` engines have joined."""
        await self._waiting.until(lambda: len(self.fleet.engines) >= count)

    def fail_waiters(self, error: BaseException) -> None:
        """Raise ``error`` in every call that still waits."""
        self._waiting.fail_all(error)

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def stop_journal(self) -> None:
        """Write nothing more to the journal, so that the run can be resumed from here."""
        journal, self._journal = self._journal, None
        if journal is not None:
            with contextlib.suppress(JournalError):  # it has failed, and that has ended the run
                journal.log_checksum()

    def close(self) -> None:
        """Discard everything unfinished; the run takes no calls any more."""
        self.stop_journal()
        self.engines.sessions.close()
        self.handle_one(ev.RunEnded())
        self.engines.send(())

    # ------------------------------------------------------------ events and commands

    def handle(self, events: Iterable[ev.Event], episode: EpisodeFunction | None = None) -> None:
        """Feed events to the core and carry out its commands, in order."""
        for event in events:
            self.handle_one(event, episode)

    def handle_one(self, event: ev.Event, episode: EpisodeFunction | None = None) -> None:
        """Feed one event to the core and carry out its commands."""
        may_free_places = type(event) not in FREES_NO_PLACE
        groups, revision = self.core.groups, -1
        if type(event) is ev.EpisodeReturned:
            revision = groups.revision  # unchanged if others of its group run: no place is free
        elif may_free_places:
            self._note(event)
        journal, carry_out = self._journal, self._commands.carry_out
        if journal is not None:
            journal.log(event)
        for command in self.core.handle(event):
            carry_out(command, episode)
        if (
            may_free_places
            and groups.revision != revision
            and not self._wants_tasks.is_set()
            and self.core.admissible_groups
        ):
            self._wants_tasks.set()
        if self._parking.parked:
            self._parking.resume_due()
        if journal is not None:
            journal.compact_if_due()

    def _note(self, event: ev.Event) -> None:
        """Update the shell's own parts for an event; not called for the most frequent ones."""
        if type(event) is ev.VersionPublished:
            self.fleet.newest_version = event.version
            self.published.note(asyncio.get_running_loop().time(), event.version)
        elif type(event) is ev.EngineJoined or type(event) is ev.EngineLeft:
            self.engines.note(event)

    def when_safe(self, action: Callable[[], None]) -> None:
        """Call ``action`` once no crash can undo the events handled so far."""
        if self._journal is None:
            action()
        else:
            self._journal.when_safe(action)

    def _pause_generation(self, is_paused: bool) -> None:
        if self._group is not None and not self._is_ending:  # engines end with the run
            self._group.create_task(self.control.halt_engines(is_paused))

    # ------------------------------------------------------------ what the trainer asks for

    async def mark_checkpointed(self, batches: int, offer: int) -> None:
        """Note that the trainer's checkpoint holds the result of the first ``batches`` batches."""
        self.handle_one(ev.BatchesCheckpointed(batches, offer))
        await self.wait_until_safe()

    async def wait_until_safe(self) -> None:
        """Return once no crash can undo the events handled so far."""
        if self._journal is not None:
            await self._journal.wait_until_safe()

    def offer(self, tasks: Tasks, episode: EpisodeFunction) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``."""
        assert self._group is not None
        is_journalled = self._journal is not None
        self._offers.begin(tasks, episode, self._group, is_journalled=is_journalled)

    async def next_batch(self) -> ev.HandOver | None:
        """Return the next batch, or None when the tasks are used up; for callers on this loop."""
        request = BatchRequest()
        while await self._batch_requests.wait(request):
            batch = request.batch
            if batch is not None and request.take(batch):
                self._batch_requests.acknowledge(request)
                return batch
        return None

    async def wait_for_batch(self, request: BatchRequest) -> bool:
        """As :meth:`BatchRequestQueue.wait`; for callers on another event loop, or without one."""
        return await self._batch_requests.wait(request)

    def acknowledge_batch(self, request: BatchRequest) -> None:
        """As :meth:`BatchRequestQueue.acknowledge`."""
        self._batch_requests.acknowledge(request)

    def close_batch_request(self, request: BatchRequest) -> None:
        """As :meth:`BatchRequestQueue.close`."""
        self._batch_requests.close(request)

    def return_batch(self, number: int) -> bool:
        """As :meth:`BatchRequestQueue.return_batch`."""
        return self._batch_requests.return_batch(number, newest=self.core.handed.count)

    def hold_batches(self, is_held: bool) -> None:
        """As :meth:`BatchRequestQueue.hold`."""
        self._batch_requests.hold(is_held)

    def suspend_deadlines(self, is_halted: bool) -> None:
        """As :meth:`EpisodeRunner.suspend_deadlines`."""
        self._episodes.suspend_deadlines(is_halted)

    async def evaluate(self, tasks: list[Any], episode: EpisodeFunction) -> list[Rollout]:
        """Run one episode per task outside training; return the rollouts in the tasks' order."""
        loop = asyncio.get_running_loop()
        futures = []
        for index, task in enumerate(tasks):
            future: asyncio.Future[Rollout] = loop.create_future()
            futures.append(future)
            rollout_id = self.core.groups.next_rollout_id
            self._waiting.evaluations[rollout_id] = future
            self.handle_one(ev.EvaluationRequested(task, index), episode)
        return [await future for future in futures]
