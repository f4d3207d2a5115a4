"""The asyncio shell around the core: all of the waiting, none of the deciding.

One event loop, whose thread owns everything here. Frames from engines, ends of episodes and wishes
of the trainer become events; the core's commands are carried out at once, in order.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidegate.errors import (
    EngineLagging,
    EngineLost,
    PublishNeeded,
    TurnRefused,
    WeightsRefused,
)
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core import Core
from tidegate.orchestrator.episodes import EpisodeFunction, EpisodeRunner
from tidegate.orchestrator.fleet import Answer, Fleet, FleetTimes
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.recording import RunRecorder
from tidegate.orchestrator.rollout import Rollout
from tidegate.orchestrator.tasks import NO_MORE, Tasks, TaskSource
from tidegate.orchestrator.waiting import Waiting, fail, resolve
from tidegate.orchestrator.weights import Outgoing, WeightCoordinator
from tidegate.orchestrator.wire import Wire
from tidegate.transport.messages import (
    CancelTurn,
    FromEngine,
    InitWeights,
    Refused,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)

TASKS_PER_TURN = 32
"""Tasks taken from the user's iterator before the loop sees to its sockets again."""

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
        recorder: RunRecorder | None,
    ) -> None:
        self._settings = settings
        self._router = router
        self._recorder = recorder
        self.core = Core(settings.policy(), group_size=settings.group_size)
        times = FleetTimes(
            settings.heartbeat_interval_s, settings.engine_timeout_s, settings.credit_steps
        )
        self.fleet = Fleet(times, router.send)
        self._weights = WeightCoordinator(
            init_weights, pause_mode=settings.pause_mode, kv_policy=settings.kv_policy
        )
        self._waiting = Waiting()
        self._episodes = EpisodeRunner(settings, model, self._waiting, self._handle)
        self._tasks: TaskSource | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._wants_tasks = asyncio.Event()
        self._episode: EpisodeFunction | None = None
        self._undelivered: deque[ev.HandOver | None] = deque()
        """Handed over to a trainer that had stopped waiting: what it gets next."""
        self.on_engine_silent: Callable[[str], None] = lambda engine: None
        """Told of engines that were given up for their silence."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until cancelled, or until something fails that the run can't do without.

        Cancelling leaves no task behind; engines are told nothing, see :meth:`Fleet.send`.
        """
        loop = asyncio.get_running_loop()
        self._router.attach(loop, self._on_frames)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._tick(), name="heartbeats")
                await self._failure
        finally:
            self._group = None
            self._router.detach()

    def fail_waiters(self, error: BaseException) -> None:
        """Tell everybody who still waits that nothing will come."""
        self._waiting.fail_all(error)

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def close(self) -> None:
        """Settle what is unfinished as discarded; nothing may be asked any more."""
        self._handle([ev.RunEnded()])

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        alone_since_s: float | None = None
        while True:
            silent = self.fleet.tick(loop.time())
            self._handle(silent)
            for event in silent:
                if isinstance(event, ev.EngineLeft):
                    self.on_engine_silent(event.engine)
            if self.fleet.engines:
                alone_since_s = None
            elif alone_since_s is None:
                alone_since_s = loop.time()
            elif loop.time() - alone_since_s > self._settings.engine_start_timeout_s:
                raise EngineLost(_no_engine_left(self.fleet.departed))
            await asyncio.sleep(self._settings.heartbeat_interval_s)

    # ------------------------------------------------------------ engines

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        try:
            for item in self.fleet.hear(frames, asyncio.get_running_loop().time()):
                self._on_heard(item)
        except Exception as error:  # noqa: BLE001 - ours: it ends the run, not only this callback
            self.fail(error)

    def _on_heard(self, item: ev.Event | Answer) -> None:
        if isinstance(item, Answer):
            self._on_answer(item.engine, item.message)
            return
        self._handle([item])
        if self._recorder is not None and isinstance(item, ev.StepArrived):
            self._recorder.engine_step(
                item.engine, item.started_us, item.busy_us, item.version, len(item.turns)
            )

    def _on_answer(self, engine: str, message: FromEngine) -> None:
        match message:
            case WeightsStaged(version=version):
                self._send(self._weights.staged(engine, version))
                self._note_engine(engine, "staged", version=version)
            case WeightsLive(version=version):
                self._weights.live(engine, version)
                self._note_engine(engine, "swap", at_us=message.swapped_us, version=version)
                self._handle([ev.EngineSwapped(engine, version)])
            case WeightsFailed(version=version, message=why):
                if self._weights.refused(engine, version, why):
                    self.fleet.send(engine, Refused(message=why))
                    self._handle(self.fleet.lose(engine, f"could not take weights: {why}"))
            case _:
                log.warning("engine=%s said %s", engine, message)
        self._waiting.notify()

    def engine_ended(self, engine: str, why: str) -> None:
        """The process of a local engine has ended."""
        self._handle(self.fleet.lose(engine, why))

    def _note_engine(self, engine: str, name: str, at_us: int = 0, **about: int) -> None:
        if self._recorder is not None:
            at_us = at_us or time.monotonic_ns() // 1000
            self._recorder.engine_event(engine, name, at_us, **about)

    def _send(self, outgoing: Outgoing) -> None:
        for engine, message in outgoing:
            self.fleet.send(engine, message)

    async def wait_for_engines(self, count: int) -> None:
        """Return once ``count`` engines have joined."""
        await self._waiting.until(lambda: len(self.fleet.engines) >= count)

    # ------------------------------------------------------------ events and commands

    def _handle(self, events: Iterable[ev.Event], episode: EpisodeFunction | None = None) -> None:
        """Feed events to the core and carry out its commands, in order."""
        for event in events:
            match event:
                case ev.EngineJoined(engine=engine, weight_version=version):
                    self._send(self._weights.joined(engine, version))
                    self._waiting.notify()
                case ev.EngineLeft(engine=engine):
                    log.warning("engine=%s lost: %s", engine, self.fleet.departed.get(engine))
                    self._weights.left(engine)
                    self._note_engine(engine, "lost")
                    self._waiting.notify()
            for command in self.core.handle(event):
                self._act(command, episode)
        if self.core.capacity_groups:
            self._wants_tasks.set()

    def _act(self, command: ev.Command, episode: EpisodeFunction | None) -> None:
        match command:
            case ev.Submit(engine=engine, message=message):
                self.fleet.send(engine, message)
            case ev.EndTurn(turn=turn):
                resolve(self._waiting.turns.pop(turn.rollout.rollout_id, None), turn)
            case ev.StartEpisode(rollout=rollout, task=task):
                function = episode or self._episode
                assert self._group is not None
                assert function is not None
                name = f"rollout {rollout.rollout_id}"
                self._group.create_task(self._episodes.run(rollout, task, function), name=name)
            case ev.HandOver():
                resolve(self._waiting.batches.popleft(), command)
            case ev.EndBatches():
                resolve(self._waiting.batches.popleft(), None)
            case ev.RefuseBatch(unpublished_groups=groups):
                limit = self.core.policy.outstanding_groups_max
                error = PublishNeeded(unpublished_groups=groups, outstanding_groups_max=limit)
                fail(self._waiting.batches.popleft(), error)
            case ev.FailTurn(turn=turn, message=why):
                fail(self._waiting.turns.pop(turn.rollout.rollout_id, None), TurnRefused(why))
            case ev.EndEvaluation(rollout=rollout):
                resolve(self._waiting.evaluations.pop(rollout.rollout_id, None), rollout)
            case ev.Cancel(engine=engine, handle=handle):
                self.fleet.send(engine, CancelTurn(turn=handle))
            case ev.RequeueTask(task=task):
                assert self._tasks is not None
                self._tasks.put_back(task)
            case ev.Record(rollout=rollout, task=task):
                if self._recorder is not None:
                    self._recorder.rollout(
                        rollout, task=task, advantage=None, consumed_version=None
                    )

    # ------------------------------------------------------------ tasks

    async def _feed(self, source: TaskSource) -> None:
        """Take tasks from the user's iterator as capacity allows."""
        while True:
            taken = 0
            while self.core.capacity_groups:
                task = await source.next()
                if task is NO_MORE:
                    self._handle([ev.TasksExhausted()])
                    break
                self._handle([ev.TaskArrived(task)])
                taken += 1
                if source.has_ended():
                    self._handle([ev.TasksExhausted()])
                elif taken % TASKS_PER_TURN == 0:
                    await asyncio.sleep(0)
            self._wants_tasks.clear()
            await self._wants_tasks.wait()

    # ------------------------------------------------------------ what the trainer asks for

    def offer(self, tasks: Tasks, episode: EpisodeFunction) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``."""
        assert self._group is not None
        if self._feeding is not None:
            self._feeding.cancel()  # it may wait for an iterator that nobody wants any more
        self._tasks = TaskSource(tasks)
        self._episode = episode
        self._feeding = self._group.create_task(self._feed(self._tasks), name="tasks")
        self._handle([ev.TasksOffered()])

    async def next_batch(self) -> ev.HandOver | None:
        """The next batch, or None when the tasks are used up."""
        if self._undelivered:
            return self._undelivered.popleft()
        future: asyncio.Future[ev.HandOver | None] = asyncio.get_running_loop().create_future()
        self._waiting.batches.append(future)
        self._handle([ev.BatchAsked()])
        try:
            return await future
        except asyncio.CancelledError:
            if future in self._waiting.batches:
                self._waiting.batches.remove(future)
                self._handle([ev.BatchNotWanted()])
            elif not future.cancelled() and future.exception() is None:
                self._undelivered.append(future.result())
            raise

    async def evaluate(self, tasks: list[Any], episode: EpisodeFunction) -> list[Rollout]:
        """Run one episode per task, outside training; the rollouts, in the order of the tasks."""
        loop = asyncio.get_running_loop()
        futures = []
        for index, task in enumerate(tasks):
            future: asyncio.Future[Rollout] = loop.create_future()
            futures.append(future)
            commands = self.core.handle(ev.EvaluationAsked(task, index))
            for command in commands:
                if isinstance(command, ev.StartEpisode):
                    self._waiting.evaluations[command.rollout.rollout_id] = future
                self._act(command, episode)
        return [await future for future in futures]

    async def reserve_version(self) -> int:
        """Wait until no engine reads the weight channel's buffer; the version to write there.

        It must be followed by :meth:`publish` or :meth:`release_version`.

        Raises:
            EngineLagging: an engine still read it after ``weights_timeout_s``.
            RuntimeError: another publish is under way.
        """
        if self._weights.is_reserved:
            raise RuntimeError("another publish is under way; await it before the next")
        self._weights.is_reserved = True
        try:
            async with asyncio.timeout(self._settings.weights_timeout_s):
                await self._waiting.until(lambda: self._weights.is_settled)
        except TimeoutError:
            self.release_version()
            raise self._lagging() from None
        except asyncio.CancelledError:
            self.release_version()
            raise
        return self.core.trainer_version + 1

    def release_version(self) -> None:
        """Nothing will be published under the version reserved."""
        self._weights.is_reserved = False

    async def publish(self, version: int, chunks: list[UpdateWeights]) -> None:
        """Bring new weights to every engine; return once all serve them.

        If it fails or is cancelled before every engine has staged them, none will swap.

        Raises:
            EngineLagging: some engine did not, within ``weights_timeout_s``. It is given up.
            WeightsRefused: the weights don't fit the model; the old ones serve on.
        """
        try:
            self._send(self._weights.publish(version, chunks))
            async with asyncio.timeout(self._settings.weights_timeout_s):
                await self._bring(version)
        except TimeoutError:
            error = self._lagging()
            for engine in error.engines:
                self._handle(self.fleet.lose(engine, str(error)))
                self.on_engine_silent(engine)
            raise error from None
        finally:
            self._weights.withdraw()  # does nothing once they were told to swap
            self.release_version()

    async def _bring(self, version: int) -> None:
        update = self._weights.update
        assert update is not None
        await self._waiting.until(lambda: not update.staging)
        for engine, why in update.refusals.items():
            raise WeightsRefused(f"engine {engine!r} refused weights v{version}: {why}")
        self._handle([ev.VersionPublished(version)])
        self._send(self._weights.release())
        await self._waiting.until(lambda: self._weights.is_settled)

    def _lagging(self) -> EngineLagging:
        update = self._weights.update
        return EngineLagging(
            engines=self._weights.engines_behind,
            wanted_version=update.version if update else 0,
            waited_s=self._settings.weights_timeout_s,
        )


def _no_engine_left(departed: Mapping[str, str]) -> str:
    stories = "; ".join(f"{name}: {why}" for name, why in departed.items())
    return f"no engine is left, and none has come since ({stories or 'none ever joined'})"
