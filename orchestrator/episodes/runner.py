"""Runs users' episodes, one task per rollout, each within its timeout.

The scheduler makes one runner; episodes send their requests through it. An exception in an episode
ends that episode only: the failure policy retries, rewards or discards its rollout. Too many failed
episodes end the run. When an episode ends, the core gets events for its turns' rewards and one for
its result; none if its rollout was discarded before, the run ends, or the episode never began. All
episodes have the same timeout, so they are due in the order in which they began: one timer serves
all, because one ``asyncio.timeout`` each would cost as much as a short episode.
"""

import asyncio
import contextlib
import inspect
import math
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any, Generic, TypeVar

from tidegate.errors import ConfigError, EpisodeError, RunClosed
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.failure_counts import FailureKey
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.activities import Activities
from tidegate.orchestrator.episodes.contained_tasks import is_interrupt
from tidegate.orchestrator.episodes.episode import Episode, refuse_too_large
from tidegate.orchestrator.episodes.failures import (
    EpisodeFailures,
    EpisodeTimedOut,
    FailureClass,
    Lacked,
    classify,
    outcome_of,
    place_of,
)
from tidegate.orchestrator.episodes.generated_turn import checked_reward
from tidegate.orchestrator.episodes.model_files import ModelFiles
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.orchestrator.fleet.pending_futures import PendingFutures, fail
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery
from tidegate.orchestrator.settings.config import EpisodeSettings, SamplingSettings
from tidegate.orchestrator.telemetry.recorder import EpisodeObserver
from tidegate.policies.failures import FailureCause
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

CANCEL_GRACE_S = 5.0
"""Time that a cancelled asyncio task has to clean up. A task that runs longer has probably caught
``CancelledError``, and is given up, because nothing can stop it."""

SUSPENDED_CHECK_INTERVAL_S = 1.0
"""Interval of the timer while all clocks are stopped, when nothing is due."""

Task = TypeVar("Task", bound="asyncio.Task[Any]")


