"""The asyncio shell around the core: all of the waiting, none of the deciding.

One event loop, whose thread owns everything here. Frames from engines, ends of episodes and wishes
of the trainer become events; the core's commands are carried out at once, in order.
"""

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import EngineLagging, EpisodeError, PublishNeeded, TurnRefused, WeightsRefused
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.core import Core
from tidegate.orchestrator.episode import Episode, SamplingDefaults, checked_reward
from tidegate.orchestrator.fleet import Answer, Fleet, FleetTimes
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.recording import RunRecorder
from tidegate.orchestrator.rollout import Rollout, Turn
from tidegate.orchestrator.tasks import NO_MORE, Tasks, TaskSource
from tidegate.orchestrator.weights import Outgoing, WeightCoordinator
from tidegate.transport.messages import (
    CancelTurn,
    FromEngine,
    InitWeights,
    SamplingParams,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.sockets import RouterSocket

EpisodeFunction = Callable[[Episode, Any], Awaitable[float]]
"""A user's episode: gets the context and a task, returns the reward."""

EPISODE_FAILURES_MAX = 100
"""So many failed episodes in a row, without one success, end the run: the code is wrong, not a
task. Fewer would let one bad batch of tasks end it."""

TASKS_PER_TURN = 32
"""Tasks taken from the user's iterator before the loop sees to its sockets again."""

log = logging.getLogger("tidegate")


@dataclass(slots=True)
class Waiting:
    """Who waits for what, on this loop."""

    turns: dict[int, asyncio.Future[Turn]] = field(default_factory=dict)
    """By rollout."""
    batches: deque[asyncio.Future[ev.HandOver | None]] = field(default_factory=deque)
    evaluations: dict[int, asyncio.Future[Rollout]] = field(default_factory=dict)
    """By rollout."""
    conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)
    """Looked at whenever an engine or its weights have changed."""

    def futures(self) -> "list[asyncio.Future[Any]]":
        """All of them."""
        conditions = [future for _, future in self.conditions]
        return [*self.turns.values(), *self.batches, *self.evaluations.values(), *conditions]