class Deadlines(Generic[Task]):
    """Cancels asyncio tasks that have not ended ``timeout_s`` after :meth:`begin`."""

    def __init__(
        self,
        timeout_s: float,
        give_up: Callable[[Task], None],
        on_due: Callable[[Task], None] = lambda task: None,
    ) -> None:
        """``give_up`` is called with a task that still runs ``CANCEL_GRACE_S`` after its cancel;
        ``on_due`` with a task whose time is up, before its cancel."""
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._on_due = on_due
        self._due_s: dict[Task, float] = {}
        """Deadline of each task on the loop's clock, earliest first."""
        self._is_sorted = True
        """Whether the deadlines are sorted; they are not after a held task was released."""
        self._held: dict[Task, float] = {}
        """Tasks whose clock is stopped, with the seconds that they have left."""
        self._cancelled: dict[Task, float] = {}
        """Cancelled tasks with the time at which each is given up, earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._suspended_at_s: float | None = None
        """Time on the loop's clock at which all tasks' clocks were stopped; None while they run."""

    def suspend(self, now_s: float) -> None:
        """Stop all clocks. Tasks that were cancelled already keep their deadline."""
        if self._suspended_at_s is None:
            self._suspended_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Start all clocks again, with as much time left as before. Harmless if repeated."""
        if self._suspended_at_s is None:
            return
        late_s = now_s - self._suspended_at_s
        self._suspended_at_s = None
        self._due_s = {task: due_s + late_s for task, due_s in self._due_s.items()}

    def begin(self, task: Task) -> None:
        """Start this task's clock."""
        loop = task.get_loop()
        due_s = self._due_s[task] = self._now_s(loop) + self._timeout_s
        if self._timer is None or self._timer.when() > due_s:
            self._call_by(due_s, loop)

    def left_s(self, task: Task) -> float:
        """Return the seconds that a task has left; infinite if its time is up or never began."""
        if task in self._held:
            return self._held[task]
        due_s = self._due_s.get(task)
        return math.inf if due_s is None else due_s - self._now_s(task.get_loop())

    def hold(self, task: Task) -> None:
        """Stop this task's own clock. Does nothing if its time is up."""
        left_s = self.left_s(task)
        if self._due_s.pop(task, None) is not None:
            self._held[task] = left_s

    def release(self, task: Task) -> None:
        """Start a held task's clock again. Harmless if it isn't held."""
        left_s = self._held.pop(task, None)
        if left_s is not None:
            loop = task.get_loop()
            due_s = self._due_s[task] = self._now_s(loop) + left_s
            self._is_sorted = False  # thousands may be released together: sort once
            if self._timer is None or self._timer.when() > due_s:
                self._call_by(due_s, loop)

    def cancel_now(self, task: Task) -> None:
        """Cancel this task now. Does nothing if its time is up."""
        if self._due_s.pop(task, None) is not None or self._held.pop(task, None) is not None:
            loop = task.get_loop()
            self._cancelled[task] = loop.time() + CANCEL_GRACE_S
            task.cancel()
            self._set_timer(loop)

    def end(self, task: Task) -> bool:
        """Stop tracking a task that ends; return whether this object has cancelled it.

        This object cancels a task at its deadline or in :meth:`cancel_now`. False if other code has
        cancelled the task as well.
        """
        if self._due_s.pop(task, None) is not None or self._held.pop(task, None) is not None:
            return False
        self._cancelled.pop(task, None)
        return task.uncancel() == 0

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        self._sort()
        for task in _take_due(self._due_s, self._now_s(loop)):
            self._cancelled[task] = now_s + CANCEL_GRACE_S
            self._on_due(task)
            task.cancel()
        for task in _take_due(self._cancelled, now_s):
            self._give_up(task)
        self._set_timer(loop)

    def _now_s(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return the loop's time, or the time of :meth:`suspend` while all clocks are stopped."""
        return loop.time() if self._suspended_at_s is None else self._suspended_at_s

    def _call_by(self, due_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Have the timer run at ``due_s``, which is before its present time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._expire, loop)

    def _sort(self) -> None:
        if not self._is_sorted:
            self._due_s = dict(sorted(self._due_s.items(), key=lambda item: item[1]))
            self._is_sorted = True

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sort()
        if self._timer is not None:
            self._timer.cancel()
        firsts = [
            next(iter(waiting.values())) for waiting in (self._due_s, self._cancelled) if waiting
        ]
        self._timer = None
        if firsts:
            first_s = min(firsts)
            if self._suspended_at_s is not None:
                first_s = max(first_s, loop.time() + SUSPENDED_CHECK_INTERVAL_S)
            self._timer = loop.call_at(first_s, self._expire, loop)


def _take_due(waiting: dict[Task, float], now_s: float) -> list[Task]:
    due: list[Task] = []
    while waiting:
        task, due_s = next(iter(waiting.items()))
        if due_s > now_s:
            break
        del waiting[task]
        due.append(task)
    return due


EpisodeFunction = Callable[[Episode, Any], Awaitable[float | Mapping[str, float]]]
"""A user's episode: gets an :class:`Episode` and a task, returns the reward. With agents it may
return a reward for each adapter, by name."""

NO_REWARDS: tuple[tuple[str, float], ...] = ()

EPISODE_IS_OVER = "the episode has returned, so its rollout can't continue"

ENDED_REMEMBERED = 256
"""Number of ended episodes checked for leaks: enough to distinguish user code that keeps all
episodes from code that keeps a few."""


@dataclass(slots=True)
class EpisodeLeakTracker:
    """Tasks that do not end and ended episodes still referenced; the run's watchdog reports
    both."""

    uncancelled: set[int] = field(default_factory=set)
    """Ids of discarded or given-up rollouts whose cancelled episode still runs."""
    ended: deque[weakref.ref[Episode]] = field(
        default_factory=lambda: deque(maxlen=ENDED_REMEMBERED)
    )
    """Weak references to the episodes that ended last."""


class EpisodeTask(asyncio.Task[None]):
    """The asyncio task of one episode, with the runner's record of it."""

    __slots__ = ("episode", "function", "lacked", "parks_at_left_s", "rollout")

    def __init__(
        self, runner: "EpisodeRunner", rollout: Rollout, task: object, function: EpisodeFunction
    ) -> None:
        """``function`` is called with the episode and ``task`` when the task first runs."""
        self.rollout = rollout
        self.function = function
        self.lacked: Lacked = ""
        """What the episode waited for when its time was up."""
        self.episode: Episode | None = None
        """Episode object of the task; None until the task has begun."""
        self.parks_at_left_s = -math.inf
        """The episode has used its budget, and parks, when no more than these seconds are left
        before its deadline."""
        playing = runner.play(self, task, function)
        super().__init__(playing, loop=runner.loop, name=f"rollout {rollout.rollout_id}")


def _record_lack(task: EpisodeTask) -> None:
    """Record whether the episode waits for an engine or for scores, because cancelling it hides
    that."""
    last_turns = [row.turns[-1] for row in task.rollout.rows if row.turns]
    running = [turn for turn in last_turns if turn.finish_reason is None]
    if any(turn.place is None for turn in running):
        task.lacked = "engine"
    elif not running and task.episode is not None and task.episode.awaits_scores:
        task.lacked = "scores"


def _rewards_by_agent(value: object, rollout: Rollout) -> tuple[float, dict[str, float]]:
    """Return the reward of an episode's own rollout, and those of its agents by name.

    One number is the reward of all. A mapping has the agents' names, and that of the rollout's own
    adapter, which is empty for the run's weights.

    Raises:
        ConfigError: a reward is invalid, missing or one too many.
    """
    if not isinstance(value, Mapping):
        return checked_reward(value), {}
    names = {rollout.adapter, *rollout.agents}
    if set(value) != names:
        raise ConfigError(
            f"an episode with agents returns one reward, or one for each of {sorted(names)}; "
            f"got {value!r:.200}"
        )
    rewards = {name: checked_reward(value[name]) for name in names}
    return rewards[rollout.adapter], rewards


def call_episode(function: Callable[..., Awaitable[Any]], *given: object) -> Awaitable[Any]:
    """Call an episode function and return the awaitable of its reward. TRL's adapter calls it too.

    Raises:
        ConfigError: the function is not async.
        EpisodeError: the call raised; an async function raises when it is awaited.
    """
    try:
        awaitable = function(*given)
    except Exception as error:
        name, remedy = _name_and_remedy(function)
        raise EpisodeError(f"calling the episode {name} raised {error!r}: {remedy}") from error
    if not isinstance(awaitable, CoroutineType) and not inspect.isawaitable(awaitable):
        name, remedy = _name_and_remedy(function)
        raise ConfigError(f"the episode {name} is not async, it returned {awaitable!r}: {remedy}")
    return awaitable


def _name_and_remedy(function: Callable[..., Awaitable[Any]]) -> tuple[str, str]:
    name = getattr(function, "__name__", type(function).__name__)
    return name, f"define it with `async def {name}(episode, task)`"


class EpisodeRunner:
    """Runs the episodes of one run on its event loop, and serves their requests."""

    def __init__(
        self,
        settings: EpisodeSettings,
        sampling: SamplingSettings,
        model: ModelFiles,
        pending: PendingFutures,
        handle: Callable[[ev.Event], None],
        on_error: Callable[[BaseException], None],
        on_over: Callable[[Rollout], None] = lambda rollout: None,
        *,
        parking: Callable[[Rollout], Parking],
        score: Callable[[Rollout, Sequence[ScoreQuery]], Awaitable[list[Score]]],
        context_tokens_max: Callable[[], int] = lambda: 0,
        observers: Sequence[EpisodeObserver] = (),
    ) -> None:
        """``handle`` feeds events to the core; ``on_error`` gets errors that end the run, such as
        one failed episode too many; ``on_over`` gets rollouts that request no more turns, some of
        them twice; ``score`` queries engines; ``observers`` are told what episodes do.
        ``parking`` returns where the episode of a rollout waits for newer weights.
        ``context_tokens_max`` returns the longest context that an engine reads, 0 if unknown."""
        self.loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._deadlines = Deadlines(settings.episode_timeout_s, self._give_up, _record_lack)
        self._budget_s = settings.episode_park_after_s
        self._defaults = sampling
        self._model = model
        self._pending = pending
        self._handle = handle
        self._on_over = on_over
        self._parking = parking
        self._score = score
        self.context_tokens_max = context_tokens_max
        self.activities = Activities(self.loop.time)
        self._observers = tuple(observers)
        self._failures = EpisodeFailures()
        self._tasks: dict[int, EpisodeTask] = {}
        """Tasks of running episodes, by rollout id."""
        self._retries: dict[int, asyncio.TimerHandle] = {}
        """Timers of failed episodes that will begin again, by rollout id."""
        self._held: set[str] = set()
        """Trained adapters whose episodes' clocks are stopped."""
        self._is_ending = False
        self.leaks = EpisodeLeakTracker()
        self._new_row: Rollout | None = None
        self._failure: EpisodeError | None = None
        """Error that every further episode fails with, after too many failures."""

    def suspend_deadlines(self, is_halted: bool) -> None:
        """Stop the clocks of all episodes if ``is_halted``, as while engines are paused, or start
        them again."""
        change = self._deadlines.suspend if is_halted else self._deadlines.resume
        change(self.loop.time())

    def hold(self, adapter: str, is_held: bool) -> None:
        """Stop the clocks of the episodes of a trained adapter, or start them again."""
        change = self._deadlines.hold if is_held else self._deadlines.release
        for task in list(self._tasks.values()):
            if task.rollout.adapter == adapter:
                change(task)
        (self._held.add if is_held else self._held.discard)(adapter)

    def begin(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        """Start one episode."""
        if not self._is_ending:
            self._tasks[rollout.rollout_id] = EpisodeTask(self, rollout, task, function)

    def retry(self, rollout: Rollout, task: object, delay_s: float) -> None:
        """Start an episode that has just failed again, after ``delay_s``."""
        function = self._tasks[rollout.rollout_id].function
        self._retries[rollout.rollout_id] = self.loop.call_later(
            delay_s, self._retry_now, rollout, task, function
        )

    def _retry_now(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        del self._retries[rollout.rollout_id]
        self.begin(rollout, task, function)

    def stop(self, rollout: Rollout) -> None:
        """Cancel the episode of a discarded rollout, and ignore its result."""
        timer = self._retries.pop(rollout.rollout_id, None)
        if timer is not None:
            timer.cancel()
        task = self._tasks.get(rollout.rollout_id)
        if task is not None:
            self.leaks.uncancelled.add(rollout.rollout_id)  # until it has ended
            self._deadlines.cancel_now(task)
        self._on_over(rollout)

    async def end(self) -> None:
        """Cancel all episodes, let none begin, and return once all have ended."""
        self._is_ending = True
        for timer in self._retries.values():
            timer.cancel()
        self._retries.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        while unfinished := [task for task in tasks if not task.done()]:
            with contextlib.suppress(asyncio.CancelledError):  # if cancelled, still wait for them
                await asyncio.wait(unfinished)
        self._tasks.clear()  # a task that is cancelled before its first step runs no code of ours

    async def play(self, task: EpisodeTask, given: object, function: EpisodeFunction) -> None:
        """Run one episode to its end."""
        try:
            episode = task.episode = self._open(task)
            value = await call_episode(function, episode, given)
        except BaseException as error:  # it ends this episode and no other
            if self.loop.is_closed():
                raise  # nothing runs any more: Python closes the coroutine as garbage
            self._end(task, None, error)
        else:
            self._end(task, value, None)

    def _open(self, task: EpisodeTask) -> Episode:
        """Make the task's episode and start its deadline.

        Raises:
            CancelledError: the rollout was stopped already.
            EpisodeError: too many episodes have failed.
        """
        rollout = task.rollout
        if rollout.rollout_id in self.leaks.uncancelled:
            raise asyncio.CancelledError
        if self._failure is not None:
            raise self._failure
        episode = Episode(rollout, self._model, self, self._defaults)
        if math.isnan(rollout.began_s):
            rollout.began_s = self.loop.time()
        self._deadlines.begin(task)
        if rollout.adapter in self._held:
            self._deadlines.hold(task)
        if self._budget_s is not None:
            self._give_budget(task, self._budget_s)
        for observer in self._observers:
            observer.began(rollout)
        return episode

    def _end(self, task: EpisodeTask, value: object, error: BaseException | None) -> None:
        """Settle a task whose function has returned ``value``, or raised ``error``."""
        rollout, number = task.rollout, task.rollout.rollout_id
        try:
            try:
                error = self._report_end(task, value, error)
            finally:
                for observer in self._observers:
                    observer.ended(rollout, error)
                self.leaks.uncancelled.discard(number)
                del self._tasks[number]
                if number not in self._retries:
                    self._on_over(rollout)
                    for own in rollout.agents.values():
                        self._on_over(own)
        except BaseException as failure:  # noqa: BLE001 - one failed episode too many, or a defect
            self._on_error(failure)
        finally:
            # A traceback that begins in `_report_end` keeps the frames of its callers, too; with
            # the error in one of them, they would keep each other, and the episode.
            error = None

    def _report_end(
        self, task: EpisodeTask, value: object, error: BaseException | None
    ) -> BaseException | None:
        """Report a task's end to the core; nothing if its episode never began. Return the error
        that counts: a timeout instead of its cancel, or one of the returned reward."""
        rollout, episode = task.rollout, task.episode
        if episode is None:  # the task never began
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
            return error
        # Ignored if it was cancelled because its rollout was discarded, or the run ends.
        is_ignored = rollout.rollout_id in self.leaks.uncancelled or self._is_ending
        reward, of_agents = 0.0, NO_REWARDS
        try:
            if error is None:
                try:
                    if episode.agents:
                        reward, rewards = _rewards_by_agent(value, rollout)
                        of_agents = tuple([(n, rewards[n]) for n in rollout.agents if rewards])
                    else:
                        reward = checked_reward(value)
                except ConfigError as invalid:
                    error = ConfigError(f"the episode {place_of(task.function)}: {invalid}")
                except BaseException as invalid:  # noqa: BLE001 - a user's type may raise anything
                    error = invalid
            if error is None:
                self._deadlines.end(task)
                self._failures.succeed()
                self._end_episode(rollout, episode)
                if not is_ignored:
                    for turns in episode.turn_events():
                        self._handle(turns)
                    self._handle(ev.EpisodeReturned(rollout.rollout_id, reward, of_agents))
            elif is_interrupt(error):
                raise error
            else:
                error = self._report_failure(task, episode, error, is_ignored=is_ignored)
            return error
        finally:
            error = None  # as in `_end`

    def _report_failure(
        self, task: EpisodeTask, episode: Episode, error: BaseException, *, is_ignored: bool
    ) -> BaseException:
        rollout = task.rollout
        if self._deadlines.end(task) and isinstance(error, asyncio.CancelledError):
            late = EpisodeTimedOut("the episode exceeded its timeout", lacked=task.lacked)
            late.__cause__, error = error, late
        if is_ignored:
            self._end_episode(rollout, episode)
            return error
        failure = self._failures.known(classify(error, rollout))
        may_be_retried = failure.cause is FailureCause.INFRASTRUCTURE
        self._end_episode(rollout, episode, keeps_unrepeated=may_be_retried)
        if not may_be_retried:
            for turns in episode.turn_events():
                self._handle(turns)
        self._fail(rollout, error, failure)
        return error

    def _fail(
        self,
        rollout: Rollout,
        error: BaseException,
        failure: FailureClass,
        *,
        can_be_retried: bool = True,
    ) -> None:
        """Have the core retry, reward or discard a failed episode's rollout, then log the failure.

        Raises:
            EpisodeError: too many episodes have failed.
        """
        reason = failure.reason
        self._handle(ev.EpisodeFailed(rollout.rollout_id, reason, failure.cause, can_be_retried))
        key = FailureKey(failure.cause, reason, outcome_of(rollout, reason))
        self._failures.fail(rollout.rollout_id, rollout.group_id, error, key)

    def _end_episode(
        self, rollout: Rollout, episode: Episode, *, keeps_unrepeated: bool = False
    ) -> None:
        """Close an episode's context, unless the run ends: a resumed run continues it."""
        rollout.ended_s = self.loop.time()
        if not self._is_ending:
            self._settle(rollout, episode, keeps_unrepeated=keeps_unrepeated)

    def _settle(
        self, rollout: Rollout, episode: Episode, *, keeps_unrepeated: bool = False
    ) -> None:
        episode.end(keeps_unrepeated=keeps_unrepeated)
        self.leaks.ended.append(weakref.ref(episode))
        rows: list[Rollout | Episode] = [rollout]
        if episode.branches or episode.agents:
            # The rollout has dropped rows without tokens; the episode still has them.
            rows = [row for each in (episode, *episode.agents.values()) for row in each.rows]
        for row in rows:
            turn = self._pending.turns.pop(row.rollout_id, None)
            if turn is not None:
                fail(turn, RunClosed(EPISODE_IS_OVER))

    def _give_up(self, task: EpisodeTask) -> None:
        """Settle a rollout whose episode still runs after it was cancelled at its deadline."""
        rollout, episode = task.rollout, task.episode
        assert episode is not None, "its time has begun with it"
        self._settle(rollout, episode)
        if rollout.rollout_id in self.leaks.uncancelled:
            return  # it was stopped: the core has settled it
        self.leaks.uncancelled.add(rollout.rollout_id)
        late = EpisodeTimedOut(
            "the episode exceeded its timeout and did not end after its cancel",
            lacked=task.lacked,
        )
        failure = self._failures.known(classify(late, rollout))
        try:
            self._fail(rollout, late, failure, can_be_retried=False)
        except EpisodeError as error:
            self._failure = error

    # ------------------------------------------------------------ requests of episodes

    def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> "asyncio.Future[Turn]":
        """Request a new turn; the future is done when the turn has ended. ``media`` are new in the
        context.

        Raises:
            TurnRefused: the context is longer than any engine can read, or too large for a message.
        """
        if self.leaks.uncancelled:
            self._refuse_if_given_up(rollout)
        refuse_too_large(rollout, sampling, media, self.context_tokens_max())
        future = self.rejoin(rollout)
        self._handle(ev.TurnRequested(rollout.rollout_id, sampling, media))
        return future

    def rejoin(self, rollout: Rollout) -> "asyncio.Future[Turn]":
        """Return a future of the turn that this rollout has on an engine, such as after a
        resume."""
        future: asyncio.Future[Turn] = self.loop.create_future()
        self._pending.turns[rollout.rollout_id] = future
        for observer in self._observers:
            observer.turn_started(rollout, future)
        return future

    def subscribe(
        self, rollout: Rollout, event: asyncio.Event, turn: "asyncio.Future[Any]"
    ) -> None:
        """Set ``event`` at each step with tokens of this rollout, until its ``turn`` is done."""
        self._pending.subscribe(rollout.rollout_id, event, turn)

    def is_over_budget(self, rollout: Rollout) -> bool:
        """Whether the episode has used its budget, since it began or was last parked."""
        if self._budget_s is None:
            return False
        task = self._tasks.get(rollout.episode_id)
        return task is not None and self._deadlines.left_s(task) <= task.parks_at_left_s

    async def park(self, rollout: Rollout) -> None:
        """Return once newer weights are live, or the trainer waits for rollouts.

        The episode's clock is stopped while any of its rows waits here.
        """
        self._refuse_if_given_up(rollout)
        number = rollout.episode_id
        task = self._tasks[number]
        for observer in self._observers:
            observer.parked(rollout)
        parking = self._parking(rollout)
        if parking.can_get_newer_weights:
            self._deadlines.hold(task)
        try:
            await parking.wait(number)
        finally:
            if number not in parking.rows:
                self._deadlines.release(task)
            if self._budget_s is not None:
                self._give_budget(task, self._budget_s)
        for observer in self._observers:
            observer.unparked(rollout)

    def _give_budget(self, task: EpisodeTask, budget_s: float) -> None:
        task.parks_at_left_s = self._deadlines.left_s(task) - budget_s

    @contextlib.contextmanager
    def activity(self, rollout: Rollout, name: str) -> Iterator[None]:
        """Count the time within as a named activity of the episode."""
        name = self.activities.begin(name)
        try:
            with contextlib.ExitStack() as observed:
                for observer in self._observers:
                    observed.enter_context(observer.activity(rollout, name))
                yield
        finally:
            self.activities.end(name)

    def score(self, rollout: Rollout, queries: Sequence[ScoreQuery]) -> Awaitable[list[Score]]:
        """Have the run's engines score the queries' tokens."""
        self._refuse_if_given_up(rollout)
        return self._score(rollout, queries)

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Make another row for this row's episode, with an empty context."""
        self._refuse_if_given_up(rollout)
        self._handle(ev.RolloutForked(rollout.rollout_id, reason))
        if self._new_row is None:
            raise RunClosed(EPISODE_IS_OVER)
        row, self._new_row = self._new_row, None
        return row

    def forked(self, row: Rollout) -> None:
        """Keep the row that the core has made, for :meth:`fork` to return."""
        self._new_row = row

    def _refuse_if_given_up(self, rollout: Rollout) -> None:
        if rollout.episode_id in self.leaks.uncancelled:
            raise RunClosed(
                "this rollout was discarded and its episode cancelled; let CancelledError end it"
            )

    def give_up_turn(self, rollout: Rollout) -> None:
        """Cancel this rollout's turn."""
        self._pending.turns.pop(rollout.rollout_id, None)
        self._handle(ev.TurnAbandoned(rollout.rollout_id))

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Keep ``turns`` turns of the rollout, and its context up to the last kept turn's end."""
        if rollout.episode_id in self.leaks.uncancelled:
            return  # it is settled
        self._handle(ev.RolloutCut(rollout.rollout_id, turns, tokens, "went_another_way"))