class Scheduler:
    """A run: a core, a fleet and the user's episodes, on one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        model: ModelFiles,
        router: RouterSocket,
        init_weights: InitWeights,
        *,
        recorder: RunRecorder | None,
    ) -> None:
        self._settings = settings
        self._model = model
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
        self._tasks: TaskSource | None = None
        self._wants_tasks = asyncio.Event()
        self._episode: EpisodeFunction | None = None
        self._failures_in_a_row = 0
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._defaults = SamplingDefaults(settings.max_tokens, settings.temperature, settings.seed)

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
                group.create_task(self._feed(), name="tasks")
                await self._failure
        finally:
            self._group = None
            self._router.detach()

    def fail_waiters(self, error: BaseException) -> None:
        """Tell everybody who still waits that nothing will come."""
        for future in self._waiting.futures():
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: a waiter that is gone is no news

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def close(self) -> None:
        """Settle what is unfinished as discarded; nothing may be asked any more."""
        self._handle([ev.RunEnded()])

    async def _tick(self) -> None:
        while True:
            self._handle(self.fleet.tick(time.monotonic()))
            await asyncio.sleep(self._settings.heartbeat_interval_s)

    # ------------------------------------------------------------ engines

    def _on_frames(self, frames: list[tuple[bytes, bytes]]) -> None:
        for item in self.fleet.hear(frames, time.monotonic()):
            if isinstance(item, Answer):
                self._on_answer(item.engine, item.message)
                continue
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
                self._weights.refused(engine, version, why)
            case _:
                log.warning("engine=%s said %s", engine, message)
        self._notify()

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

    def _notify(self) -> None:
        """Wake whose condition has come true."""
        waiting, self._waiting.conditions = self._waiting.conditions, []
        for condition, future in waiting:
            if condition():
                _resolve(future, None)
            elif not future.done():
                self._waiting.conditions.append((condition, future))

    async def _until(self, condition: Callable[[], bool]) -> None:
        if not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.conditions.append((condition, future))
            await future

    async def wait_for_engines(self, count: int) -> None:
        """Return once ``count`` engines have joined."""
        await self._until(lambda: len(self.fleet.engines) >= count)

    # ------------------------------------------------------------ events and commands

    def _handle(self, events: Iterable[ev.Event], episode: EpisodeFunction | None = None) -> None:
        """Feed events to the core and carry out its commands, in order."""
        for event in events:
            match event:
                case ev.EngineJoined(engine=engine, weight_version=version):
                    self._send(self._weights.joined(engine, version))
                    self._notify()
                case ev.EngineLeft(engine=engine):
                    log.warning("engine=%s lost: %s", engine, self.fleet.departed.get(engine))
                    self._weights.left(engine)
                    self._note_engine(engine, "lost")
                    self._notify()
            for command in self.core.handle(event):
                self._act(command, episode)
        if self.core.capacity_groups:
            self._wants_tasks.set()

    def _act(self, command: ev.Command, episode: EpisodeFunction | None) -> None:
        match command:
            case ev.Submit(engine=engine, message=message):
                self.fleet.send(engine, message)
            case ev.EndTurn(turn=turn):
                _resolve(self._waiting.turns.pop(turn.rollout.rollout_id, None), turn)
            case ev.StartEpisode(rollout=rollout, task=task):
                self._start_episode(rollout, task, episode or self._episode)
            case ev.HandOver():
                _resolve(self._waiting.batches.popleft(), command)
            case ev.EndBatches():
                _resolve(self._waiting.batches.popleft(), None)
            case ev.RefuseBatch(unpublished_groups=groups):
                limit = self.core.policy.outstanding_groups_max
                error = PublishNeeded(unpublished_groups=groups, outstanding_groups_max=limit)
                _fail(self._waiting.batches.popleft(), error)
            case ev.FailTurn(turn=turn, message=why):
                _fail(self._waiting.turns.pop(turn.rollout.rollout_id, None), TurnRefused(why))
            case ev.EndEvaluation(rollout=rollout):
                _resolve(self._waiting.evaluations.pop(rollout.rollout_id, None), rollout)
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

    # ------------------------------------------------------------ episodes

    def _start_episode(
        self, rollout: Rollout, task: object, function: EpisodeFunction | None
    ) -> None:
        assert self._group is not None
        assert function is not None
        self._group.create_task(
            self._run_episode(rollout, task, function), name=f"rollout {rollout.rollout_id}"
        )

    async def _run_episode(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        """Run one episode to its end; whatever it raises costs this rollout and no other."""
        episode = Episode(rollout, self._model, self._ask_for_turn, self._defaults)
        event: ev.Event
        try:
            async with asyncio.timeout(self._settings.episode_timeout_s) as timeout:
                reward = checked_reward(await function(episode, task))
            event = ev.EpisodeReturned(rollout.rollout_id, reward)
            self._failures_in_a_row = 0
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            is_timeout = isinstance(error, TimeoutError) and timeout.expired()
            event = ev.EpisodeFailed(
                rollout.rollout_id, "episode_timeout" if is_timeout else "episode_error"
            )
            self._count_failure(rollout, error)
        self._waiting.turns.pop(rollout.rollout_id, None)
        self._handle([event])

    def _count_failure(self, rollout: Rollout, error: Exception) -> None:
        self._failures_in_a_row += 1
        story = "".join(traceback.format_exception(error))
        log.warning("rollout=%d discarded, its episode failed:\n%s", rollout.rollout_id, story)
        if self._failures_in_a_row >= EPISODE_FAILURES_MAX:
            raise EpisodeError(
                f"the episode failed {self._failures_in_a_row} times in a row without one "
                f"success; the last time with {type(error).__name__}: {error}"
            ) from error

    async def _ask_for_turn(self, rollout: Rollout, sampling: SamplingParams) -> Turn:
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.turns[rollout.rollout_id] = future
        self._handle([ev.TurnAsked(rollout.rollout_id, sampling)])
        return await future

    # ------------------------------------------------------------ tasks

    async def _feed(self) -> None:
        """Take tasks from the user's iterator as capacity allows."""
        while True:
            await self._wants_tasks.wait()
            self._wants_tasks.clear()
            taken = 0
            while self._tasks is not None and self.core.capacity_groups:
                task = await self._tasks.next()
                if task is NO_MORE:
                    self._handle([ev.TasksExhausted()])
                    break
                self._handle([ev.TaskArrived(task)])
                taken += 1
                if self._tasks.has_ended():
                    self._handle([ev.TasksExhausted()])
                    break
                if taken % TASKS_PER_TURN == 0:
                    await asyncio.sleep(0)

    # ------------------------------------------------------------ what the trainer asks for

    def offer(self, tasks: Tasks, episode: EpisodeFunction) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``."""
        self._tasks = TaskSource(tasks)
        self._episode = episode
        self._handle([ev.TasksOffered()])

    async def next_batch(self) -> ev.HandOver | None:
        """The next batch, or None when the tasks are used up."""
        future: asyncio.Future[ev.HandOver | None] = asyncio.get_running_loop().create_future()
        self._waiting.batches.append(future)
        self._handle([ev.BatchAsked()])
        return await future

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

    async def wait_until_writable(self) -> None:
        """Return once no engine reads the weight channel's buffer any more.

        Raises:
            EngineLagging: one still did after ``weights_timeout_s``.
        """
        try:
            async with asyncio.timeout(self._settings.weights_timeout_s):
                await self._until(lambda: self._weights.is_settled)
        except TimeoutError:
            raise self._lagging() from None

    def _lagging(self) -> EngineLagging:
        update = self._weights.update
        return EngineLagging(
            engines=self._weights.engines_behind,
            wanted_version=update.version if update else 0,
            waited_s=self._settings.weights_timeout_s,
        )

    async def publish(self, version: int, chunks: list[UpdateWeights]) -> None:
        """Bring new weights to every engine; return once all serve them.

        Raises:
            EngineLagging: some engine did not, within ``weights_timeout_s``.
            WeightsRefused: the weights don't fit the model; the old ones serve on.
        """
        self._send(self._weights.publish(version, chunks))
        update = self._weights.update
        assert update is not None
        try:
            async with asyncio.timeout(self._settings.weights_timeout_s):
                await self._until(lambda: not update.staging)
                if not update.refusals:
                    self._handle([ev.VersionPublished(version)])
                    self._send(self._weights.release())
                    await self._until(lambda: self._weights.is_settled)
        except TimeoutError:
            raise self._lagging() from None
        for engine, why in update.refusals.items():
            self._weights.abandon()
            raise WeightsRefused(f"engine {engine!r} refused weights v{version}: {why}")


def _resolve(future: "asyncio.Future[Any] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any] | None", error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
